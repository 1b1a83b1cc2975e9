"""Changes on this node when a job became slow: readings before the onset compared with readings since. Pure functions.

Each comparison compares one value with itself on the same node and reports both numbers. A change is not a verdict: the
slowness was measured elsewhere, and these are the places to check next, the most likely explanation first. A value that
was the same before explains nothing and is not reported. The limits are simple (twice as much as before, and enough to
matter), so that a quiet node reports nothing.

If the ranks' times gave a cause, changes of that kind come first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

from healthd.common.text import is_decimal
from healthd.failslow.live.node_reading import Reading, Slow
from healthd.failslow.model import Cause

MOST_SAID = 6
TIMES = 2.0  # times the value before
FAULT = 0.6
BELONGS = 1.0  # added to the weight of a change that fits the cause
HELD_DOWN = {  # bits of NVML_CLOCKS_EVENT_REASON_* that no busy GPU should have
    0x08: "hardware slowdown",
    0x20: "thermal slowdown by the driver",
    0x40: "thermal slowdown by the hardware",
    0x80: "power brake by the power supply",
}
POWER_CAP = 0x04  # normal for any busy GPU: reported only if the clock fell
CLOCK_FELL = 0.05
HOTTER_CELSIUS = 8
WAITED = 0.1  # share of the time
STOLEN = 0.02
SLOW_MILLISECONDS, SLOW_TIMES, ASKED_PER_SECOND = 20.0, 3.0, 1.0
SWAPPED_PER_SECOND = 100.0
CORRECTED_PER_MINUTE = 10.0
CROWDED = 4  # processes pinned to the same CPU

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
# Counters of a port: minimum rate per second, weight, and description.
OF_PORTS: Mapping[str, tuple[float, float, str]] = {
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


class Said(NamedTuple):
    """A change on the node.

    weight: 0 to 1, how much of a slowness it could explain; from FAULT_WEIGHT on it is a fault of the part. sentence:
    without a full stop. part: PCI address or name of the part, "" if there is none.
    """

    weight: float
    family: str
    sentence: str
    part: str = ""


class Both(NamedTuple):
    """Readings before the onset and since: the first and the last reading of each. A single reading has no rates."""

    first: Reading
    last: Reading
    begin: Reading
    now: Reading

    def rates(self, of: Callable[[Reading], Mapping[str, int]]) -> Iterator[tuple[str, float, float]]:
        """Yield (name, rate per second before, rate per second since) of counters that are in all four readings.

        A counter that was reset has no rate. There are no rates if there is only one reading before.
        """
        first, last, begin, now = (of(one) for one in self)
        before, since = self.last.time - self.first.time, self.now.time - self.begin.time
        if before <= 0 or since <= 0:
            return
        for name in sorted(now.keys() & begin.keys() & last.keys() & first.keys()):
            grew, grew_before = now[name] - begin[name], last[name] - first[name]
            if grew >= 0 and grew_before >= 0:
                yield name, grew_before / before, grew / since


Judge = Callable[[Both], Iterator[Said]]


def is_of_hardware(said: Said) -> bool:
    """Return True for a fault of the node's own hardware, which a job cannot cause by load or congestion."""
    return said.family in (GPU, LINK, FABRIC) and said.weight >= FAULT


def evidence(
    before: Sequence[Reading], since: Sequence[Reading], cause: Cause = Cause.UNKNOWN, gpu: str = ""
) -> tuple[Said, ...]:
    """Return at most MAX_CHANGES changes, the most likely explanation first.

    Args:
        before, since: readings, oldest first. The last one before the onset is also the begin of `since`.
        gpu: PCI address of the named rank's GPU. Its changes come before those of other GPUs.
    """
    if not before or not since:
        return ()
    both = Both(before[0], before[-1], before[-1] if len(since) == 1 else since[0], since[-1])
    family = FAMILIES.get(cause, frozenset())
    said = [one for judge in JUDGES for one in judge(both)]

    def order(one: Said) -> tuple[float, str]:
        belongs = one.family in family and (not gpu or one.family != GPU or one.part == gpu)
        return -(one.weight + (BELONGS if belongs else 0.0)), one.sentence

    return tuple(sorted(said, key=order)[:MOST_SAID])


def of_gpus(both: Both) -> Iterator[Said]:
    for pci, now in both.now.gpus.items():
        before = both.last.gpus.get(pci)
        if before is None:
            continue
        new = (now.reasons or 0) & ~(before.reasons or 0)
        held = [words for bit, words in HELD_DOWN.items() if new & bit]
        if held:
            yield Said(0.9, GPU, f"GPU {pci}: its clock is now limited ({', '.join(held)})", pci)
        if now.sm_mhz and before.sm_mhz and now.sm_mhz < (1 - CLOCK_FELL) * before.sm_mhz:
            fell = 1 - now.sm_mhz / before.sm_mhz
            why = " at its power limit" if new & POWER_CAP else ""
            sentence = f"GPU {pci}: clock {now.sm_mhz} MHz{why}, {before.sm_mhz} MHz before"
            yield Said(min(0.5 if why else 0.95, 0.4 + fell), GPU, sentence, pci)
        if now.celsius is not None and before.celsius is not None and now.celsius >= before.celsius + HOTTER_CELSIUS:
            yield Said(0.3, GPU, f"GPU {pci}: temperature {now.celsius} C, {before.celsius} C before", pci)


def of_links(both: Both) -> Iterator[Said]:
    for pci, now in both.now.links.items():
        before = both.last.links.get(pci)
        if before is None:
            continue
        if now.width < before.width:
            yield Said(0.85, LINK, f"{pci}: PCIe link with {now.width} lanes, {before.width} before", pci)
        if now.gt_per_s < before.gt_per_s:  # an idle GPU also lowers it
            sentence = f"{pci}: PCIe link at {now.gt_per_s:g} GT/s, {before.gt_per_s:g} before"
            yield Said(0.4, LINK, sentence, pci)
    for kind, least, weight in (("nonfatal", 0.0, 0.8), ("correctable", CORRECTED_PER_MINUTE / 60, 0.4)):
        for pci, was, is_now in both.rates(_named("errors", kind)):
            if is_now > max(least, TIMES * was):
                sentence = f"{pci}: {_each_minute(is_now, f'{kind} PCIe errors (AER)', was)}"
                yield Said(weight, LINK, sentence, pci)


def of_ports(both: Both) -> Iterator[Said]:
    for port, speed in both.now.speeds.items():
        before = both.last.speeds.get(port)
        if before is not None and speed < before:
            yield Said(0.9, FABRIC, f"port {port}: link at {speed:g} Gbit/s, {before:g} before", port)
    for name, (least, weight, words) in OF_PORTS.items():
        for port, was, is_now in both.rates(_named("ports", name)):
            if is_now > max(least, TIMES * was):
                yield Said(weight, FABRIC, f"port {port}: {_each_minute(is_now, words, was)}", port)


def of_waiting(both: Both) -> Iterator[Said]:
    """Compare PSI: "full" of memory and io, when all tasks wait, and "some" of the CPUs, where "full" is always 0."""
    wanted = {
        "cpu some": (CPU, "tasks waited for a CPU"),
        "memory full": (CPU, "all tasks waited for memory"),
        "io full": (STORAGE, "all tasks waited for disks or file servers"),
    }
    for what, was, is_now in both.rates(lambda one: one.waiting):
        if what in wanted and is_now / 1e6 >= max(WAITED, TIMES * was / 1e6):
            family, words = wanted[what]
            sentence = f"{words} {_percent(is_now / 1e6)} of the time, {_percent(was / 1e6)} before (PSI)"
            yield Said(min(0.9, is_now / 1e6), family, sentence)


def of_cpus(both: Both) -> Iterator[Said]:
    rates = {name: (was, is_now) for name, was, is_now in both.rates(lambda one: one.cpu)}
    if "steal" not in rates or "all" not in rates:
        return
    was, is_now = (stolen / ticks if ticks else 0.0 for stolen, ticks in zip(rates["steal"], rates["all"], strict=True))
    if is_now >= max(STOLEN, TIMES * was):
        sentence = f"the hypervisor took {_percent(is_now)} of the CPU time (steal), {_percent(was)} before"
        yield Said(min(0.9, 3 * is_now), CPU, sentence)


def of_pinned(both: Both) -> Iterator[Said]:
    for cpus, processes in both.now.pinned.items():
        before = both.last.pinned.get(cpus, 0)
        if is_decimal(cpus) and processes >= max(CROWDED, TIMES * before):
            sentence = f"{processes} job processes are pinned to CPU {cpus}, {before} before"
            yield Said(0.6, CPU, sentence)


def of_memory(both: Both) -> Iterator[Said]:
    for name, was, is_now in both.rates(lambda one: one.memory):
        if name == "oom_kill" and is_now > 0:
            yield Said(0.7, CPU, "the kernel killed a process because memory was exhausted")
        elif name != "oom_kill" and is_now >= max(SWAPPED_PER_SECOND, TIMES * was):
            way = "in" if name == "pswpin" else "out"
            yield Said(0.6, CPU, f"{is_now:.0f} pages per second swapped {way}, {was:.0f} before")


def of_storage(both: Both) -> Iterator[Said]:
    for what, of in (("disk", lambda one: one.disks), ("NFS", lambda one: one.mounts)):
        yield from _latencies(both, what, of)


def _latencies(both: Both, what: str, of: Callable[[Reading], Mapping[str, Slow]]) -> Iterator[Said]:
    first, last, begin, now = (of(one) for one in both)
    seconds = both.now.time - both.begin.time
    for name in sorted(now.keys() & begin.keys()):
        asked = now[name].operations - begin[name].operations
        took = now[name].milliseconds - begin[name].milliseconds
        if seconds <= 0 or took < 0 or asked < max(1.0, ASKED_PER_SECOND * seconds):
            continue
        was_asked = last[name].operations - first[name].operations if name in first and name in last else 0
        was = (last[name].milliseconds - first[name].milliseconds) / was_asked if was_asked > 0 else None
        mean = took / asked
        if mean >= SLOW_MILLISECONDS and was is not None and mean >= SLOW_TIMES * was:
            yield Said(0.5, STORAGE, f"{what} {name}: {mean:.0f} ms per operation, {was:.1f} ms before")


JUDGES: Sequence[Judge] = (*(of_gpus, of_links, of_ports, of_waiting, of_cpus, of_pinned, of_memory, of_storage),)


def _named(parts: str, name: str) -> Callable[[Reading], Mapping[str, int]]:
    """Return a function that selects the counter `name` of each part. parts: "ports" or "errors"."""

    def of(reading: Reading) -> Mapping[str, int]:
        told: Mapping[str, Mapping[str, int]] = getattr(reading, parts)
        return {part: counts[name] for part, counts in told.items() if name in counts}

    return of


def _each_minute(rate: float, what: str, before: float) -> str:
    return f"{60 * rate:.3g} {what} per minute, {60 * before:.3g} before"


def _percent(share: float) -> str:
    return f"{min(share, 1.0):.0%}" if share >= 0.095 else f"{share:.1%}"
