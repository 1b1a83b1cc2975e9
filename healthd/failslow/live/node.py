"""Reads this node's state from /proc and sysfs. If a job becomes slow, this state is compared with that of the last
hour.

Only /proc and sysfs are read. NVML is not: its values in `gpus` come from the sampling process. A port's counters come
from the adapter's firmware, and reading them can block for a minute if the adapter is dead. After READ_SECONDS, no
further port is read.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

from healthd.common.text import is_decimal, regex
from healthd.failslow.live import node_reading
from healthd.failslow.live.evidence import NodeChange, find_changes
from healthd.failslow.live.node_reading import Gpu, Link, Reading
from healthd.failslow.model import Cause
from healthd.host import infiniband
from healthd.host.host import PCI_DEVICES, Host
from healthd.host.job_processes import job_processes
from healthd.host.wakeup import FOREVER

READ_SECONDS = 2.0
MAX_PROCESSES = 256
MAX_PORTS = 64
# Counters that grow if a link, the fabric or a receiver is the cause (Linux, sysfs-class-infiniband; NVIDIA,
# "Understanding mlx5 Linux Counters and Status Parameters"). Pause frames (PFC) appear only in ethtool -S, not in
# sysfs.
COUNTERS = (
    *("symbol_error", "link_error_recovery", "link_downed", "port_rcv_errors", "port_xmit_discards", "port_xmit_wait"),
)
HW_COUNTERS = (
    *("np_cnp_sent", "np_ecn_marked_roce_packets", "rp_cnp_handled", "out_of_sequence", "packet_seq_err"),
    *("local_ack_timeout_err", "rnr_nak_retry_err", "roce_slow_restart", "out_of_buffer"),
)
_TOTAL = regex(r"(?m)^TOTAL_ERR_(?:COR|NONFATAL) ([0-9]{1,19})$")
_ALLOWED = regex(r"(?m)^Cpus_allowed_list:\s*([0-9,-]{1,200})$")


def read_node(
    host: Host, gpus: Mapping[str, Mapping[str, Any]], monotonic: Callable[[], float] = time.monotonic
) -> Reading:
    """Return the node's current state. The function never raises; values that cannot be read are missing."""
    deadline = monotonic() + READ_SECONDS
    devices = list(_devices(host))
    ports = dict(_ports(host, deadline, monotonic))
    speeds = ((port, node_reading.gbit_per_s(host.read_or_empty(infiniband.path(port, "rate")))) for port in ports)
    return Reading(
        host.now(),
        {pci: _gpu(values) for pci, values in gpus.items()},
        {pci: link for pci in devices if (link := _link(host, pci)) is not None},
        {pci: errors for pci in devices if (errors := dict(_errors(host, pci)))},
        ports,
        {port: speed for port, speed in speeds if speed is not None},
        {
            name: microseconds
            for resource in ("cpu", "memory", "io")
            for name, microseconds in node_reading.pressure(host.read_or_empty(f"/proc/pressure/{resource}"), resource)
        },
        node_reading.cpu_times(host.read_or_empty("/proc/stat")),
        node_reading.disk_times(host.read_or_empty("/proc/diskstats")),
        node_reading.nfs_times(host.read_or_empty("/proc/self/mountstats")),
        node_reading.memory_events(host.read_or_empty("/proc/vmstat")),
        _pinned(host),
    )


def _gpu(values: Mapping[str, Any]) -> Gpu:
    numbers = (values.get(name) for name in Gpu._fields)
    return Gpu(*(number if isinstance(number, int) else None for number in numbers))


def _devices(host: Host) -> Iterator[str]:
    """Yield the GPUs and network adapters, without virtual functions."""
    try:
        functions = host.pci_functions()
    except (OSError, ValueError):
        return
    for function in functions:
        if not function.virtual and (
            function.pci_class.startswith("0x02")
            or (function.vendor == "0x10de" and function.pci_class.startswith(("0x0300", "0x0302")))
        ):
            yield function.pci


def _link(host: Host, pci: str) -> Link | None:
    path = f"{PCI_DEVICES}/{pci}"
    return node_reading.link(
        host.read_or_empty(f"{path}/current_link_speed"), host.read_or_empty(f"{path}/current_link_width")
    )


def _errors(host: Host, pci: str) -> Iterator[tuple[str, int]]:
    for kind in ("correctable", "nonfatal"):
        total = _TOTAL.search(host.read_or_empty(f"{PCI_DEVICES}/{pci}/aer_dev_{kind}"))
        if total:
            yield kind, int(total[1])


def _ports(host: Host, deadline: float, monotonic: Callable[[], float]) -> Iterator[tuple[str, Mapping[str, int]]]:
    try:
        names = infiniband.ports(host)[:MAX_PORTS]
    except OSError:
        return
    for port in names:
        counts = {}
        for folder, counters in (("counters", COUNTERS), ("hw_counters", HW_COUNTERS)):
            for name in counters:
                if monotonic() > deadline:
                    return
                text = host.read_or_empty(infiniband.path(port, f"{folder}/{name}"))
                if is_decimal(text) and len(text) < 20:
                    counts[name] = int(text)
        yield port, counts


def _pinned(host: Host) -> dict[str, int]:
    found: dict[str, int] = {}
    for pid in islice(sorted(job_processes(host.root or "/")), MAX_PROCESSES):
        allowed = _ALLOWED.search(host.read_or_empty(f"/proc/{pid}/status"))
        if allowed:
            found[allowed[1]] = found.get(allowed[1], 0) + 1
    return found


# --- the last hour

INTERVAL_SECONDS = 60.0
MAX_READINGS = 60
BASELINE_READINGS = 10  # number of readings before the onset with which later readings are compared
FRESH_SECONDS = 10.0  # a reading that is not older than this is current


@dataclass(slots=True)
class Readings:
    """The last hour's readings, one per minute while a job is monitored.

    The start or end of a job causes no additional reading.

    Attributes:
        read: function that returns the node's current state.
        deadline: time of the next reading (monotonic), or FOREVER.
    """

    read: Callable[[], Reading]
    deadline: float = FOREVER
    _next: float = 0.0
    _fresh_until: float = 0.0
    _readings: deque[Reading] = field(default_factory=lambda: deque(maxlen=MAX_READINGS))

    def step(self, now: float, is_needed: bool) -> None:
        """Read the node if a reading is due. If no job is monitored (`is_needed` is False), forget all readings."""
        if not is_needed:
            self._readings.clear()
            self.deadline = FOREVER
            return
        if now >= self._next:
            self._next = now + INTERVAL_SECONDS
            self._take(now)
        self.deadline = self._next

    def _take(self, now: float) -> None:
        self._fresh_until = now + FRESH_SECONDS
        self._readings.append(self.read())

    def find_changes(self, onset: float | None, cause: Cause, gpu: str, now: float) -> tuple[NodeChange, ...]:
        """Return the changes since the onset (epoch seconds).

        If the clock was set back, readings with a later time than the last one are ignored.
        """
        if now >= self._fresh_until:
            self._take(now)
        if not self._readings:
            return ()
        newest = self._readings[-1].time
        ordered = [reading for reading in self._readings if reading.time <= newest]
        began = newest if onset is None else onset
        before = [reading for reading in ordered if reading.time < began][-BASELINE_READINGS:]
        since = [reading for reading in ordered if reading.time >= began] or ordered[-1:]
        return find_changes(before, since, cause, gpu)
