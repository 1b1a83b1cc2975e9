"""What a node counts while a job runs: bytes of its InfiniBand ports, of its GPUs' NVLinks and PCIe, energy.

- ib: port_rcv_data and port_xmit_data, in units of four bytes (Linux, sysfs-class-infiniband). The descriptors are
  kept: a read at offset 0 asks the driver anew, and opening costs more than reading. mlx5 asks the adapter's firmware
  for each of them, which takes its time, but none of a core's.
- nvlink, pcie: one question to NVML a GPU (nvml.FIELDS_COUNTED). nvmlDeviceGetPcieThroughput is not asked: it counts
  for 20 ms within the call (nvml.h), and forgets what it counted. A driver that counts PCIe's bytes in 32 bits (580 on
  an H100) gives no pcie: they fill such a counter in a tenth of a second.
- power: the driver's mean over the last second, summed up here, where it tells one; else the energy that it counts,
  which costs 4.1 ms of a core a GPU on an H100 (driver 580), where the mean costs 0.006.

Each source is read as a whole: name -> part -> what that part has counted. A part that cannot be read is not in it.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Protocol

from healthd.common.errors import HealthdError
from healthd.common.text import is_decimal
from healthd.host import infiniband
from healthd.host.host import Host

if TYPE_CHECKING:
    from healthd.nvidia.nvml import NvmlGpu

IB, POWER = "ib", "power"
OF_GPUS = ("nvlink", "pcie", POWER)
SOURCES = (*OF_GPUS, IB)
COUNTERS = ("port_rcv_data", "port_xmit_data")
MOST_BYTES = 24  # of a counter's text: 2**64 has 20 digits
MOST_PORTS = 64
WIDTHS = (64, 32)

Counts = Mapping[str, Mapping[str, int]]


class NothingCounts(HealthdError):
    """This node has nothing that counts what is to be sampled."""


class Source(Protocol):
    """open raises OSError or HealthdError where it cannot be had; it returns what it lacks in a sentence, "" = nothing.
    narrow: leave out half of its parts; False if there is only one."""

    def open(self) -> str: ...
    def read(self) -> Counts: ...
    def narrow(self) -> bool: ...
    def close(self) -> None: ...


class IbPorts:
    """All ports of the node below `host.root`."""

    def __init__(self, host: Host) -> None:
        self._host = host
        self._descriptors: dict[str, tuple[int, ...]] = {}

    def open(self) -> str:
        self.close()
        for port in infiniband.ports(self._host)[:MOST_PORTS]:
            opened: list[int] = []
            try:
                for name in COUNTERS:
                    path = self._host.path(infiniband.path(port, f"counters/{name}"))
                    opened.append(os.open(path, os.O_RDONLY | os.O_CLOEXEC))
            except OSError:  # a port whose driver counts nothing, or that is being taken out
                for descriptor in opened:
                    os.close(descriptor)
                continue
            self._descriptors[port] = tuple(opened)
        if not self._descriptors:
            raise NothingCounts("there is no InfiniBand port that counts bytes")
        return ""

    def read(self) -> Counts:
        counts = {}
        for port, descriptors in self._descriptors.items():
            count = 0
            try:
                for descriptor in descriptors:
                    count += counted(os.pread(descriptor, MOST_BYTES, 0))
            except (OSError, ValueError):  # it was taken out, or its adapter does not answer
                continue
            counts[port] = count
        return {IB: counts}

    def narrow(self) -> bool:
        if len(self._descriptors) < 2:
            return False
        for port in list(self._descriptors)[(len(self._descriptors) + 1) // 2 :]:
            self._close(port)
        return True

    def close(self) -> None:
        for port in list(self._descriptors):
            self._close(port)

    def _close(self, port: str) -> None:
        for descriptor in self._descriptors.pop(port):
            with contextlib.suppress(OSError):
                os.close(descriptor)


class GpuCounters:
    """Of all GPUs that answer; NVML is open between `open` and `close`. clock: seconds that only grow."""

    def __init__(self, host: Host, names: Sequence[str], clock: Callable[[], float] = time.monotonic) -> None:
        self._host = host
        self._wanted = self._names = tuple(names)
        self._clock = clock
        self._energy: dict[str, tuple[float, float]] = {}  # PCI address -> when it was looked at, millijoules by then
        self._most: int | None = None

    def open(self) -> str:
        """What no GPU tells is not asked again: two counters of PCIe that are not told cost 0.3 ms on an H100."""
        if not self._host.gpus():
            raise NothingCounts("there is no GPU that answers NVML")
        self._names = self._wanted
        told = set[str]()
        answered = False
        for gpu in self._host.gpus():
            with contextlib.suppress(HealthdError, ValueError):
                told |= self._of(gpu).keys()
                answered = True
        if answered:  # else it may be over soon, and says nothing of what they could tell
            self._names = tuple(name for name in self._wanted if name in told)
        lacks = ", ".join(name for name in self._wanted if name not in self._names)
        return f"no GPU of this node tells {lacks} as a count that lasts" if lacks else ""

    def read(self) -> Counts:
        counts: dict[str, dict[str, int]] = {name: {} for name in self._names}
        for gpu in self._host.gpus()[: self._most]:
            try:
                told = self._of(gpu)
            except (HealthdError, ValueError):  # lost: it is the checks' to tell
                continue
            for name, count in told.items():
                counts[name][gpu.pci] = count
        return counts

    def _of(self, gpu: NvmlGpu) -> dict[str, int]:
        milliwatts = gpu.mean_power_milliwatts() if POWER in self._names else None
        if milliwatts is None:
            return gpu.counted(self._names)
        now = self._clock()
        before, energy = self._energy.get(gpu.pci, (now, 0.0))
        self._energy[gpu.pci] = now, energy + milliwatts * (now - before)
        counts = gpu.counted([name for name in self._names if name != POWER])
        return {**counts, POWER: int(self._energy[gpu.pci][1])}

    def narrow(self) -> bool:
        asked = len(self._host.gpus()[: self._most])
        if asked < 2:
            return False
        self._most = (asked + 1) // 2
        return True

    def close(self) -> None:
        with contextlib.suppress(HealthdError):  # a driver that is gone has nothing to close
            self._host.close_nvml()


def counted(text: bytes) -> int:
    """A counter as sysfs prints it. Raises ValueError."""
    word = text.decode("ascii", "replace").strip()
    if len(text) >= MOST_BYTES or not is_decimal(word):
        raise ValueError(f"not a count: {word[:40]!r}")
    return int(word)


class Total:
    """What all parts of a source counted together since it was first asked; a part counts from its second reading on,
    and where it was set back it counts nothing for once."""

    def __init__(self) -> None:
        self._last: Mapping[str, int] = {}
        self._total = 0

    def add(self, counts: Mapping[str, int]) -> int | None:
        """None: no part was there before, so that nothing is known of what was counted meanwhile."""
        last, self._last = self._last, counts
        both = [(last[part], count) for part, count in counts.items() if part in last]
        if not both:
            return None
        self._total += sum(growth(before, now) for before, now in both)
        return self._total


def growth(before: int, now: int) -> int:
    """What was counted meanwhile: past its end a counter begins at 0. 0 where it was set back."""
    if now >= before:
        return now - before
    for bits in WIDTHS:
        end = 1 << bits
        if before < end and before > end - (end >> 3) and now < end >> 3:
            return now + end - before
    return 0
