"""Faults of local storage: disks that are missing, dead or losing data, stopped file systems, and degraded RAIDs.

Rules: Meta's study counts block-device errors as high severity; node_exporter and gpud monitor them too. Only a
baseline lists the node's disks. The state of a working NVMe controller is "live" (Linux, drivers/nvme/host/sysfs.c).
/proc/self/mountinfo shows the file systems that the kernel stopped after errors. If an administrator mounts a file
system read-only, the mount's own flag is set as well (see Mount.turned). ext4's errors_count is not used, because it
stays set until fsck and does not show the current state. An XFS that was shut down has no flag, but its root directory
returns EIO. These conditions stay open until a reboot. A dead disk soon disappears from sysfs, and its file system is
unmounted. Without this rule, the next run would report no fault.

The kernel log reports the same faults sooner. It also reports failed reads and writes, which sysfs does not show. Lost
data drains the node if the disk contains one of the node's file systems or is named in the settings. Errors on other
disks are only warnings. If a RAID has another copy of the data, or other paths lead to the disk, errors are also only
warnings. Timeouts and resets are only warnings, because the drive or its controller may recover. Each disk has one
finding, for its worst kernel line.
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
    History,
    Host,
    Inventory,
    KernelEvent,
    LeftOut,
    Meaning,
    NothingToCheck,
    Observation,
    Remedy,
    Seconds,
    Severity,
    is_decimal,
)
from healthd.common.mountinfo import MOUNTINFO, Mount, is_host_file_system, is_local, parse_all
from healthd.host.disks import ID_FILES, NO_DISKS, nvme_controller, whole_disk

USES = ""
AFTER_EVENTS = ("nvme", "block", "fs")
BASELINE = Baseline(("expected",), place=40)

NVME = "/sys/class/nvme"
BLOCK = "/sys/block"
NOT_LIVE = {"new", "resetting", "connecting", "deleting", "deleting (no IO)", "dead"}


class Config(CheckSettings, frozen=True):
    """expected         serial number or wwid of each disk of this node, as in sysfs; other disks are not checked
    confirm_seconds  report a missing disk or an NVMe controller that is not live after this time; a reset takes seconds
    warning_window_seconds   how long a kernel-log warning stays open without a further line
    """

    expected: tuple[str, ...] = ()
    confirm_seconds: Seconds = 60.0
    warning_window_seconds: Seconds = 24 * 3600.0


def validate(config: Config) -> str | None:
    return "expected: a serial number or wwid must not be empty" if "" in config.expected else None


def run(host: Host, config: Config, past: History) -> Iterator[Finding | Observation | NothingToCheck]:
    unreadable: list[str] = []
    for probe in (_controllers, _missing, _file_systems, _arrays):
        try:
            yield from probe(host, config, unreadable)
        except (OSError, ValueError) as error:  # this error must not hide the findings of the other probes
            unreadable.append(str(error))
    if unreadable:
        raise ValueError("; ".join(unreadable))
    arrays = any(name.startswith("md") for name in host.list(BLOCK))
    if not (config.expected or arrays or host.list(NVME) or _on_disks(host)):
        yield NothingToCheck("no local disk")


def _on_disks(host: Host) -> bool:
    """Return True if one of the host's file systems is on a local disk."""
    mounts, _ = parse_all(host.read_shared(MOUNTINFO))
    return any(is_host_file_system(mount) for mount in mounts)


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
    absent = {*config.expected}
    if not absent:
        return
    for name in _disk_ids(host):
        absent.discard(name or "")
        if not absent:
            return
    for name in sorted(absent):
        message = f"disk {name} is missing"
        confirm = config.confirm_seconds
        yield Finding(
            Severity.DEGRADED, "block_device/missing", name, message, confirm_seconds=confirm, expects="expected"
        )


def _disk_ids(host: Host) -> Iterator[str | None]:
    """Yield serial numbers and wwids, starting with NVMe controllers, which need only one file per disk."""
    for name in host.list(NVME):
        yield host.read(f"{NVME}/{name}/serial")
    for name in host.list(BLOCK):
        if not name.startswith(NO_DISKS):
            for file in ID_FILES:
                yield host.read(f"{BLOCK}/{name}/{file}")


def _file_systems(host: Host, config: Config, unreadable: list[str]) -> Iterator[Finding]:
    mounts, parse_error = parse_all(host.read_shared(MOUNTINFO))
    uppermost = {mount.point: mount for mount in mounts}
    on_disks: dict[str, Mount] = {}
    for mount in mounts:
        if is_host_file_system(mount) and (mount.device not in on_disks or mount.point == "/"):
            on_disks[mount.device] = mount
    for mount in on_disks.values():
        stopped_state = mount.error_state
        if mount.fstype == "xfs" and uppermost[mount.point] is mount and is_local(mounts, mount.point):
            stopped_state = stopped_state or _xfs_state(host, mount.point)
        if stopped_state and mount.point == "/":
            message = f"the root file system ({mount.fstype}) was {stopped_state} by the kernel"
            yield Finding(Severity.CRITICAL, "block_device/root_stopped", "/", message, Clears.REBOOT)
        elif stopped_state:
            message = f"{mount.point} ({mount.fstype}) was {stopped_state} by the kernel"
            yield Finding(Severity.DEGRADED, "block_device/stopped", mount.point, message, Clears.REBOOT)
    if parse_error:
        raise ValueError(parse_error)


def _xfs_state(host: Host, point: str) -> str:
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
        if missing is None:  # a striped array has no such file, because it does not work at all if a disk is missing
            continue
        if not (is_decimal(missing) and len(missing) < 6):
            unreadable.append(f"{BLOCK}/{name}/md/degraded: not a number of disks: {missing[:40]!r}")
            continue
        yield Observation("md_missing_disks", int(missing), labels=(("array", name),))
        if int(missing):
            message = f"the RAID {name} runs without {missing} of its disks"
            yield Finding(Severity.WARNING, "block_device/raid_degraded", name, message)


# --- kernel log

STOP_CODES = ("remount_ro", "shutdown", "journal_abort")
DATA_LOSS_CODES = {
    "io_error": "io_error",
    "protection_error": "io_error",
    "offline": "io_error",
    "medium_error": "medium_error",
}
HARMLESS_OPERATIONS = ("DISCARD", "WRITE_ZEROES", "SECURE_ERASE")  # no data is lost if a drive refuses these operations
IGNORED_DISKS = ("loop", "sr", "ram", "zram")  # image files for tests and containers, or an empty drive
COMMAND_ERRORS = {
    "timeout": "did not respond in time",
    "controller_down": "was down and is being reset",
    "frozen": "is being reset after PCIe errors",
    "not_ready": "did not become ready",
    "internal_error": "is being reset after an internal error",
    "init_failed": "could not be set up",
    "admin_error": "returned an error for a command",
    "command_failed": "returned an error for a command",
    "target_error": "refused a command",
    "reservation": "is reserved by another machine",
    "space": "is full",
    "beyond_end": "received requests for sectors beyond its end",
    "ata_error": "had link errors",
    "dm_error": "failed in the device mapper",
    "offline": "no longer responds",
}


class _LineMeaning(NamedTuple):
    """Meaning of one kernel line. If several lines are about the same `part`, the worst is used."""

    severity: Severity
    name: str
    subject: str
    message: str
    part: str
    expects: str = ""
    shared: bool = False


def correlate(events: Sequence[KernelEvent], node: Inventory, config: Config) -> Iterator[Finding]:
    """Yield this boot's worst finding for each disk, path, adapter, array and file system. A disk includes its
    controller.
    """
    groups: dict[str, list[tuple[KernelEvent, _LineMeaning]]] = {}
    for event in events:
        meaning = _line_meaning(event, node, config)
        if meaning is not None:
            groups.setdefault(meaning.part, []).append((event, meaning))
    for group in groups.values():
        newest = max((event for event, _ in group), key=lambda event: (event.last_time, event.sequence))
        group = [(event, meaning) for event, meaning in group if event.boot_id == newest.boot_id]
        worst = max(group, key=lambda pair: (pair[1].severity, pair[0].last_time))[1]
        is_over = newest.code == "path_restored"
        lines = sum(event.lines for event, _ in group)
        is_warning = worst.severity is Severity.WARNING
        yield Finding(
            severity=worst.severity,
            code=f"block_device/{worst.name}",
            subject=worst.subject,
            message=worst.message + (f" ({lines} lines)" if lines > 1 and not is_over else ""),
            clears=Clears.WINDOW if is_warning else Clears.REBOOT,
            window_seconds=config.warning_window_seconds if is_warning else 0.0,
            events=tuple(event.sequence for event, _ in group),
            shared_cause=worst.shared,
            expects=worst.expects,
            recovered=is_over,
        )


def _line_meaning(event: KernelEvent, node: Inventory, config: Config) -> _LineMeaning | None:
    if event.kind == "nvme":
        return _controller_meaning(event, node)
    if event.kind == "block":
        return _disk_meaning(event, node, config)
    return _file_system_meaning(event, node) if event.kind == "fs" and event.code in STOP_CODES else None


def _controller_meaning(event: KernelEvent, node: Inventory) -> _LineMeaning | None:
    name = event.field("controller") or nvme_controller(event.field("device"))
    listed = next((disk for disk in node.disks if disk.name == name or (event.pci and disk.pci == event.pci)), None)
    pci = event.pci or (listed.pci if listed else "")
    name = name or (listed.name if listed else pci)
    if event.code in ("path_error", "path_restored") or (event.code == "dead" and listed and not pci):
        message = (
            f"the NVMe controller {name} is {'connected again' if event.code == 'path_restored' else 'not connected'}"
        )
        return _LineMeaning(Severity.WARNING, "nvme_path", name, message, f"path {name}")
    if event.code == "dead":
        message = f"the NVMe controller {name} is dead" + (", gone from the bus" if event.field("csts") else "")
        return _LineMeaning(Severity.DEGRADED, "nvme", pci or name, message, f"disk {pci or name}")
    message = COMMAND_ERRORS.get(event.code, "")
    return (
        _LineMeaning(
            Severity.WARNING, "command_error", name, f"the NVMe controller {name} {message}", f"disk {pci or name}"
        )
        if message
        else None
    )


def _disk_meaning(event: KernelEvent, node: Inventory, config: Config) -> _LineMeaning | None:
    device = event.field("device")
    disk = whole_disk(device)
    if disk.startswith(IGNORED_DISKS):
        return None
    if event.code in ("raid_failed", "raid_disk"):
        return _array_meaning(event, node, device)
    if event.code in ("path_error", "path_restored"):
        path = event.field("path") or disk
        message = f"the path {path} to a disk is {'back' if event.code == 'path_restored' else 'lost'}"
        return _LineMeaning(Severity.WARNING, "path", path, message, f"path {path}")
    if event.code == "controller_fault":
        name = event.pci or event.field("controller")
        message = f"the RAID or host bus adapter {name} had a fault"
        return _LineMeaning(Severity.WARNING, "adapter", name, message, f"adapter {name}")
    if event.code in DATA_LOSS_CODES and disk:
        return _data_loss_meaning(event, disk, node, config)
    part = disk or event.field("port") or event.field("scsi") or "a disk"
    message = COMMAND_ERRORS.get(event.code, "")
    return (
        _LineMeaning(Severity.WARNING, "command_error", part, f"{part} {message}", _disk_part(part, node))
        if message
        else None
    )


def _disk_part(disk: str, node: Inventory) -> str:
    """Return the part name for a disk: its PCI address. The name alone is not enough, because with several paths
    nvme1n1 may belong to nvme0.
    """
    card = nvme_controller(disk)
    pcis = {listed.name: listed.pci for listed in node.disks}
    return f"disk {pcis.get(disk) or pcis.get(card) or card}" if card else f"disk {disk}"


def _data_loss_meaning(event: KernelEvent, disk: str, node: Inventory, config: Config) -> _LineMeaning:
    operation = event.field("operation")
    device = event.field("device")
    contents = _contents_text(
        [m.point for m in node.mounts if (disk in m.disks and disk not in m.redundant) or m.device == device]
    )
    redundant = "" if contents else ", ".join(m.point for m in node.mounts if disk in m.redundant)
    names = (disk, nvme_controller(disk))
    expected = not redundant and any(
        {*listed.ids} & {*config.expected} for listed in node.disks if listed.name in names
    )
    is_watched = (contents or expected) and operation not in HARMLESS_OPERATIONS
    verb = {"READ": "read", "WRITE": "written", "FLUSH": "written"}.get(operation, "read or written")
    name = DATA_LOSS_CODES[event.code]
    message = f"data on disk {disk} could not be {verb}" if name == "io_error" else f"the disk {disk} has bad sectors"
    return _LineMeaning(
        Severity.DEGRADED if is_watched else Severity.WARNING,
        name,
        disk,
        message + (f"; another copy or path serves {redundant}" if redundant else contents),
        _disk_part(disk, node),
        "expected" if is_watched and not contents else "",
        _is_network_storage([disk], node),
    )


def _is_network_storage(names: Sequence[str], node: Inventory) -> bool:
    """Return True for iSCSI and NVMe over fabrics. Several nodes may lose such disks for the same reason."""
    listed = [disk for disk in node.disks if disk.name in names]
    return bool(listed) and not any(disk.pci for disk in listed)


def _contents_text(points: Sequence[str]) -> str:
    return f"; it contains {', '.join(points)}" if points else ""


def _array_meaning(event: KernelEvent, node: Inventory, array: str) -> _LineMeaning:
    if event.code == "raid_disk":
        disk = event.field("disk")
        message = f"a disk of the RAID {array} failed" + (f": {disk}" if disk else "")
        return _LineMeaning(Severity.WARNING, "raid_disk", array, message, f"raid {array}")
    contents = _contents_text([mount.point for mount in node.mounts if mount.device == array])
    severity = Severity.DEGRADED if contents else Severity.WARNING
    return _LineMeaning(severity, "raid_failed", array, f"the RAID {array} failed{contents}", f"raid {array}")


def _file_system_meaning(event: KernelEvent, node: Inventory) -> _LineMeaning | None:
    """Return the meaning of an event on one of the node's file systems. The text is the same as in run().

    Return None for other file systems, which the check `filesystem` handles.
    """
    device = event.field("device")
    mount = next((mount for mount in node.mounts if device and mount.device == device), None)
    if mount is None:
        return None
    action = "shut down" if event.code == "shutdown" else "turned read-only"
    shared = _is_network_storage(mount.disks, node)
    if mount.point == "/":
        message = f"the root file system ({mount.fstype}) was {action} by the kernel"
        return _LineMeaning(Severity.CRITICAL, "root_stopped", "/", message, "mount /", shared=shared)
    message = f"{mount.point} ({mount.fstype}) was {action} by the kernel"
    return _LineMeaning(Severity.DEGRADED, "stopped", mount.point, message, f"mount {mount.point}", shared=shared)


def baseline(host: Host, config: Config) -> Iterator[Entry | LeftOut]:
    recorded_ids = set()
    for name in host.list(NVME):
        path = f"{NVME}/{name}"
        serial, state = host.read_or_empty(f"{path}/serial"), host.read_or_empty(f"{path}/state")
        if host.read_or_empty(f"{path}/transport") not in ("", "pcie") or not serial:
            continue  # a disk over the network is monitored by its storage array
        recorded_ids.add(serial)
        if state == "live":
            yield Entry(
                "block_device", "expected", key=serial, note=f"{name} {host.read_or_empty(f'{path}/model')}".strip()
            )
        else:
            yield LeftOut("block_device", f"{name} is {state or 'of unknown state'}", "expected", serial)
    for name in host.list(BLOCK):
        path = f"{BLOCK}/{name}"
        is_removable = host.read_or_empty(f"{path}/removable") == "1" or "/usb" in (host.link_target(path) or "")
        if name.startswith((*NO_DISKS, "nvme")) or is_removable:
            continue
        ids = (host.read_or_empty(f"{path}/{file}") for file in ID_FILES)
        disk_id = next((text for text in ids if text), "")
        if disk_id and disk_id not in recorded_ids:
            recorded_ids.add(disk_id)  # if there are several paths to a disk, the first is used
            note = f"{name} {host.read_or_empty(f'{path}/device/model')}".strip()
            yield Entry("block_device", "expected", key=disk_id, note=note)


_DISK_TODO = (
    "journalctl -k shows the disk's errors. nvme list, lsblk -o NAME,SERIAL,WWN and smartctl -a show its state. "
    "Reseat the disk and check its link (lspci -vv). If the errors continue, replace the disk."
)

OBSERVATIONS = {
    "md_missing_disks": Meaning("Number of disks missing from a software RAID; 0 if the RAID is complete.", ("array",)),
}

EXPLAIN = {
    "block_device/missing": Explain(
        Severity.DEGRADED,
        Clears.PASS,
        "A disk that is named in the settings is missing.",
        "Jobs lose the file system on this disk, or a RAID loses redundancy. Scratch space is missing or less safe.",
        f"{_DISK_TODO} If the disk was replaced on purpose, update the baseline (healthd baseline).",
        confirm="confirm_seconds",
        expects="expected",
    ),
    "block_device/nvme": Explain(
        Severity.DEGRADED,
        Clears.REBOOT,
        "The controller of an NVMe disk is dead, or its reset does not complete.",
        "Reads and writes on this disk fail or hang. Jobs that use the disk fail or hang too.",
        f"Power-cycle the node, because a warm reboot may leave the controller in the same state. {_DISK_TODO}",
        confirm="confirm_seconds",
        at_once=True,
        remedy=Remedy.POWER_CYCLE,
    ),
    "block_device/nvme_path": Explain(
        Severity.WARNING,
        Clears.PASS,
        "An NVMe-over-fabrics controller is not connected.",
        "One path to the storage is lost. With multipath, I/O continues on the other paths. Without multipath, "
        "access to the file systems on this storage hangs.",
        "No action tonight. nvme list-subsys shows the paths. Check the network and the storage target.",
        confirm="confirm_seconds",
        at_once=True,
    ),
    "block_device/stopped": Explain(
        Severity.DEGRADED,
        Clears.REBOOT,
        "The kernel found errors in a local file system and made it read-only or shut it down.",
        "Jobs cannot write to this file system, and their last writes may be lost.",
        "journalctl -k shows the first error. Unmount the file system, run fsck (or xfs_repair) and mount it again, or "
        "reboot with fsck.",
        shared=None,
    ),
    "block_device/root_stopped": Explain(
        Severity.CRITICAL,
        Clears.REBOOT,
        "The kernel found errors in the root file system and made it read-only or shut it down.",
        "Logging and spooling fail. Jobs fail in unexpected places, and new jobs cannot start.",
        "journalctl -k or the console shows the first error. Reboot with fsck.mode=force. If the error recurs, replace "
        "the disk.",
        shared=None,
    ),
    "block_device/io_error": Explain(
        Severity.DEGRADED,
        Clears.REBOOT,
        "The kernel log reports that data on a disk could not be read or written. healthd only warns, for a day, if "
        "a RAID has a copy of the data or other paths lead to the disk. It also only warns if the disk is not named "
        "in the settings and contains none of the node's file systems.",
        "Jobs that use the disk fail, and the kernel may stop the file system next.",
        f"If the condition is only a warning, no action is needed tonight. {_DISK_TODO}",
        also=(Severity.WARNING,),
        shared=None,
        milder=Ends(Clears.WINDOW, "warning_window_seconds"),
    ),
    "block_device/medium_error": Explain(
        Severity.DEGRADED,
        Clears.REBOOT,
        "A disk reports that it cannot read some of its sectors. healthd only warns, for a day, if a RAID has a copy "
        "of the data. It also only warns if the disk is not named in the settings and contains none of the node's "
        "file systems.",
        "The data in these sectors is lost. More sectors usually follow.",
        f"If the condition is only a warning, no action is needed tonight. {_DISK_TODO}",
        also=(Severity.WARNING,),
        milder=Ends(Clears.WINDOW, "warning_window_seconds"),
    ),
    "block_device/command_error": Explain(
        Severity.WARNING,
        Clears.WINDOW,
        "The kernel log reports that a disk or its controller did not respond in time, was reset, or returned an "
        "error for a command. The log does not report lost data.",
        "Reads and writes took several seconds. If this happens repeatedly, the drive may be about to fail.",
        f"No action tonight. At the next maintenance: {_DISK_TODO}",
        window="warning_window_seconds",
    ),
    "block_device/path": Explain(
        Severity.WARNING,
        Clears.WINDOW,
        "One path to a disk failed (multipath, iSCSI, Fibre Channel). The condition clears when the kernel log reports "
        "that the path is restored.",
        "With multipath, I/O continues on the other paths. Without multipath, access to the file systems on the disk "
        "hangs.",
        "No action tonight. multipath -ll shows the paths. Check the network and the storage target.",
        window="warning_window_seconds",
    ),
    "block_device/adapter": Explain(
        Severity.WARNING,
        Clears.WINDOW,
        "The firmware of a RAID controller or host bus adapter stopped or reported a critical event.",
        "All disks behind the adapter hang during its reset, or are lost.",
        "No action tonight if the disks respond. At the next maintenance, check the adapter with the vendor's tool "
        "(storcli, sas3ircu, ssacli) and update its firmware. If the fault recurs, replace the adapter.",
        window="warning_window_seconds",
    ),
    "block_device/raid_disk": Explain(
        Severity.WARNING,
        Clears.WINDOW,
        "The kernel log reports that a software RAID lost a disk or could not write to one of its disks.",
        "No effect yet, but the next disk failure may cause data loss. block_device/raid_degraded stays open until "
        "the RAID is complete.",
        "No action tonight. cat /proc/mdstat and mdadm --detail /dev/NAME show which disk is missing. Replace it, then "
        "run mdadm --add.",
        window="warning_window_seconds",
    ),
    "block_device/raid_failed": Explain(
        Severity.DEGRADED,
        Clears.REBOOT,
        "The kernel log reports that a software RAID lost more disks than it can tolerate. The condition is only a "
        "warning if the RAID contains none of the node's file systems.",
        "Jobs cannot access any data on the RAID. The data may be lost permanently.",
        "If the condition is only a warning, no action is needed tonight. Run cat /proc/mdstat, and mdadm --examine "
        "for each disk. If all disks failed at once, check their adapter.",
        also=(Severity.WARNING,),
        milder=Ends(Clears.WINDOW, "warning_window_seconds"),
    ),
    "block_device/raid_degraded": Explain(
        Severity.WARNING,
        Clears.PASS,
        "A software RAID runs with fewer disks than it should. It may be rebuilding.",
        "No effect yet, but the next disk failure may cause data loss.",
        "No action tonight. cat /proc/mdstat and mdadm --detail /dev/NAME show which disk is missing. Replace it, then "
        "run mdadm --add.",
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
