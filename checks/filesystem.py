"""What the kernel log says of file systems: errors, volumes that the kernel stopped, servers that do not answer.

Rules: a file server that fails over is silent for minutes and hard mounts survive it, so silence warns until the log
says that it answers again; the check mount asks the mounts themselves and judges. So does block_device for the node's
own file systems that the kernel stopped: here are those of containers and image files only, which warn. An error after
which the kernel goes on with a file system warns. What a client says of single requests is nothing by itself.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from healthd.api import CheckSettings, Clears, Explain, Finding, Inventory, KernelEvent, Seconds, Severity

USES = ""

NAMES = {
    **dict.fromkeys(("remount_ro", "shutdown", "journal_abort"), ("volume_stopped",)),
    **dict.fromkeys(("error", "corruption", "io_error"), ("errors",)),
    "mount_failed": ("mount_failed",),
    "not_responding": ("not_responding",),
    "evicted": ("evicted",),
    "ok": ("not_responding", "evicted"),  # the client is connected again
    "lbug": ("lustre_bug",),
}
WORDS = {
    "volume_stopped": "{fs} on {part} was turned read-only or shut down by the kernel",
    "errors": "{fs} on {part} found errors",
    "mount_failed": "{fs} on {part} could not be mounted",
    "not_responding": "the {fs} server {part} does not answer",
    "evicted": "the {fs} server {part} threw this client out",
    "lustre_bug": "a thread of Lustre's client stopped at a bug",
}
SERVERS = ("not_responding", "evicted")
MAX_NAME = 128  # characters of a server's name


class Config(CheckSettings, frozen=True):
    """error_window_seconds    how long errors of a file system stay a warning
    server_window_seconds   the same for a server, if the log never says that it answers again
    """

    error_window_seconds: Seconds = 24 * 3600.0
    server_window_seconds: Seconds = 24 * 3600.0


def correlate(events: Sequence[KernelEvent], node: Inventory, config: Config) -> Iterator[Finding]:
    """One finding for each name and volume or server, resting on all its events. It is over once a server answers."""
    groups: dict[tuple[str, str], list[KernelEvent]] = {}
    own = {mount.device for mount in node.mounts}
    for event in events:
        for name in NAMES.get(event.code, ()) if event.kind == "fs" else ():
            if not (name == "volume_stopped" and event.field("device") in own):
                groups.setdefault((name, _part(event)), []).append(event)
    for (name, part), group in groups.items():
        newest = max(group, key=lambda event: (event.last_time, event.sequence))
        over = newest.code == "ok"
        if over and all(event.code == "ok" for event in group):
            continue
        words = WORDS[name].format(fs=newest.field("fs"), part=part or "an unnamed device")
        lines = sum(event.lines for event in group if event.code != "ok")
        yield Finding(
            severity=Severity.WARNING,
            code=f"filesystem/{name}",
            subject=part,
            message=f"the server {part} answers again" if over else words + (f" ({lines} lines)" if lines > 1 else ""),
            clears=Clears.REBOOT if name == "lustre_bug" else Clears.WINDOW,
            window_seconds=config.server_window_seconds if name in SERVERS else config.error_window_seconds,
            events=tuple(event.sequence for event in group),
            shared_cause=name in SERVERS,
            over=over,
        )


def _part(event: KernelEvent) -> str:
    server = event.field("server")[:MAX_NAME]
    if server and event.field("fs") == "lockd":
        return f"{server} (lockd)"  # lockd answers, or is silent, on its own
    return server or event.field("device")


EXPLAIN = {
    "filesystem/volume_stopped": Explain(
        Severity.WARNING,
        Clears.WINDOW,
        "The kernel turned a file system read-only, or shut it down, that is none of the node's own: of a container, "
        "in an image file, or one that was mounted after healthd last looked. The node's own are block_device/stopped.",
        "Who uses that volume cannot write any more. Other jobs are not concerned.",
        "journalctl -k shows the first error. lsblk shows what the device is; unmount it, fsck or xfs_repair.",
        window="error_window_seconds",
    ),
    "filesystem/errors": Explain(
        Severity.WARNING,
        Clears.WINDOW,
        "The kernel found errors in a local file system, or could not read or write there, and goes on with it.",
        "Some files may be lost. If it gets worse the kernel stops the file system.",
        "journalctl -k for the device; look at the disk too (smartctl -a). Drain, unmount, fsck or xfs_repair.",
        window="error_window_seconds",
    ),
    "filesystem/mount_failed": Explain(
        Severity.WARNING,
        Clears.WINDOW,
        "The kernel could not mount a file system: its log or its superblock could not be read, or are wrong.",
        "What should be mounted there is missing. The check mount sees that of mounts that the settings name.",
        "journalctl -k for the device; fsck or xfs_repair. If its log cannot be replayed read xfs_repair(8) on -L.",
        window="error_window_seconds",
    ),
    "filesystem/not_responding": Explain(
        Severity.WARNING,
        Clears.WINDOW,
        "A file server does not answer (NFS, SMB, Lustre, Ceph). It ends when the kernel log says that it answers "
        "again, or after a day without news.",
        "Jobs that use it wait, and go on when it is back. With soft mounts they get errors.",
        "Look at the server and at the network. The check mount says whether mounts stand still, and drains for them.",
        shared=True,
        window="server_window_seconds",
    ),
    "filesystem/evicted": Explain(
        Severity.WARNING,
        Clears.WINDOW,
        "A file server threw this client out: it did not answer in time, or its network was gone. It ends when the log "
        "says that the client is connected again.",
        "What jobs had open there failed with input/output errors, and data not yet written is lost.",
        "Look for network errors at that time (ib_link, ib_errors). Many clients at once: look at the server.",
        shared=True,
        window="server_window_seconds",
    ),
    "filesystem/lustre_bug": Explain(
        Severity.WARNING,
        Clears.REBOOT,
        "Lustre's client found something impossible (LBUG or ASSERTION) and stopped the thread that did.",
        "Processes that wait for that thread never go on. Lustre's manual: only a reboot helps.",
        "Drain and reboot the node when its jobs have ended. Report the lines before LBUG to the file system's maker.",
        window="error_window_seconds",
    ),
}
