"""Local disks: gone, dead or losing data; file systems that the kernel stopped, degraded RAIDs.

Rules: Meta's study counts block-device errors as high severity; node_exporter and gpud watch the same. Which disks
belong to the node only a baseline says. A controller that works is "live" (Linux, drivers/nvme/host/sysfs.c). That the
kernel stopped a file system after errors is told by /proc/self/mountinfo: who mounts read-only sets it for the mount
too (see Mount.turned). ext4's errors_count would not do: it stays until fsck and says nothing of now. An XFS that was
shut down says so nowhere, but its root answers EIO. What stands until a reboot does so because a dead disk soon goes
from sysfs and its file system is unmounted, and both would look like a clean run.

The kernel log says the same sooner, and what sysfs does not know: data that could not be read or written. That drains
where the disk holds a file system of the node, or the settings name it; a disk of a RAID that has copies, one of
several paths, other disks, time-outs and resets that a drive or its controller may get over warn. One disk gives one
finding, the worst of what its lines say.
"""

from __future__ import annotations

import errno
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from healthd.api import (
    Baseline,
    CheckSettings,
    Clears,
    Ends,
    EndsJob,
    Entry,
    Explain,
    FailureCause,
    Finding,
    Host,
    Inventory,
    KernelEvent,
    LeftOut,
    Meaning,
    NothingToCheck,
    Observation,
    Past,
    Remedy,
    Seconds,
    Severity,
    is_decimal,
)
from healthd.common.mountinfo import MOUNTINFO, Mount, is_local, of_host, parse_all
from healthd.host.disks import ID_FILES, NO_DISKS, controller, whole

USES = ""
AFTER_EVENTS = ("nvme", "block", "fs")
BASELINE = Baseline(("expected",), place=40)

NVME = "/sys/class/nvme"
BLOCK = "/sys/block"
NOT_LIVE = {"new", "resetting", "connecting", "deleting", "deleting (no IO)", "dead"}


class Config(CheckSettings, frozen=True):
    """expected         serial number or wwid of each disk that this node has, as sysfs has them; others are not judged
    confirm_seconds  a disk must be gone, or an NVMe controller not be live, for so long: a reset takes seconds
    warning_window_seconds   how long trouble in the kernel log that may be over stays a warning
    """

    expected: tuple[str, ...] = ()
    confirm_seconds: Seconds = 60.0
    warning_window_seconds: Seconds = 24 * 3600.0


def validate(config: Config) -> str | None:
    return "expected: a serial number or wwid must not be empty" if "" in config.expected else None


def run(host: Host, config: Config, past: Past) -> Iterator[Finding | Observation | NothingToCheck]:
    unreadable: list[str] = []
    for look in (_controllers, _missing, _file_systems, _arrays):
        try:
            yield from look(host, config, unreadable)
        except (OSError, ValueError) as error:  # it must not hide what the others find
            unreadable.append(str(error))
    if unreadable:
        raise ValueError("; ".join(unreadable))
    arrays = any(name.startswith("md") for name in host.list(BLOCK))
    if not (config.expected or arrays or host.list(NVME) or _on_disks(host)):
        yield NothingToCheck("no local disk")


def _on_disks(host: Host) -> bool:
    """Return True if a file system of the host lies on a local disk."""
    mounts, _ = parse_all(host.read_shared(MOUNTINFO))
    return any(of_host(mount) for mount in mounts)


def _controllers(host: Host, config: Config, unreadable: list[str]) -> Iterator[Finding]:
    for name in host.list(NVME):
        state = host.read(f"{NVME}/{name}/state")
        if state == "live":
            continue
        if state not in NOT_LIVE:
            unreadable.append(f"{NVME}/{name}/state: not a state: {state!r:.40}")
            continue
        transport = host.read(f"{NVME}/{name}/transport") or "pcie"
        address = host.read(f"{NVME}/{name}/address") or name
        message = f"the NVMe controller {name} is {state}"
        confirm = 0.0 if state == "dead" else config.confirm_seconds
        if transport == "pcie":
            yield Finding(Severity.DEGRADED, "block_device/nvme", address, message, Clears.REBOOT, confirm)
        else:
            message = f"{message} ({transport}, {address})"
            yield Finding(Severity.WARNING, "block_device/nvme_path", name, message, confirm_seconds=confirm)


def _missing(host: Host, config: Config, unreadable: list[str]) -> Iterator[Finding]:
    wanted = {*config.expected}
    if not wanted:
        return
    for name in _names_of_disks(host):
        wanted.discard(name or "")
        if not wanted:
            return
    for name in sorted(wanted):
        message = f"the disk {name} is gone"
        confirm = config.confirm_seconds
        yield Finding(
            Severity.DEGRADED, "block_device/missing", name, message, confirm_seconds=confirm, expects="expected"
        )


def _names_of_disks(host: Host) -> Iterator[str | None]:
    """Serial numbers and wwids, those of NVMe controllers first: they are one file a disk."""
    for name in host.list(NVME):
        yield host.read(f"{NVME}/{name}/serial")
    for name in host.list(BLOCK):
        if not name.startswith(NO_DISKS):
            for file in ID_FILES:
                yield host.read(f"{BLOCK}/{name}/{file}")


def _file_systems(host: Host, config: Config, unreadable: list[str]) -> Iterator[Finding]:
    mounts, wrong = parse_all(host.read_shared(MOUNTINFO))
    uppermost = {mount.point: mount for mount in mounts}
    on_disks: dict[str, Mount] = {}
    for mount in mounts:
        if of_host(mount) and (mount.device not in on_disks or mount.point == "/"):
            on_disks[mount.device] = mount
    for mount in on_disks.values():
        turned = mount.turned
        if mount.fstype == "xfs" and uppermost[mount.point] is mount and is_local(mounts, mount.point):
            turned = turned or _asked(host, mount.point)
        if turned and mount.point == "/":
            message = f"the root file system ({mount.fstype}) was {turned} by the kernel"
            yield Finding(Severity.CRITICAL, "block_device/root_stopped", "/", message, Clears.REBOOT)
        elif turned:
            message = f"{mount.point} ({mount.fstype}) was {turned} by the kernel"
            yield Finding(Severity.DEGRADED, "block_device/stopped", mount.point, message, Clears.REBOOT)
    if wrong:
        raise ValueError(wrong)


def _asked(host: Host, point: str) -> str:
    try:
        host.stat(point)
    except OSError as error:
        if error.errno == errno.EIO:
            return "shut down"
        raise
    return ""


def _arrays(host: Host, config: Config, unreadable: list[str]) -> Iterator[Finding | Observation]:
    for name in host.list(BLOCK):
        missing = host.read(f"{BLOCK}/{name}/md/degraded") if name.startswith("md") else None
        if missing is None:  # striped arrays have no such file: no disk may be missing
            continue
        if not (is_decimal(missing) and len(missing) < 6):
            unreadable.append(f"{BLOCK}/{name}/md/degraded: not a number of disks: {missing[:40]!r}")
            continue
        yield Observation("md_missing_disks", int(missing), labels=(("array", name),))
        if int(missing):
            message = f"the RAID {name} runs without {missing} of its disks"
            yield Finding(Severity.WARNING, "block_device/raid_degraded", name, message)


# --- what the kernel log says

STOPS = ("remount_ro", "shutdown", "journal_abort")
LOSES_DATA = {
    "io_error": "io_error",
    "protection_error": "io_error",
    "offline": "io_error",
    "medium_error": "medium_error",
}
NO_DATA = ("DISCARD", "WRITE_ZEROES", "SECURE_ERASE")  # a drive that refuses these has lost nothing
NOBODYS = ("loop", "sr", "ram", "zram")  # image files of tests and containers, an empty drive
TROUBLE = {
    "timeout": "did not answer in time",
    "controller_down": "was down and is reset",
    "frozen": "is reset after PCIe errors",
    "not_ready": "did not get ready",
    "internal_error": "is reset after an error of its own",
    "init_failed": "could not be set up",
    "admin_error": "failed a command",
    "command_failed": "failed a command",
    "target_error": "refused a command",
    "reservation": "is reserved by another machine",
    "space": "is full",
    "beyond_end": "was asked for sectors that it does not have",
    "ata_error": "failed on its link",
    "dm_error": "failed in the device mapper",
    "offline": "does not answer any more",
}


class _Said(NamedTuple):
    """What one line means: the finding's severity, name, subject and words. Lines with the same `part` are judged
    together: the worst counts."""

    severity: Severity
    name: str
    subject: str
    words: str
    part: str
    expects: str = ""
    shared: bool = False


def correlate(events: Sequence[KernelEvent], node: Inventory, config: Config) -> Iterator[Finding]:
    """One finding for each disk with its controller, path, adapter, array or file system: the worst of this boot."""
    groups: dict[str, list[tuple[KernelEvent, _Said]]] = {}
    for event in events:
        said = _said(event, node, config)
        if said is not None:
            groups.setdefault(said.part, []).append((event, said))
    for group in groups.values():
        newest = max((event for event, _ in group), key=lambda event: (event.last_time, event.sequence))
        group = [(event, said) for event, said in group if event.boot_id == newest.boot_id]
        worst = max(group, key=lambda pair: (pair[1].severity, pair[0].last_time))[1]
        over = newest.code == "path_restored"
        lines = sum(event.lines for event, _ in group)
        warns = worst.severity is Severity.WARNING
        yield Finding(
            severity=worst.severity,
            code=f"block_device/{worst.name}",
            subject=worst.subject,
            message=worst.words + (f" ({lines} lines)" if lines > 1 and not over else ""),
            clears=Clears.WINDOW if warns else Clears.REBOOT,
            window_seconds=config.warning_window_seconds if warns else 0.0,
            events=tuple(event.sequence for event, _ in group),
            shared_cause=worst.shared,
            expects=worst.expects,
            over=over,
        )


def _said(event: KernelEvent, node: Inventory, config: Config) -> _Said | None:
    if event.kind == "nvme":
        return _controller_said(event, node)
    if event.kind == "block":
        return _disk_said(event, node, config)
    return _file_system_said(event, node) if event.kind == "fs" and event.code in STOPS else None


def _controller_said(event: KernelEvent, node: Inventory) -> _Said | None:
    name = event.field("controller") or controller(event.field("device"))
    known = next((disk for disk in node.disks if disk.name == name or (event.pci and disk.pci == event.pci)), None)
    pci = event.pci or (known.pci if known else "")
    name = name or (known.name if known else pci)
    if event.code in ("path_error", "path_restored") or (event.code == "dead" and known and not pci):
        words = (
            f"the NVMe controller {name} is {'connected again' if event.code == 'path_restored' else 'not connected'}"
        )
        return _Said(Severity.WARNING, "nvme_path", name, words, f"path {name}")
    if event.code == "dead":
        words = f"the NVMe controller {name} is dead" + (", gone from the bus" if event.field("csts") else "")
        return _Said(Severity.DEGRADED, "nvme", pci or name, words, f"disk {pci or name}")
    words = TROUBLE.get(event.code, "")
    return (
        _Said(Severity.WARNING, "command_error", name, f"the NVMe controller {name} {words}", f"disk {pci or name}")
        if words
        else None
    )


def _disk_said(event: KernelEvent, node: Inventory, config: Config) -> _Said | None:
    device = event.field("device")
    disk = whole(device)
    if disk.startswith(NOBODYS):
        return None
    if event.code in ("raid_failed", "raid_disk"):
        return _array_said(event, node, device)
    if event.code in ("path_error", "path_restored"):
        path = event.field("path") or disk
        words = f"the path {path} to a disk is {'back' if event.code == 'path_restored' else 'lost'}"
        return _Said(Severity.WARNING, "path", path, words, f"path {path}")
    if event.code == "controller_fault":
        name = event.pci or event.field("controller")
        words = f"the RAID or host bus adapter {name} had a fault"
        return _Said(Severity.WARNING, "adapter", name, words, f"adapter {name}")
    if event.code in LOSES_DATA and disk:
        return _data_lost(event, disk, node, config)
    part = disk or event.field("port") or event.field("scsi") or "a disk"
    words = TROUBLE.get(event.code, "")
    return _Said(Severity.WARNING, "command_error", part, f"{part} {words}", _part_of(part, node)) if words else None


def _part_of(disk: str, node: Inventory) -> str:
    """The part of a disk. With several paths nvme1n1 may belong to the controller nvme0: the PCI address tells."""
    card = controller(disk)
    pcis = {known.name: known.pci for known in node.disks}
    return f"disk {pcis.get(disk) or pcis.get(card) or card}" if card else f"disk {disk}"


def _data_lost(event: KernelEvent, disk: str, node: Inventory, config: Config) -> _Said:
    operation = event.field("operation")
    device = event.field("device")
    held = _held([m.point for m in node.mounts if (disk in m.disks and disk not in m.redundant) or m.device == device])
    spared = "" if held else ", ".join(m.point for m in node.mounts if disk in m.redundant)
    names = (disk, controller(disk))
    expected = not spared and any({*known.ids} & {*config.expected} for known in node.disks if known.name in names)
    watched = (held or expected) and operation not in NO_DATA
    done = {"READ": "read", "WRITE": "written", "FLUSH": "written"}.get(operation, "read or written")
    name = LOSES_DATA[event.code]
    words = f"data of the disk {disk} could not be {done}" if name == "io_error" else f"the disk {disk} has bad sectors"
    return _Said(
        Severity.DEGRADED if watched else Severity.WARNING,
        name,
        disk,
        words + (f"; another copy or path serves {spared}" if spared else held),
        _part_of(disk, node),
        "expected" if watched and not held else "",
        _over_network([disk], node),
    )


def _over_network(names: Sequence[str], node: Inventory) -> bool:
    """Whether these are iSCSI or NVMe over fabrics: no card of this node is above them, and other nodes lose theirs."""
    known = [disk for disk in node.disks if disk.name in names]
    return bool(known) and not any(disk.pci for disk in known)


def _held(points: Sequence[str]) -> str:
    return f"; it holds {', '.join(points)}" if points else ""


def _array_said(event: KernelEvent, node: Inventory, array: str) -> _Said:
    if event.code == "raid_disk":
        disk = event.field("disk")
        words = f"a disk of the RAID {array} failed" + (f": {disk}" if disk else "")
        return _Said(Severity.WARNING, "raid_disk", array, words, f"raid {array}")
    held = _held([mount.point for mount in node.mounts if mount.device == array])
    severity = Severity.DEGRADED if held else Severity.WARNING
    return _Said(severity, "raid_failed", array, f"the RAID {array} failed{held}", f"raid {array}")


def _file_system_said(event: KernelEvent, node: Inventory) -> _Said | None:
    """Lines about the node's own file systems (the check filesystem has the others), as the findings that run() has."""
    device = event.field("device")
    mount = next((mount for mount in node.mounts if device and mount.device == device), None)
    if mount is None:
        return None
    how = "shut down" if event.code == "shutdown" else "turned read-only"
    shared = _over_network(mount.disks, node)
    if mount.point == "/":
        words = f"the root file system ({mount.fstype}) was {how} by the kernel"
        return _Said(Severity.CRITICAL, "root_stopped", "/", words, "mount /", shared=shared)
    words = f"{mount.point} ({mount.fstype}) was {how} by the kernel"
    return _Said(Severity.DEGRADED, "stopped", mount.point, words, f"mount {mount.point}", shared=shared)


def baseline(host: Host, config: Config) -> Iterator[Entry | LeftOut]:
    named = set()
    for name in host.list(NVME):
        path = f"{NVME}/{name}"
        serial, state = host.told(f"{path}/serial"), host.told(f"{path}/state")
        if host.told(f"{path}/transport") not in ("", "pcie") or not serial:
            continue  # over the network: the storage array's matter
        named.add(serial)
        if state == "live":
            yield Entry("block_device", "expected", key=serial, note=f"{name} {host.told(f'{path}/model')}".strip())
        else:
            yield LeftOut("block_device", f"{name} is {state or 'of unknown state'}", "expected", serial)
    for name in host.list(BLOCK):
        path = f"{BLOCK}/{name}"
        comes_and_goes = host.told(f"{path}/removable") == "1" or "/usb" in (host.link_target(path) or "")
        if name.startswith((*NO_DISKS, "nvme")) or comes_and_goes:
            continue
        told = (host.told(f"{path}/{file}") for file in ID_FILES)
        known = next((text for text in told if text), "")
        if known and known not in named:
            named.add(known)  # several paths lead to one disk: the first counts
            note = f"{name} {host.told(f'{path}/device/model')}".strip()
            yield Entry("block_device", "expected", key=known, note=note)


_DISK_TODO = (
    "journalctl -k for its errors; nvme list, lsblk -o NAME,SERIAL,WWN, smartctl -a. Reseat it, look at its link "
    "(lspci -vv), replace it."
)

OBSERVATIONS = {
    "md_missing_disks": Meaning("Disks that a software RAID runs without; 0 if it is whole.", ("array",)),
}

EXPLAIN = {
    "block_device/missing": Explain(
        Severity.DEGRADED,
        Clears.PASS,
        "A disk that the site's settings name is no longer there.",
        "Its file system or its part of a RAID is lost to jobs: scratch space is missing, or less safe.",
        f"{_DISK_TODO} If it was replaced on purpose, write the new baseline.",
        confirm="confirm_seconds",
        expects="expected",
    ),
    "block_device/nvme": Explain(
        Severity.DEGRADED,
        Clears.REBOOT,
        "An NVMe disk's controller does not work: it is dead, or its reset does not end.",
        "Reads and writes of that disk fail or hang, and so do the jobs that use it.",
        f"Power the node off and on: a warm reboot may leave the controller as it is. {_DISK_TODO}",
        confirm="confirm_seconds",
        at_once=True,
        remedy=Remedy.POWER_CYCLE,
    ),
    "block_device/nvme_path": Explain(
        Severity.WARNING,
        Clears.PASS,
        "A controller of NVMe over fabrics is not connected.",
        "One way to the storage is lost. With multipath the others serve; else what is mounted from it stands still.",
        "nvme list-subsys shows the paths; look at the network and at the storage target.",
        confirm="confirm_seconds",
        at_once=True,
    ),
    "block_device/stopped": Explain(
        Severity.DEGRADED,
        Clears.REBOOT,
        "The kernel turned a local file system read-only, or shut it down, after errors.",
        "Jobs cannot write there, and what they wrote last may be lost.",
        "journalctl -k shows the first error. Unmount it, fsck (xfs_repair), mount it again; or reboot with fsck.",
        shared=None,
    ),
    "block_device/root_stopped": Explain(
        Severity.CRITICAL,
        Clears.REBOOT,
        "The kernel turned the root file system read-only, or shut it down, after errors.",
        "Nothing can be logged or spooled: jobs fail in odd places, and new ones cannot start.",
        "journalctl -k or the console shows the first error. Reboot with fsck.mode=force. Again: replace the disk.",
        shared=None,
    ),
    "block_device/io_error": Explain(
        Severity.DEGRADED,
        Clears.REBOOT,
        "The kernel log says that data of a disk could not be read or written. Of a disk that holds no file system of "
        "the node and that no setting names, of one of a RAID that has copies, and of one of several paths it is a "
        "warning that ends after a day.",
        "Jobs that read or write there fail, and the file system on it may be stopped next.",
        _DISK_TODO,
        also=(Severity.WARNING,),
        shared=None,
        milder=Ends(Clears.WINDOW, "warning_window_seconds"),
    ),
    "block_device/medium_error": Explain(
        Severity.DEGRADED,
        Clears.REBOOT,
        "A disk says that it cannot read some of its sectors. Of a disk that holds no file system of the node and that "
        "no setting names, and of one of a RAID that has copies it is a warning that ends after a day.",
        "What was in these sectors is lost. More of them follow as a rule.",
        _DISK_TODO,
        also=(Severity.WARNING,),
        milder=Ends(Clears.WINDOW, "warning_window_seconds"),
    ),
    "block_device/command_error": Explain(
        Severity.WARNING,
        Clears.WINDOW,
        "The kernel log says that a disk or its controller did not answer in time, was reset or failed a command, and "
        "does not say that data was lost.",
        "Reads and writes took seconds. A drive that does this again and again is about to fail.",
        _DISK_TODO,
        window="warning_window_seconds",
    ),
    "block_device/path": Explain(
        Severity.WARNING,
        Clears.WINDOW,
        "One path to a disk failed (multipath, iSCSI, Fibre Channel). It ends when the log says that the path is back.",
        "With multipath the others serve; else what is mounted from it stands still.",
        "multipath -ll shows the paths; look at the network and at the storage target.",
        window="warning_window_seconds",
    ),
    "block_device/adapter": Explain(
        Severity.WARNING,
        Clears.WINDOW,
        "The firmware of a RAID or host bus adapter stopped, or reports a critical event.",
        "All disks behind it stand still while it is reset, or are lost.",
        "Look at it with the maker's program (storcli, sas3ircu, ssacli) and update its firmware. Replace it.",
        window="warning_window_seconds",
    ),
    "block_device/raid_disk": Explain(
        Severity.WARNING,
        Clears.WINDOW,
        "The kernel log says that a software RAID lost a disk, or could not write to one.",
        "None, but the next failing disk may take the data with it. block_device/raid_degraded stands until then.",
        "cat /proc/mdstat; mdadm --detail /dev/NAME shows which disk is out. Replace it, then mdadm --add.",
        window="warning_window_seconds",
    ),
    "block_device/raid_failed": Explain(
        Severity.DEGRADED,
        Clears.REBOOT,
        "The kernel log says that a software RAID lost more disks than it can. Of one that holds no file system of the "
        "node it is a warning.",
        "Everything on it is lost to jobs, and perhaps for good.",
        "cat /proc/mdstat; mdadm --examine of its disks. If all went at once, look at their adapter.",
        also=(Severity.WARNING,),
        milder=Ends(Clears.WINDOW, "warning_window_seconds"),
    ),
    "block_device/raid_degraded": Explain(
        Severity.WARNING,
        Clears.PASS,
        "A software RAID runs with fewer disks than it should; it may be rebuilding.",
        "None, but the next failing disk may take the data with it.",
        "cat /proc/mdstat; mdadm --detail /dev/NAME shows which disk is out. Replace it, then mdadm --add.",
    ),
}

CAUSES = dict.fromkeys(EXPLAIN, FailureCause.DISK)
ENDS_JOB = {
    "block_device/missing": EndsJob.ALWAYS,
    "block_device/nvme": EndsJob.ALWAYS,
    "block_device/stopped": EndsJob.ALWAYS,
    "block_device/root_stopped": EndsJob.ALWAYS,
    "block_device/io_error": EndsJob.ALWAYS,
    "block_device/medium_error": EndsJob.ALWAYS,
    "block_device/path": EndsJob.NEVER,
    "block_device/raid_failed": EndsJob.ALWAYS,
    "block_device/raid_degraded": EndsJob.NEVER,
}
PERMANENT = (
    "block_device/medium_error",
    "block_device/missing",
    "block_device/raid_failed",
    "block_device/raid_disk",
    "block_device/raid_degraded",
)
