"""Kernel names of disks, partitions, paths and controllers. The functions are pure."""

from __future__ import annotations

from healthd.common.text import regex

NO_DISKS = ("loop", "ram", "zram", "dm-", "md", "sr", "fd", "nbd")  # built on other devices, or empty
ID_FILES = ("wwid", "device/wwid", "serial", "device/serial")  # in /sys/block/NAME: unique ids of a disk

# A partition's number follows a "p" if the disk's own name ends with a digit (Linux, block/partitions/core.c).
_PARTITION = regex(r"((?:nvme\d+(?:c\d+)?n|mmcblk|md|loop|nbd|zram|drbd|pmem|rbd)\d+)p\d+|((?:sd|vd|hd|xvd)[a-z]+)\d+")
_PATH = regex(r"(nvme\d+)c\d+(n\d+)")  # one of several paths to a disk
_NVME = regex(r"(nvme\d+)(?:c\d+)?n\d+")


def whole_disk(name: str) -> str:
    """Return the disk that a name belongs to: "nvme0n1" for "nvme0n1p1" and for the path "nvme0c1n1", "sda" for
    "sda3"."""
    match = _PARTITION.fullmatch(name)
    disk = (match[1] or match[2]) if match else name
    path = _PATH.fullmatch(disk)
    return path[1] + path[2] if path else disk


def nvme_controller(name: str) -> str:
    """Return a disk's NVMe controller ("nvme0" for "nvme0n1"), or "" if it has none."""
    match = _NVME.fullmatch(whole_disk(name))
    return match[1] if match else ""
