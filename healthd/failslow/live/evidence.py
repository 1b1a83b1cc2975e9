"""Finds what changed on this node when a job became slow: compares readings from before and after the onset.

All functions are pure.

Each comparison reports a value and its earlier value on the same node. A change is not a verdict: the slowness was
measured elsewhere, and the changes only show where to look next. The most likely explanation comes first. A value that
has not changed explains nothing and is not reported. The limits are simple (twice as much as before, and enough to
matter), so that a healthy node reports nothing.

If the ranks' times show the kind of cause, changes of this kind come first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

from healthd.common.text import is_decimal
from healthd.failslow.live.node_reading import OperationTimes, Reading
from healthd.failslow.model import Cause

MAX_CHANGES = 6
CHANGE_RATIO = 2.0  # relative to the earlier value
FAULT_WEIGHT = 0.6
FAMILY_BONUS = 1.0  # added to the weight of a change that matches the cause
CLOCK_LIMIT_REASONS = {  # bits in NVML_CLOCKS_EVENT_REASON_* that no busy GPU should have
    0x08: "hardware slowdown",
    0x20: "thermal slowdown by the driver",
    0x40: "thermal slowdown by the hardware",
    0x80: "power brake by the power supply",
}
POWER_CAP = 0x04  # normal for any busy GPU, so reported only if the clock fell
CLOCK_DROP = 0.05
TEMPERATURE_RISE_CELSIUS = 8
WAITING_SHARE = 0.1  # share of the time
STEAL_SHARE = 0.02
SLOW_MILLISECONDS, SLOW_RATIO, MIN_OPERATIONS_PER_SECOND = 20.0, 3.0, 1.0
SWAPPED_PAGES_PER_SECOND = 100.0
CORRECTED_ERRORS_PER_MINUTE = 10.0
CROWDED_PROCESSES = 4  # number of processes pinned to the same CPU

GPU, CPU, LINK, FABRIC, STORAGE = "gpu", "cpu", "link", "fabric", "storage"
FAMILIES: Mapping[Cause, frozenset[str]] = {
    Cause.COMPUTE: frozenset({GPU, CPU}),
    Cause.COMPUTE_GPU: frozenset({GPU}),
    Cause.COMPUTE_CPU: frozenset({CPU, STORAGE}),
    Cause.COMMUNICATION: frozenset({LINK, FABRIC}),
    Cause.COMMUNICATION_INTRA_NODE: frozenset({LINK}),
    Cause.COMMUNICATION_INTER_NODE: frozenset({FABRIC}),
    Cause.IMBALANCE: frozenset({STORAGE, CPU}),
}
# Port counters: minimum rate per second, weight and description.
PORT_COUNTERS: Mapping[str, tuple[float, float, str]] = {
    "link_downed": (0.0, 0.9, "link downs"),
    "link_error_recovery": (0.01, 0.7, "link recoveries"),
    "symbol_error": (1.0, 0.6, "symbol errors"),
    "port_rcv_errors": (1.0, 0.6, "packets received with errors"),
    "port_xmit_discards": (1.0, 0.5, "discarded transmit packets"),
    "local_ack_timeout_err": (0.1, 0.5, "acknowledgement timeouts"),
    "packet_seq_err": (1.0, 0.5, "NAKs for packets out of sequence"),
    "out_of_sequence": (1.0, 0.5, "packets out of sequence"),
    "rnr_nak_retry_err": (1.0, 0.4, "retries because the receiver was not ready (RNR NAK)"),
    "out_of_buffer": (1.0, 0.4, "packets without a receive buffer"),
    "roce_slow_restart": (1.0, 0.5, "RoCE slow restarts"),
    "rp_cnp_handled": (10.0, 0.5, "slowdowns by congestion (CNP handled)"),
    "np_cnp_sent": (10.0, 0.4, "congestion notifications to senders (CNP sent)"),
    "np_ecn_marked_roce_packets": (100.0, 0.3, "packets marked by a congested switch (ECN)"),
    "port_xmit_wait": (1e6, 0.3, "ticks of waiting to send"),
}


class NodeChange(NamedTuple):
    """A change on the node.

    Attributes:
        weight: the part of the slowness that the change could explain, 0 to 1; FAULT_WEIGHT or more means a hardware
        fault.
        sentence: a sentence without a full stop.
        part: PCI address or name of the hardware that changed, "" if there is none.
    """

    weight: float
    family: str
    sentence: str
    part: str = ""


class BeforeAfter(NamedTuple):
    """The first and last readings before the onset, and the first and last readings since the onset.

    If only a single reading is available, there are no rates.
    """

    first_before: Reading
    last_before: Reading
    first_after: Reading
    last_after: Reading

    def rates(self, select: Callable[[Reading], Mapping[str, int]]) -> Iterator[tuple[str, float, float]]:
        """Yield (name, rate per second before, rate per second since) for each counter that is in all four readings.

        A counter that was reset has no rate. If only one reading precedes the onset, there are no rates.
        """
        first, last, begin, now = (select(reading) for reading in self)
        before, since = self.last_before.time - self.first_before.time, self.last_after.time - self.first_after.time
        if before <= 0 or since <= 0:
            return
        for name in sorted(now.keys() & begin.keys() & last.keys() & first.keys()):
            growth, growth_before = now[name] - begin[name], last[name] - first[name]
            if growth >= 0 and growth_before >= 0:
                yield name, growth_before / before, growth / since


Comparison = Callable[[BeforeAfter], Iterator[NodeChange]]


def is_hardware_fault(change: NodeChange) -> bool:
    """Return True if the change is a fault in the node's own hardware, which load or congestion cannot cause."""
    return change.family in (GPU, LINK, FABRIC) and change.weight >= FAULT_WEIGHT


def find_changes(
    before: Sequence[Reading], since: Sequence[Reading], cause: Cause = Cause.UNKNOWN, gpu: str = ""
) -> tuple[NodeChange, ...]:
    """Return at most MAX_CHANGES changes. The most likely explanation comes first.

    Args:
        before, since: readings, oldest first. The last reading before the onset is also the first one in `since`.
        gpu: PCI address of the named rank's GPU. Its changes come before those of other GPUs.
    """
    if not before or not since:
        return ()
    readings = BeforeAfter(before[0], before[-1], before[-1] if len(since) == 1 else since[0], since[-1])
    family = FAMILIES.get(cause, frozenset())
    changes = [change for comparison in COMPARISONS for change in comparison(readings)]

    def rank(change: NodeChange) -> tuple[float, str]:
        belongs = change.family in family and (not gpu or change.family != GPU or change.part == gpu)
        return -(change.weight + (FAMILY_BONUS if belongs else 0.0)), change.sentence

    return tuple(sorted(changes, key=rank)[:MAX_CHANGES])


def gpu_changes(readings: BeforeAfter) -> Iterator[NodeChange]:
    for pci, now in readings.last_after.gpus.items():
        before = readings.last_before.gpus.get(pci)
        if before is None:
            continue
        new = (now.reasons or 0) & ~(before.reasons or 0)
        limits = [text for bit, text in CLOCK_LIMIT_REASONS.items() if new & bit]
        if limits:
            yield NodeChange(0.9, GPU, f"GPU {pci}: its clock is now limited ({', '.join(limits)})", pci)
        if now.sm_mhz and before.sm_mhz and now.sm_mhz < (1 - CLOCK_DROP) * before.sm_mhz:
            fell = 1 - now.sm_mhz / before.sm_mhz
            cause = " at its power limit" if new & POWER_CAP else ""
            sentence = f"GPU {pci}: clock {now.sm_mhz} MHz{cause}, {before.sm_mhz} MHz before"
            yield NodeChange(min(0.5 if cause else 0.95, 0.4 + fell), GPU, sentence, pci)
        if (
            now.celsius is not None
            and before.celsius is not None
            and now.celsius >= before.celsius + TEMPERATURE_RISE_CELSIUS
        ):
            yield NodeChange(0.3, GPU, f"GPU {pci}: temperature {now.celsius} C, {before.celsius} C before", pci)


def link_changes(readings: BeforeAfter) -> Iterator[NodeChange]:
    for pci, now in readings.last_after.links.items():
        before = readings.last_before.links.get(pci)
        if before is None:
            continue
        if now.width < before.width:
            yield NodeChange(0.85, LINK, f"{pci}: PCIe link with {now.width} lanes, {before.width} before", pci)
        if now.gt_per_s < before.gt_per_s:  # an idle GPU also lowers it
            sentence = f"{pci}: PCIe link at {now.gt_per_s:g} GT/s, {before.gt_per_s:g} before"
            yield NodeChange(0.4, LINK, sentence, pci)
    for kind, minimum, weight in (("nonfatal", 0.0, 0.8), ("correctable", CORRECTED_ERRORS_PER_MINUTE / 60, 0.4)):
        for pci, previous, current in readings.rates(_counter_selector("errors", kind)):
            if current > max(minimum, CHANGE_RATIO * previous):
                sentence = f"{pci}: {_per_minute_text(current, f'{kind} PCIe errors (AER)', previous)}"
                yield NodeChange(weight, LINK, sentence, pci)


def port_changes(readings: BeforeAfter) -> Iterator[NodeChange]:
    for port, speed in readings.last_after.speeds.items():
        before = readings.last_before.speeds.get(port)
        if before is not None and speed < before:
            yield NodeChange(0.9, FABRIC, f"port {port}: link at {speed:g} Gbit/s, {before:g} before", port)
    for name, (minimum, weight, text) in PORT_COUNTERS.items():
        for port, previous, current in readings.rates(_counter_selector("ports", name)):
            if current > max(minimum, CHANGE_RATIO * previous):
                yield NodeChange(weight, FABRIC, f"port {port}: {_per_minute_text(current, text, previous)}", port)


def pressure_changes(readings: BeforeAfter) -> Iterator[NodeChange]:
    """Compare PSI: "full" for memory and io (all tasks wait), and "some" for the CPUs, where "full" is always 0."""
    watched = {
        "cpu some": (CPU, "tasks waited for a CPU"),
        "memory full": (CPU, "all tasks waited for memory"),
        "io full": (STORAGE, "all tasks waited for disks or file servers"),
    }
    for name, previous, current in readings.rates(lambda reading: reading.waiting):
        if name in watched and current / 1e6 >= max(WAITING_SHARE, CHANGE_RATIO * previous / 1e6):
            family, text = watched[name]
            sentence = f"{text} {_percent(current / 1e6)} of the time, {_percent(previous / 1e6)} before (PSI)"
            yield NodeChange(min(0.9, current / 1e6), family, sentence)


def steal_changes(readings: BeforeAfter) -> Iterator[NodeChange]:
    rates = {name: (previous, current) for name, previous, current in readings.rates(lambda reading: reading.cpu)}
    if "steal" not in rates or "all" not in rates:
        return
    previous, current = (
        stolen / ticks if ticks else 0.0 for stolen, ticks in zip(rates["steal"], rates["all"], strict=True)
    )
    if current >= max(STEAL_SHARE, CHANGE_RATIO * previous):
        sentence = f"the hypervisor took {_percent(current)} of the CPU time (steal), {_percent(previous)} before"
        yield NodeChange(min(0.9, 3 * current), CPU, sentence)


def pinning_changes(readings: BeforeAfter) -> Iterator[NodeChange]:
    for cpus, processes in readings.last_after.pinned.items():
        before = readings.last_before.pinned.get(cpus, 0)
        if is_decimal(cpus) and processes >= max(CROWDED_PROCESSES, CHANGE_RATIO * before):
            sentence = f"{processes} job processes are pinned to CPU {cpus}, {before} before"
            yield NodeChange(0.6, CPU, sentence)


def memory_changes(readings: BeforeAfter) -> Iterator[NodeChange]:
    for name, previous, current in readings.rates(lambda reading: reading.memory):
        if name == "oom_kill" and current > 0:
            yield NodeChange(0.7, CPU, "the kernel killed a process because memory was exhausted")
        elif name != "oom_kill" and current >= max(SWAPPED_PAGES_PER_SECOND, CHANGE_RATIO * previous):
            direction = "in" if name == "pswpin" else "out"
            yield NodeChange(0.6, CPU, f"{current:.0f} pages per second swapped {direction}, {previous:.0f} before")


def storage_changes(readings: BeforeAfter) -> Iterator[NodeChange]:
    for kind, select in (("disk", lambda reading: reading.disks), ("NFS", lambda reading: reading.mounts)):
        yield from _latency_changes(readings, kind, select)


def _latency_changes(
    readings: BeforeAfter, kind: str, select: Callable[[Reading], Mapping[str, OperationTimes]]
) -> Iterator[NodeChange]:
    first, last, begin, now = (select(reading) for reading in readings)
    seconds = readings.last_after.time - readings.first_after.time
    for name in sorted(now.keys() & begin.keys()):
        operations = now[name].operations - begin[name].operations
        milliseconds = now[name].milliseconds - begin[name].milliseconds
        if seconds <= 0 or milliseconds < 0 or operations < max(1.0, MIN_OPERATIONS_PER_SECOND * seconds):
            continue
        previous_operations = last[name].operations - first[name].operations if name in first and name in last else 0
        previous_mean = (
            (last[name].milliseconds - first[name].milliseconds) / previous_operations
            if previous_operations > 0
            else None
        )
        mean = milliseconds / operations
        if mean >= SLOW_MILLISECONDS and previous_mean is not None and mean >= SLOW_RATIO * previous_mean:
            yield NodeChange(0.5, STORAGE, f"{kind} {name}: {mean:.0f} ms per operation, {previous_mean:.1f} ms before")


COMPARISONS: Sequence[Comparison] = (
    *(
        gpu_changes,
        link_changes,
        port_changes,
        pressure_changes,
        steal_changes,
        pinning_changes,
        memory_changes,
        storage_changes,
    ),
)


def _counter_selector(parts: str, name: str) -> Callable[[Reading], Mapping[str, int]]:
    """Return a function that returns the counter `name` for each part.

    Args:
        parts: "ports" or "errors".
    """

    def select(reading: Reading) -> Mapping[str, int]:
        counters_by_part: Mapping[str, Mapping[str, int]] = getattr(reading, parts)
        return {part: counts[name] for part, counts in counters_by_part.items() if name in counts}

    return select


def _per_minute_text(rate: float, description: str, before: float) -> str:
    return f"{60 * rate:.3g} {description} per minute, {60 * before:.3g} before"


def _percent(share: float) -> str:
    return f"{min(share, 1.0):.0%}" if share >= 0.095 else f"{share:.1%}"
