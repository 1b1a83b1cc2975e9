"""File system problems in the kernel log: errors, volumes that the kernel stopped, and servers that do not respond.

Rules: a file server may be silent for minutes during a failover, which hard mounts survive. A silent server is
therefore only a warning, until the log reports that it responds again. The check mount tests the mounts themselves. If
the kernel stopped one of the node's own file systems, block_device reports it. This check reports stopped file systems
of containers and image files, as a warning. It also warns about an error after which the kernel continues to use the
file system. A client's messages about single requests are ignored.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from healthd.api import (
    CheckSettings,
    Clears,
    Explain,
    FailureCause,
    Finding,
    Inventory,
    KernelEvent,
    Seconds,
    Severity,
)

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
MESSAGES = {
    "volume_stopped": "{fs} on {part} was turned read-only or shut down by the kernel",
    "errors": "{fs} on {part} found errors",
    "mount_failed": "{fs} on {part} could not be mounted",
    "not_responding": "the {fs} server {part} does not respond",
    "evicted": "the {fs} server {part} evicted this client",
    "lustre_bug": "a thread of the Lustre client hit a bug and stopped",
}
SERVER_CODES = ("not_responding", "evicted")
MAX_NAME = 128  # maximum length of a server's name


class Config(CheckSettings, frozen=True):
    """error_window_seconds    how long a warning about file system errors stays open
    server_window_seconds   how long a warning about a file server stays open, unless it responds again earlier
    """

    error_window_seconds: Seconds = 24 * 3600.0
    server_window_seconds: Seconds = 24 * 3600.0


def correlate(events: Sequence[KernelEvent], node: Inventory, config: Config) -> Iterator[Finding]:
    """Yield one finding for each event name and each volume or server. A finding about a server ends when the server
    responds again.
    """
    groups: dict[tuple[str, str], list[KernelEvent]] = {}
    own = {mount.device for mount in node.mounts}
    for event in events:
        for name in NAMES.get(event.code, ()) if event.kind == "fs" else ():
            if not (name == "volume_stopped" and event.field("device") in own):
                groups.setdefault((name, _part(event)), []).append(event)
    for (name, part), group in groups.items():
        newest = max(group, key=lambda event: (event.last_time, event.sequence))
        is_over = newest.code == "ok"
        if is_over and all(event.code == "ok" for event in group):
            continue
        message = MESSAGES[name].format(fs=newest.field("fs"), part=part or "an unnamed device")
        lines = sum(event.lines for event in group if event.code != "ok")
        yield Finding(
            severity=Severity.WARNING,
            code=f"filesystem/{name}",
            subject=part,
            message=f"the server {part} responds again"
            if is_over
            else message + (f" ({lines} lines)" if lines > 1 else ""),
            clears=Clears.REBOOT if name == "lustre_bug" else Clears.WINDOW,
            window_seconds=config.server_window_seconds if name in SERVER_CODES else config.error_window_seconds,
            events=tuple(event.sequence for event in group),
            shared_cause=name in SERVER_CODES,
            recovered=is_over,
        )


def _part(event: KernelEvent) -> str:
    server = event.field("server")[:MAX_NAME]
    if server and event.field("fs") == "lockd":
        return f"{server} (lockd)"  # NFS's lockd may be silent although the server responds, and vice versa
    return server or event.field("device")


EXPLAIN = {
    "filesystem/volume_stopped": Explain(
        Severity.WARNING,
        Clears.WINDOW,
        "The kernel made a file system read-only or shut it down. The file system belongs to a container, is in an "
        "image file, or was mounted after healthd last read the mounts. For the node's own file systems, healthd "
        "reports block_device/stopped.",
        "Users of that volume can no longer write. Other jobs are not affected.",
        "No action tonight. journalctl -k shows the first error, and lsblk shows what the device is. Unmount the file "
        "system, then run fsck or xfs_repair.",
        window="error_window_seconds",
    ),
    "filesystem/errors": Explain(
        Severity.WARNING,
        Clears.WINDOW,
        "The kernel found errors in a local file system, or could not read or write it, but continues to use it.",
        "Some files may be lost. If the errors get worse, the kernel stops the file system.",
        "No action tonight. journalctl -k shows the lines about the device. Check the disk as well (smartctl -a). At "
        "the next maintenance, unmount the file system and run fsck or xfs_repair.",
        window="error_window_seconds",
    ),
    "filesystem/mount_failed": Explain(
        Severity.WARNING,
        Clears.WINDOW,
        "The kernel could not mount a file system, because its log or superblock is unreadable or wrong.",
        "The file system is missing. If the mount is named in the settings, the check mount also reports the missing "
        "mount.",
        "No action tonight. journalctl -k shows the lines about the device. Run fsck or xfs_repair. If the log of an "
        "XFS cannot be replayed, see xfs_repair(8), option -L.",
        window="error_window_seconds",
    ),
    "filesystem/not_responding": Explain(
        Severity.WARNING,
        Clears.WINDOW,
        "A file server does not respond (NFS, SMB, Lustre, Ceph). The condition clears when the kernel log reports "
        "that the server responds again, or after a day without a further line.",
        "Jobs that use the server wait and continue when it is back. Jobs on soft mounts get errors instead.",
        "No action tonight on this node. Check the server and the network. The check mount tests whether mounts hang, "
        "and drains the node if they do.",
        shared=True,
        window="server_window_seconds",
    ),
    "filesystem/evicted": Explain(
        Severity.WARNING,
        Clears.WINDOW,
        "A file server evicted this client because the client did not respond in time or its network was down. The "
        "condition clears when the log reports that the client is connected again.",
        "Accesses to open files failed with input/output errors, and unwritten data is lost.",
        "No action tonight on this node. Look for network errors at that time (ib_link, ib_errors). If many clients "
        "are affected at once, check the server.",
        shared=True,
        window="server_window_seconds",
    ),
    "filesystem/lustre_bug": Explain(
        Severity.WARNING,
        Clears.REBOOT,
        "The Lustre client detected an impossible state (LBUG or ASSERTION) and stopped the thread.",
        "Processes that wait for that thread never continue. According to Lustre's manual, only a reboot helps.",
        "No action tonight. Reboot the node once no job is running. Report the lines before LBUG to the file system's "
        "vendor.",
        window="error_window_seconds",
    ),
}

CAUSES = {
    **dict.fromkeys(EXPLAIN, FailureCause.MOUNT),
    "filesystem/errors": FailureCause.DISK,
}
