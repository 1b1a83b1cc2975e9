"""Reads this node's GPUs and measurable ports from sysfs. No driver is queried, because a query may hang."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import NamedTuple

from healthd.common.text import is_decimal, regex
from healthd.host.inventory import NVIDIA, device_kind

PCI_DEVICES = "sys/bus/pci/devices"
INFINIBAND = "sys/class/infiniband"
_RATE = regex(r"([0-9]{1,5}(?:\.[0-9])?) Gb/sec")  # "400 Gb/sec (4X NDR)"


class Parts(NamedTuple):
    """A node's parts.

    `gpus` maps each PCI address to its NUMA node (-1 if unknown), sorted by address. `ports` maps each ACTIVE port,
    such as "mlx5_0/1", to its rate in Gb/s (0 if unknown).
    """

    gpus: dict[str, int]
    ports: dict[str, float]


def read_parts(root: str) -> Parts:
    return Parts(dict(sorted(_gpus(os.path.join(root, PCI_DEVICES)))), dict(sorted(_ports(root))))


def _gpus(folder: str) -> Iterator[tuple[str, int]]:
    for address in _names(folder):
        directory = os.path.join(folder, address)
        if _read_text(directory, "vendor") == NVIDIA and device_kind(NVIDIA, _read_text(directory, "class")) == "gpu":
            numa = _read_text(directory, "numa_node")
            yield address.lower(), int(numa) if is_decimal(numa) else -1


def _ports(root: str) -> Iterator[tuple[str, float]]:
    for device in _names(os.path.join(root, INFINIBAND)):
        ports = os.path.join(root, INFINIBAND, device, "ports")
        for port in _names(ports):
            directory = os.path.join(ports, port)
            if _read_text(directory, "state").endswith("ACTIVE"):
                rate = _RATE.match(_read_text(directory, "rate"))
                yield f"{device}/{port}", float(rate[1]) if rate else 0.0


def _names(folder: str) -> list[str]:
    try:
        return os.listdir(folder)
    except OSError:
        return []


def _read_text(directory: str, name: str) -> str:
    try:
        with open(os.path.join(directory, name), encoding="ascii", errors="replace") as file:
            return file.read(64).strip()
    except OSError:
        return ""


def relation(part: str, gpus: dict[str, int]) -> str:
    """Return the relation of the GPUs in a pair "A>B".

    It is "near" if both are on the same NUMA node, and "far" if they are on different NUMA nodes. For other parts, it
    is "". Only pairs with the same relation are peers: without NVLink, a copy between GPUs on different CPUs is slower
    by design.
    """
    first, _, second = part.partition(">")
    if first not in gpus or second not in gpus:
        return ""
    return "near" if gpus[first] == gpus[second] else "far"
