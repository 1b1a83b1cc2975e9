"""Local disks: those that are gone, dead NVMe controllers, file systems that the kernel stopped, degraded RAIDs.

Rules: Meta's study counts block-device errors as high severity; node_exporter and gpud watch the same. Which disks
belong to the node only a baseline says. A controller that works is "live" (Linux, drivers/nvme/host/sysfs.c). That the
kernel stopped a file system after errors is told by /proc/self/mountinfo: who mounts read-only sets it for the mount
too (see Mount.turned). ext4's errors_count would not do: it stays until fsck and says nothing of now. An XFS that was
shut down says so nowhere, but its root answers EIO. What stands until a reboot does so because a dead disk soon goes
from sysfs and its file system is unmounted, and both would look like a clean run.
"""

from __future__ import annotations

import errno
from collections.abc import Iterator
from dataclasses import dataclass

from healthd.config import CheckConfig
from healthd.host import Host
from healthd.model import Clears, Explain, Finding, Observation, Severity
from healthd.mountinfo import MOUNTINFO, Mount, is_local, parse_all
from healthd.past import Past

USES = ""

NVME = "/sys/class/nvme"
BLOCK = "/sys/block"
NOT_LIVE = {"new", "resetting", "connecting", "deleting", "deleting (no IO)", "dead"}
ON_DISKS = {"ext2", "ext3", "ext4", "xfs", "btrfs", "f2fs", "jfs", "bcachefs"}
NO_DISKS = ("loop", "ram", "zram", "dm-", "md", "sr", "fd")


@dataclass(frozen=True, slots=True)
class Config(CheckConfig):
    """expected         serial number or wwid of each disk that this node has, as sysfs has them; others are not judged
    confirm_seconds  a disk must be gone, or an NVMe controller not be live, for so long: a reset takes seconds
    """

    expected: tuple[str, ...] = ()
    confirm_seconds: float = 60.0


def validate(config: Config) -> str | None:
    return "expected: a serial number or wwid must not be empty" if "" in config.expected else None


def run(host: Host, config: Config, past: Past) -> Iterator[Finding | Observation]:
    unreadable: list[str] = []
    for look in (_controllers, _missing, _file_systems, _arrays):
        try:
            yield from look(host, config, unreadable)
        except (OSError, ValueError) as error:  # must not hide what the others find
            unreadable.append(str(error))
    if unreadable:
        raise ValueError("; ".join(unreadable))


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
            for file in ("wwid", "device/wwid", "serial", "device/serial"):
                yield host.read(f"{BLOCK}/{name}/{file}")


def _file_systems(host: Host, config: Config, unreadable: list[str]) -> Iterator[Finding]:
    mounts, wrong = parse_all(host.read_shared(MOUNTINFO))
    uppermost = {mount.point: mount for mount in mounts}
    on_disks: dict[str, Mount] = {}
    for mount in mounts:
        if mount.fstype in ON_DISKS and (mount.device not in on_disks or mount.point == "/"):
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
        if missing is None:  # striped arrays have nothing to lose
            continue
        if not (missing.isascii() and missing.isdecimal() and len(missing) < 6):
            unreadable.append(f"{BLOCK}/{name}/md/degraded: not a number of disks: {missing[:40]!r}")
            continue
        yield Observation("md_missing_disks", int(missing), labels=(("array", name),))
        if int(missing):
            message = f"the RAID {name} runs without {missing} of its disks"
            yield Finding(Severity.WARNING, "block_device/raid_degraded", name, message)


_DISK_TODO = (
    "journalctl -k for its errors; nvme list, lsblk -o NAME,SERIAL,WWN, smartctl -a. Reseat it, look at its link "
    "(lspci -vv), replace it."
)

EXPLAIN = {
    "block_device/missing": Explain(
        Severity.DEGRADED,
        Clears.PASS,
        "A disk that the site's settings name is no longer there.",
        "Its file system or its part of a RAID is lost to jobs: scratch space is missing, or less safe.",
        f"{_DISK_TODO} If it was replaced on purpose, write the new baseline.",
    ),
    "block_device/nvme": Explain(
        Severity.DEGRADED,
        Clears.REBOOT,
        "An NVMe disk's controller does not work: it is dead, or its reset does not end.",
        "Reads and writes of that disk fail or hang, and so do the jobs that use it.",
        f"Power the node off and on: a warm reboot may leave the controller as it is. {_DISK_TODO}",
    ),
    "block_device/nvme_path": Explain(
        Severity.WARNING,
        Clears.PASS,
        "A controller of NVMe over fabrics is not connected.",
        "One way to the storage is lost. With multipath the others serve; else what is mounted from it stands still.",
        "nvme list-subsys shows the paths; look at the network and at the storage target.",
    ),
    "block_device/stopped": Explain(
        Severity.DEGRADED,
        Clears.REBOOT,
        "The kernel turned a local file system read-only, or shut it down, after errors.",
        "Jobs cannot write there, and what they wrote last may be lost.",
        "journalctl -k shows the first error. Unmount it, fsck (xfs_repair), mount it again; or reboot with fsck.",
    ),
    "block_device/root_stopped": Explain(
        Severity.CRITICAL,
        Clears.REBOOT,
        "The kernel turned the root file system read-only, or shut it down, after errors.",
        "Nothing can be logged or spooled: jobs fail in odd places, and new ones cannot start.",
        "journalctl -k or the console shows the first error. Reboot with fsck.mode=force. Again: replace the disk.",
    ),
    "block_device/raid_degraded": Explain(
        Severity.WARNING,
        Clears.PASS,
        "A software RAID runs with fewer disks than it should; it may be rebuilding.",
        "None, but the next failing disk may take the data with it.",
        "cat /proc/mdstat; mdadm --detail /dev/NAME shows which disk is out. Replace it, then mdadm --add.",
    ),
}
