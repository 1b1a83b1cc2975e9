"""Local disks that are missing, dead or losing data, file systems that the kernel stopped, and degraded RAIDs.

Rules: Meta's study counts block-device errors as high severity; node_exporter and gpud watch the same. Only a baseline
lists the disks of the node. A controller that works is "live" (Linux, drivers/nvme/host/sysfs.c). A file
system that the kernel stopped after errors shows in /proc/self/mountinfo: an administrator who mounts read-only sets
the flag for the mount as well (see Mount.turned). ext4's errors_count is not used: it stays set until fsck and does
not show the present state. An XFS that was shut down shows no flag, but its root returns EIO. These conditions stay
open until a reboot, because a dead disk soon disappears from sysfs and its file system is unmounted, and both would
look like a clean run.

The kernel log reports the same faults sooner, and also data that could not be read or written, which sysfs does not
show. Lost data drains the node if the disk holds a file system of the node or is named in the settings. A disk of a
RAID with copies, one of several paths, other disks, timeouts and resets only warn: the drive or its controller may
recover. Each disk gives one finding, the worst of its lines.
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
    """expected         serial number or wwid of each disk of this node, as in sysfs; other disks are not checked
    confirm_seconds  a disk must be missing, or an NVMe controller not live, for this long: a reset takes seconds
    warning_window_seconds   how long a kernel-log warning stays open without a further line
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
        except (OSError, ValueError) as error:  # it must not hide what the other probes find
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
        message = f"disk {name} is missing"
        confirm = config.confirm_seconds
        yield Finding(
            Severity.DEGRADED, "block_device/missing", name, message, confirm_seconds=confirm, expects="expected"
        )


def _names_of_disks(host: Host) -> Iterator[str | None]:
    """Yield serial numbers and wwids, those of NVMe controllers first, because they need one file for each disk."""
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


# --- kernel log

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
    "timeout": "did not respond in time",
    "controller_down": "was down and is reset",
    "frozen": "is being reset after PCIe errors",
    "not_ready": "did not become ready",
    "internal_error": "is being reset after an internal error",
    "init_failed": "could not be set up",
    "admin_error": "failed a command",
    "command_failed": "failed a command",
    "target_error": "refused a command",
    "reservation": "is reserved by another machine",
    "space": "is full",
    "beyond_end": "received requests for sectors beyond its end",
    "ata_error": "had link errors",
    "dm_error": "failed in the device mapper",
    "offline": "no longer responds",
}


class _Said(NamedTuple):
    """Meaning of one line. Lines with the same `part` are evaluated together: the worst one counts."""

    severity: Severity
    name: str
    subject: str
    words: str
    part: str
    expects: str = ""
    shared: bool = False


def correlate(events: Sequence[KernelEvent], node: Inventory, config: Config) -> Iterator[Finding]:
    """Yield the worst finding of this boot for each disk with its controller, path, adapter, array or file system."""
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
    """Return the part of a disk. With several paths nvme1n1 may belong to the controller nvme0: see the PCI address."""
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
    """Return True for iSCSI and NVMe over fabrics: other nodes lose such disks for the same reason."""
    known = [disk for disk in node.disks if disk.name in names]
    return bool(known) and not any(disk.pci for disk in known)


def _held(points: Sequence[str]) -> str:
    return f"; it contains {', '.join(points)}" if points else ""


def _array_said(event: KernelEvent, node: Inventory, array: str) -> _Said:
    if event.code == "raid_disk":
        disk = event.field("disk")
        words = f"a disk of the RAID {array} failed" + (f": {disk}" if disk else "")
        return _Said(Severity.WARNING, "raid_disk", array, words, f"raid {array}")
    held = _held([mount.point for mount in node.mounts if mount.device == array])
    severity = Severity.DEGRADED if held else Severity.WARNING
    return _Said(severity, "raid_failed", array, f"the RAID {array} failed{held}", f"raid {array}")


def _file_system_said(event: KernelEvent, node: Inventory) -> _Said | None:
    """Return the finding for a file system of the node, with the text of run(). The check filesystem has the others."""
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
            continue  # over the network: monitored by the storage array
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
    "journalctl -k shows the errors of the disk; nvme list, lsblk -o NAME,SERIAL,WWN and smartctl -a show its state. "
    "Reseat the disk, check its link (lspci -vv), then replace it."
)

OBSERVATIONS = {
    "md_missing_disks": Meaning("Disks that a software RAID is missing; 0 if it is complete.", ("array",)),
}

EXPLAIN = {
    "block_device/missing": Explain(
        Severity.DEGRADED,
        Clears.PASS,
        "A disk that the settings name is missing.",
        "Jobs lose its file system or its part of a RAID: scratch space is missing or less safe.",
        f"{_DISK_TODO} If it was replaced on purpose: write the baseline again (healthd baseline).",
        confirm="confirm_seconds",
        expects="expected",
    ),
    "block_device/nvme": Explain(
        Severity.DEGRADED,
        Clears.REBOOT,
        "The controller of an NVMe disk does not work: it is dead, or its reset does not complete.",
        "Reads and writes of this disk fail or hang, and so do the jobs that use it.",
        f"Power-cycle the node: a warm reboot may leave the controller in the same state. {_DISK_TODO}",
        confirm="confirm_seconds",
        at_once=True,
        remedy=Remedy.POWER_CYCLE,
    ),
    "block_device/nvme_path": Explain(
        Severity.WARNING,
        Clears.PASS,
        "A controller of NVMe over fabrics is not connected.",
        "One path to the storage is lost. With multipath the other paths serve; without it, access to its mounts "
        "hangs.",
        "No action tonight. nvme list-subsys shows the paths. Check the network and the storage target.",
        confirm="confirm_seconds",
        at_once=True,
    ),
    "block_device/stopped": Explain(
        Severity.DEGRADED,
        Clears.REBOOT,
        "The kernel made a local file system read-only, or shut it down, after errors.",
        "Jobs cannot write there, and their last writes may be lost.",
        "journalctl -k shows the first error. Unmount it, run fsck (xfs_repair) and mount it again; or reboot with "
        "fsck.",
        shared=None,
    ),
    "block_device/root_stopped": Explain(
        Severity.CRITICAL,
        Clears.REBOOT,
        "The kernel made the root file system read-only, or shut it down, after errors.",
        "Logging and spooling fail: jobs fail in unexpected places, and new jobs cannot start.",
        "journalctl -k or the console shows the first error. Reboot with fsck.mode=force. If it comes back: replace "
        "the disk.",
        shared=None,
    ),
    "block_device/io_error": Explain(
        Severity.DEGRADED,
        Clears.REBOOT,
        "The kernel log reports that data of a disk could not be read or written. It is a warning, for a day, in "
        "three cases: a RAID has a copy of the data; other paths lead to the disk; or the disk holds no file system "
        "of the node and no setting names it.",
        "Jobs that read or write there fail, and the kernel may stop the file system next.",
        f"If it is only a warning: no action tonight. {_DISK_TODO}",
        also=(Severity.WARNING,),
        shared=None,
        milder=Ends(Clears.WINDOW, "warning_window_seconds"),
    ),
    "block_device/medium_error": Explain(
        Severity.DEGRADED,
        Clears.REBOOT,
        "A disk reports that it cannot read some of its sectors. It is a warning, for a day, in two cases: a RAID "
        "has a copy of the data; or the disk holds no file system of the node and no setting names it.",
        "The data in these sectors is lost. Usually more sectors follow.",
        f"If it is only a warning: no action tonight. {_DISK_TODO}",
        also=(Severity.WARNING,),
        milder=Ends(Clears.WINDOW, "warning_window_seconds"),
    ),
    "block_device/command_error": Explain(
        Severity.WARNING,
        Clears.WINDOW,
        "The kernel log reports that a disk or its controller did not respond in time, was reset or failed a command. "
        "It does not report lost data.",
        "Reads and writes took seconds. A drive that does this repeatedly is about to fail.",
        f"No action tonight. At the next maintenance: {_DISK_TODO}",
        window="warning_window_seconds",
    ),
    "block_device/path": Explain(
        Severity.WARNING,
        Clears.WINDOW,
        "One path to a disk failed (multipath, iSCSI, Fibre Channel). It clears when the log reports the path as "
        "restored.",
        "With multipath the other paths serve; without it, access to its mounts hangs.",
        "No action tonight. multipath -ll shows the paths. Check the network and the storage target.",
        window="warning_window_seconds",
    ),
    "block_device/adapter": Explain(
        Severity.WARNING,
        Clears.WINDOW,
        "The firmware of a RAID controller or host bus adapter stopped, or reports a critical event.",
        "All disks behind it hang during its reset, or are lost.",
        "No action tonight if the disks respond. At the next maintenance: check it with the vendor's tool (storcli, "
        "sas3ircu, ssacli) and update its firmware. If it comes back: replace it.",
        window="warning_window_seconds",
    ),
    "block_device/raid_disk": Explain(
        Severity.WARNING,
        Clears.WINDOW,
        "The kernel log reports that a software RAID lost a disk, or could not write to one.",
        "None, but the next disk that fails may cause data loss. block_device/raid_degraded stays open until the RAID "
        "is complete.",
        "No action tonight. cat /proc/mdstat and mdadm --detail /dev/NAME show which disk is out. Replace it, then "
        "mdadm --add.",
        window="warning_window_seconds",
    ),
    "block_device/raid_failed": Explain(
        Severity.DEGRADED,
        Clears.REBOOT,
        "The kernel log reports that a software RAID lost more disks than it can tolerate. It is a warning if the RAID "
        "holds no file system of the node.",
        "All data on it is lost to jobs, possibly for good.",
        "If it is only a warning: no action tonight. cat /proc/mdstat; mdadm --examine of its disks. If all disks "
        "failed at once: check their adapter.",
        also=(Severity.WARNING,),
        milder=Ends(Clears.WINDOW, "warning_window_seconds"),
    ),
    "block_device/raid_degraded": Explain(
        Severity.WARNING,
        Clears.PASS,
        "A software RAID runs with fewer disks than it should. It may be rebuilding.",
        "None, but the next disk that fails may cause data loss.",
        "No action tonight. cat /proc/mdstat and mdadm --detail /dev/NAME show which disk is out. Replace it, then "
        "mdadm --add.",
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
