"""Reads node counters while a job runs: bytes on InfiniBand ports, NVLinks and PCIe links, and energy.

- ib: port_rcv_data and port_xmit_data, in units of four bytes (Linux, sysfs-class-infiniband). The file descriptors
  stay open, because opening costs more than reading. Each read at offset 0 queries the driver again. mlx5 queries the
  adapter's firmware for each counter, which takes time but no CPU time.
- nvlink, pcie: one NVML call per GPU (nvml.FIELDS_COUNTED). nvmlDeviceGetPcieThroughput is not used: it counts only
  during the call, for 20 ms (nvml.h). The source pcie is not available with a driver that counts PCIe bytes in 32 bits
  (580 on an H100): such a counter overflows within a tenth of a second.
- power: if the driver reports its mean power over the last second, this mean is accumulated here. Otherwise, the
  driver's energy counter is read. On an H100 (driver 580), the energy counter costs 4.1 ms of a core per GPU; the mean
  costs 0.006 ms.

All counters of a source are read together. The result has the counts by counter name and by port, link or GPU. A
counter that cannot be read is missing from the result.
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
GPU_SOURCES = ("nvlink", "pcie", POWER)
SOURCES = (*GPU_SOURCES, IB)
COUNTERS = ("port_rcv_data", "port_xmit_data")
MAX_COUNT_BYTES = 24  # maximum bytes of a counter's text; 2**64 has 20 digits
MAX_PORTS = 64
WIDTHS = (64, 32)

Counts = Mapping[str, Mapping[str, int]]


class NoCounters(HealthdError):
    """The node has no counter for the requested sources."""


class Source(Protocol):
    """A source of counters.

    `open` opens the source. It returns a sentence about missing counters, or "", and raises OSError or HealthdError if
    the source is not available. `narrow` stops reading half of the ports or GPUs. It returns False if there is only one
    port or GPU.
    """

    def open(self) -> str: ...
    def read(self) -> Counts: ...
    def narrow(self) -> bool: ...
    def close(self) -> None: ...


class IbPorts:
    """InfiniBand ports of the node whose /sys is below `host.root`."""

    def __init__(self, host: Host) -> None:
        self._host = host
        self._descriptors: dict[str, tuple[int, ...]] = {}

    def open(self) -> str:
        self.close()
        for port in infiniband.ports(self._host)[:MAX_PORTS]:
            opened: list[int] = []
            try:
                for name in COUNTERS:
                    path = self._host.path(infiniband.path(port, f"counters/{name}"))
                    opened.append(os.open(path, os.O_RDONLY | os.O_CLOEXEC))
            except OSError:  # the port's driver has no counters, or the adapter is being removed
                for descriptor in opened:
                    os.close(descriptor)
                continue
            self._descriptors[port] = tuple(opened)
        if not self._descriptors:
            raise NoCounters("no InfiniBand port has byte counters")
        return ""

    def read(self) -> Counts:
        counts = {}
        for port, descriptors in self._descriptors.items():
            count = 0
            try:
                for descriptor in descriptors:
                    count += parse_count(os.pread(descriptor, MAX_COUNT_BYTES, 0))
            except (OSError, ValueError):  # the adapter was removed or does not respond
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
    """Counters of all GPUs that respond. NVML is open from `open` to `close`. `clock` returns monotonic seconds."""

    def __init__(self, host: Host, names: Sequence[str], clock: Callable[[], float] = time.monotonic) -> None:
        self._host = host
        self._requested = self._names = tuple(names)
        self._clock = clock
        self._energy: dict[str, tuple[float, float]] = {}  # time of last read and millijoules so far, by PCI address
        self._gpu_limit: int | None = None

    def open(self) -> str:
        """Open the source.

        A counter that no GPU reports is not read again: reading two unsupported PCIe counters costs 0.3 ms on an H100.
        """
        if not self._host.gpus():
            raise NoCounters("no GPU responds to NVML")
        self._names = self._requested
        available = set[str]()
        has_answer = False
        for gpu in self._host.gpus():
            with contextlib.suppress(HealthdError, ValueError):
                available |= self._read_gpu(gpu).keys()
                has_answer = True
        if has_answer:  # with any other error, the failure may be temporary
            self._names = tuple(name for name in self._requested if name in available)
        missing = ", ".join(name for name in self._requested if name not in self._names)
        return f"no GPU on this node has a usable counter for {missing}" if missing else ""

    def read(self) -> Counts:
        counts: dict[str, dict[str, int]] = {name: {} for name in self._names}
        for gpu in self._host.gpus()[: self._gpu_limit]:
            try:
                gpu_counts = self._read_gpu(gpu)
            except (HealthdError, ValueError):  # the GPU is lost, which the checks report
                continue
            for name, count in gpu_counts.items():
                counts[name][gpu.pci] = count
        return counts

    def _read_gpu(self, gpu: NvmlGpu) -> dict[str, int]:
        milliwatts = gpu.mean_power_milliwatts() if POWER in self._names else None
        if milliwatts is None:
            return gpu.activity_counters(self._names)
        now = self._clock()
        read_at, energy = self._energy.get(gpu.pci, (now, 0.0))
        self._energy[gpu.pci] = now, energy + milliwatts * (now - read_at)
        counts = gpu.activity_counters([name for name in self._names if name != POWER])
        return {**counts, POWER: int(self._energy[gpu.pci][1])}

    def narrow(self) -> bool:
        gpu_count = len(self._host.gpus()[: self._gpu_limit])
        if gpu_count < 2:
            return False
        self._gpu_limit = (gpu_count + 1) // 2
        return True

    def close(self) -> None:
        with contextlib.suppress(HealthdError):  # the driver is already unloaded
            self._host.close_nvml()


def parse_count(text: bytes) -> int:
    """Parse a counter's text from sysfs. Raises ValueError."""
    digits = text.decode("ascii", "replace").strip()
    if len(text) >= MAX_COUNT_BYTES or not is_decimal(digits):
        raise ValueError(f"not a count: {digits[:40]!r}")
    return int(digits)


class CounterTotal:
    """The total growth of a source's counts since the first reading, over all ports, links or GPUs.

    A port, link or GPU is included from its second reading. The first growth after a reset of a counter is 0.
    """

    def __init__(self) -> None:
        self._last: Mapping[str, int] = {}
        self._total = 0

    def add(self, counts: Mapping[str, int]) -> int | None:
        """Return the total, or None if the growth is unknown because the previous reading has none of these
        counters."""
        last, self._last = self._last, counts
        pairs = [(last[part], count) for part, count in counts.items() if part in last]
        if not pairs:
            return None
        self._total += sum(growth(before, now) for before, now in pairs)
        return self._total


def growth(before: int, now: int) -> int:
    """Return the growth between two readings.

    An overflow at the counter's width is taken into account. After a reset, the growth is 0.
    """
    if now >= before:
        return now - before
    for bits in WIDTHS:
        end = 1 << bits
        if before < end and before > end - (end >> 3) and now < end >> 3:
            return now + end - before
    return 0
