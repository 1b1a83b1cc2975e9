"""Describes this node's state at one time, and parses text from /proc and /sys. All functions are pure.

Root reads all values; no job reports them. A line in an unexpected format is skipped. This is acceptable because the
values are only additional evidence: the slowness is measured elsewhere.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from healthd.common.text import is_decimal, regex
from healthd.host.disks import NO_DISKS, whole_disk

MAX_PARTS = 256  # maximum number of disks and mounts; a node has dozens
MAX_NAME = 60  # maximum characters of a name within a sentence

_PRESSURE = regex(r"(?m)^(some|full) avg10=[0-9.]+ avg60=[0-9.]+ avg300=[0-9.]+ total=([0-9]{1,19})$")
_MOUNT = regex(r"device .{1,4096} mounted on (.{1,4096}) with fstype nfs4? statvers=.*")
_OPERATION = regex(r"\s*([A-Z_]{1,32}): ([0-9 ]{1,256})")
_RATE = regex(
    r"([0-9]{1,5}(?:\.[0-9]+)?) Gb/sec.*",
)


class Gpu(NamedTuple):
    """A GPU's values, or None if NVML does not report them. `reasons` are bits of NVML_CLOCKS_EVENT_REASON_*."""

    celsius: int | None
    sm_mhz: int | None
    reasons: int | None


class Link(NamedTuple):
    """A PCIe link.

    Attributes:
        gt_per_s: speed; 32.0 means PCIe 5.0.
        width: number of lanes.
    """

    gt_per_s: float
    width: int


class OperationTimes(NamedTuple):
    """The number of operations on a disk or mount since boot, and their total duration."""

    operations: int
    milliseconds: int


@dataclass(frozen=True, slots=True)
class Reading:
    """The node's state. `time` is in epoch seconds. Values that could not be read are missing.

    Attributes:
        gpus: maps each PCI address to the NVML values.
        links: maps each PCI address to the link of the GPU or network adapter.
        errors: maps each PCI address to AER counters: "correctable", "nonfatal".
        ports: maps "mlx5_0/1" to the counters by sysfs name.
        speeds: the port's Gbit/s.
        waiting: maps "cpu some", "io full" to the microseconds that tasks waited (PSI).
        cpu: CPU time in ticks: "steal", "idle", "all".
        disks, mounts: maps each name to its OperationTimes.
        memory: pages swapped in and out, "oom_kill".
        pinned: maps CPUs ("0", "0-7") to the number of job processes that may use only these.
    """

    time: float
    gpus: Mapping[str, Gpu] = field(default_factory=dict)
    links: Mapping[str, Link] = field(default_factory=dict)
    errors: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    ports: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    speeds: Mapping[str, float] = field(default_factory=dict)
    waiting: Mapping[str, int] = field(default_factory=dict)
    cpu: Mapping[str, int] = field(default_factory=dict)
    disks: Mapping[str, OperationTimes] = field(default_factory=dict)
    mounts: Mapping[str, OperationTimes] = field(default_factory=dict)
    memory: Mapping[str, int] = field(default_factory=dict)
    pinned: Mapping[str, int] = field(default_factory=dict)


def pressure(text: str, resource: str) -> Iterator[tuple[str, int]]:
    """Parse /proc/pressure/cpu, memory or io (Linux, accounting/psi.rst)."""
    for match in _PRESSURE.finditer(text):
        yield f"{resource} {match[1]}", int(match[2])


def cpu_times(text: str) -> dict[str, int]:
    """Parse the first line of /proc/stat (proc_stat(5)).

    Its columns are user nice system idle iowait irq softirq steal guest guest_nice. Guest time is included in user.
    """
    cells = text.partition("\n")[0].split()
    if len(cells) < 9 or cells[0] != "cpu" or not all(map(is_decimal, cells[1:9])):
        return {}
    ticks = [int(cell) for cell in cells[1:9]]
    return {"idle": ticks[3] + ticks[4], "steal": ticks[7], "all": sum(ticks)}


def disk_times(text: str) -> dict[str, OperationTimes]:
    """Parse /proc/diskstats (Linux, admin-guide/iostats.rst): reads and writes on whole disks, and their time in ms."""
    found: dict[str, OperationTimes] = {}
    for line in text.split("\n"):
        cells = line.split()
        if len(cells) < 14 or len(found) >= MAX_PARTS or not all(map(is_decimal, cells[3:11])):
            continue
        name = cells[2]
        if whole_disk(name) == name and not name.startswith(NO_DISKS):
            found[name[:MAX_NAME]] = OperationTimes(int(cells[3]) + int(cells[7]), int(cells[6]) + int(cells[10]))
    return found


def nfs_times(text: str) -> dict[str, OperationTimes]:
    """Parse /proc/self/mountstats (nfs-utils, mountstats(8)): operations on each NFS mount, and their milliseconds.

    The columns are operations, transmissions, timeouts, bytes sent, bytes received, and the times in the queue, until
    the reply, and in total. The last of these times is used. The kernel's numbers can fall below 0; an operation with
    such a number is skipped.
    """
    found: dict[str, OperationTimes] = {}
    mount_point = ""
    for line in text.split("\n"):
        if line.startswith("device "):
            match = _MOUNT.fullmatch(line)
            mount_point = match[1][:MAX_NAME] if match and len(found) < MAX_PARTS else ""
        elif mount_point and (operation := _OPERATION.fullmatch(line)):
            numbers = operation[2].split()
            if len(numbers) < 8 or not all(len(number) < 19 for number in (numbers[0], numbers[7])):
                continue
            before = found.get(mount_point, OperationTimes(0, 0))
            found[mount_point] = OperationTimes(
                before.operations + int(numbers[0]), before.milliseconds + int(numbers[7])
            )
    return found


def memory_events(text: str) -> dict[str, int]:
    """Parse /proc/vmstat: pswpin and pswpout (pages), oom_kill."""
    rows = (line.split() for line in text.split("\n"))
    names = ("pswpin", "pswpout", "oom_kill")
    return {row[0]: int(row[1]) for row in rows if len(row) == 2 and row[0] in names and is_decimal(row[1])}


def gbit_per_s(text: str) -> float | None:
    """Parse a port's `rate`, such as "400 Gb/sec (4X NDR)"."""
    match = _RATE.fullmatch(text)
    return float(match[1]) if match else None


def link(speed: str, width: str) -> Link | None:
    """Parse current_link_speed ("32.0 GT/s PCIe") and current_link_width ("16"). Return None if no link is trained."""
    rate = speed.partition(" GT/s")[0]
    if not is_decimal(width) or not is_decimal(rate.replace(".", "", 1)) or not 0 < int(width[:4]) <= 32:
        return None
    return Link(float(rate), int(width))
