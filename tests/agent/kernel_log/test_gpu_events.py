"""NVML's events beside the kernel log: each fault once, none lost, in any order of the three sources."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from healthd.agent.kernel_log import gpu_events
from healthd.agent.kernel_log.coalesce import WITHIN_SECONDS, coalesce_events, is_from_nvml, with_jobs
from healthd.agent.kernel_log.gpu_events import HOLD_SECONDS, MAX_HELD, RECOVERY_ACTION, UNAVAILABLE, Held
from healthd.agent.kernel_log.parse import parse
from healthd.common.model import KernelEvent
from healthd.host.wakeup import FOREVER
from healthd.nvidia.gpu_event import OPERATIONAL, GpuEvent

NOW, BOOT = 1.8e9, "boot-1"
PCI = "0000:3b:00.0"


def line(text: str, at: float) -> KernelEvent:
    event = parse(text)
    assert event is not None
    return replace(event, time=at, last_time=at, boot_id=BOOT)


def xid_line(xid: int, at: float, bus: str = "3b", rest: str = "pid=1, name=a, text") -> KernelEvent:
    return line(f"NVRM: Xid (PCI:0000:{bus}:00): {xid}, {rest}", at)


class Node:
    """The events of a node, as the daemon handles them: lines at once, NVML's events after the hold."""

    def __init__(self) -> None:
        self.events: tuple[KernelEvent, ...] = ()
        self.held: tuple[Held, ...] = ()
        self.next_sequence = 1

    def take_line(self, event: KernelEvent) -> None:
        self._take([event])

    def take_gpu_event(self, event: GpuEvent, at: float, since: float | None = None) -> None:
        self.held += gpu_events.hold(event, at - 1 if since is None else since, at, BOOT)

    def stop(self) -> None:
        """Stop the daemon. The next one continues with the recorded events."""
        self.pass_time(FOREVER)

    def pass_time(self, now: float) -> None:
        self.held, released = gpu_events.release(self.held, self.events, now)
        self._take(list(released))

    def _take(self, incoming: list[KernelEvent]) -> None:
        self.events, _, self.next_sequence = coalesce_events(self.events, incoming, self.next_sequence)


def operational(xid: int, pci: str = PCI, **fields: object) -> GpuEvent:
    return GpuEvent(OPERATIONAL, pci, (xid,) if xid else (), "fatal", "GPU-BUS", 3, primary=True, **fields)


@pytest.mark.parametrize("line_at", [-1.0, 0.5, 1.9, 3.0, 4.9])
def test_line_and_both_events_of_nvml_are_one_fault_with_the_text_of_the_line(line_at: float) -> None:
    node = Node()
    if line_at < 0:
        node.take_line(xid_line(79, NOW + line_at))
    node.take_gpu_event(GpuEvent("xid", PCI, (79,)), NOW)
    node.take_gpu_event(operational(79), NOW + 0.2)
    if 0 <= line_at < HOLD_SECONDS:
        node.take_line(xid_line(79, NOW + line_at))
    node.pass_time(NOW + HOLD_SECONDS + 0.5)
    if line_at >= HOLD_SECONDS:
        assert [is_from_nvml(event) for event in node.events] == [True]
        node.take_line(xid_line(79, NOW + line_at))
    node.pass_time(NOW + 10)
    (event,) = node.events
    assert (event.code, event.pci, event.lines, event.sequence, is_from_nvml(event)) == ("79", PCI, 1, 1, False)


def test_fault_without_line_is_taken_after_the_hold_with_its_xid() -> None:
    node = Node()
    node.take_gpu_event(operational(63), NOW)
    node.pass_time(NOW + HOLD_SECONDS - 0.1)
    assert node.events == ()
    node.pass_time(NOW + HOLD_SECONDS)
    (event,) = node.events
    assert (event.kind, event.code, event.pci, event.boot_id) == ("xid", "63", PCI, BOOT)
    assert node.held == ()


def test_events_that_waited_in_nvml_belong_to_lines_from_that_time() -> None:
    """A process that hung for a minute receives old events. They must not count as a second NVLink error."""
    node = Node()
    node.take_line(xid_line(74, NOW - 50, rest="pid=1, name=a, NVLink: fatal error detected on link 3(0x1, 0x0)"))
    node.take_gpu_event(GpuEvent("xid", PCI, (74,)), NOW, since=NOW - 60)
    node.pass_time(NOW + 10)
    assert [event.field("link") for event in node.events] == ["3"]


def test_lines_about_two_links_remain_two_faults() -> None:
    node = Node()
    text = "pid=1, name=a, NVLink: fatal error detected on link {}(0x1, 0x0)"
    for _ in range(2):
        node.take_gpu_event(GpuEvent("xid", PCI, (74,)), NOW)
    node.pass_time(NOW + HOLD_SECONDS)
    for link in (3, 5):
        node.take_line(xid_line(74, NOW + 3, rest=text.format(link)))
    assert [event.field("link") for event in node.events] == ["3", "5"]


def test_forged_line_does_not_hide_the_event() -> None:
    """Users can write to a followed file. NVML's event is then the only evidence that counts."""
    node = Node()
    node.take_line(replace(xid_line(79, NOW), observed=True))
    node.take_gpu_event(GpuEvent("xid", PCI, (79,)), NOW)
    node.pass_time(NOW + HOLD_SECONDS)
    assert [(event.observed, is_from_nvml(event)) for event in node.events] == [(True, False), (False, True)]


@pytest.mark.parametrize(
    ("event", "names"),
    [
        (GpuEvent("unavailable", PCI), (UNAVAILABLE,)),
        (GpuEvent("recovery_action", PCI), (RECOVERY_ACTION,)),
        (operational(154), (RECOVERY_ACTION,)),
        (operational(0), ("gpu_event",)),
        (operational(79), ()),
        (operational(79, overflow=True), (UNAVAILABLE, RECOVERY_ACTION)),
        (operational(0, ignored=True), ()),
    ],
)
def test_triggers_name_the_checks_that_run_at_once(event: GpuEvent, names: tuple[str, ...]) -> None:
    assert gpu_events.triggers(event) == names


def test_recovery_action_and_simulated_events_are_no_faults() -> None:
    events = (operational(154), GpuEvent("xid", PCI, (154,)), operational(79, ignored=True), GpuEvent("unavailable"))
    assert [gpu_events.hold(event, NOW, NOW, BOOT) for event in events] == [()] * 4


def test_operational_event_without_xid_has_its_identity() -> None:
    (held,) = gpu_events.hold(operational(0, uncontained=True), NOW, NOW, BOOT)
    event = held.event
    assert (event.kind, event.code, event.pci) == ("gpu_event", "GPU-BUS:3", PCI)
    assert [event.field(name) for name in ("severity", "primary", "uncontained")] == ["fatal", "true", "true"]


def test_flood_of_different_xids_is_not_held_without_limit() -> None:
    held = tuple(
        entry
        for number in range(3 * MAX_HELD)
        for entry in gpu_events.hold(GpuEvent("xid", PCI, (number + 1000,)), NOW, NOW, BOOT)
    )
    waiting, released = gpu_events.release(held, (), NOW)
    assert (len(waiting), len(released)) == (MAX_HELD, 2 * MAX_HELD)


class Fault(NamedTuple):
    """A fault, and the delay of each source that reports it (None: it does not).

    `since` is the delay of the last moment at which NVML had no event yet. `links` is 0 for a fault without links, or
    the number of links that fail. There is a line for each of them, and NVML names none.
    """

    at: float
    xid: int
    bus: int
    links: int
    line: float | None
    bit: float | None
    operational: float | None
    since: float


MAX_DELAY = 2 * (HOLD_SECONDS + WITHIN_SECONDS)
DELAYS = st.none() | st.floats(0, 1.5) | st.floats(0, MAX_DELAY)
PAUSE = MAX_DELAY + 2 * WITHIN_SECONDS + 1.0  # until the same Xid may recur on the same GPU
LINK = "pid=1, name=a, NVLink: fatal error detected on link {}(0x1, 0x0)"


@st.composite
def faults(draw: st.DrawFn) -> list[Fault]:
    """Faults of any GPUs and Xids. The same Xid of the same GPU recurs only after the window."""
    found, at = [], 0.0
    for _ in range(draw(st.integers(1, 12))):
        at += draw(st.sampled_from([0.0, 0.3, 2.0, 9.0, PAUSE]))
        xid = draw(st.sampled_from([13, 48, 63, 74, 79, 119, 149]))
        fault = Fault(
            at,
            xid,
            draw(st.integers(0x3B, 0x3D)),
            draw(st.integers(1, 2)) if xid in (74, 149) else 0,
            *draw(st.tuples(*[DELAYS] * 3)),
            draw(st.floats(0, WITHIN_SECONDS - 0.1)),
        )
        is_new = all((old.xid, old.bus) != (fault.xid, fault.bus) or at - old.at >= PAUSE for old in found)
        if is_new and (fault.line, fault.bit, fault.operational) != (None, None, None):
            found.append(fault)
    return found


def lines_of(fault: Fault) -> list[KernelEvent]:
    """Return the lines of a fault, with the time that the kernel has put into them."""
    bus, at = f"{fault.bus:02x}", NOW + fault.at
    if fault.xid == 74:
        return [xid_line(74, at, bus, LINK.format(link)) for link in range(fault.links)]
    if fault.xid == 149:
        return [xid_line(149, at, bus, NETIR.format(link)) for link in range(fault.links)]
    return [xid_line(fault.xid, at, bus)]


NETIR = "NETIR_LINK_EVT Fatal XC0 i0 Link {:02d} (0x004525c6 0x00000000 0x00000000 0x00000000 0x00000000 0x00000000)"


@given(found=faults(), stop=st.none() | st.floats(0, 60))
def test_each_fault_is_one_event_in_any_order_of_the_sources(found: list[Fault], stop: float | None) -> None:
    """A line is read late, but has the time of the fault. After a stop, NVML reports only new faults."""
    inputs: list[tuple[float, int, Fault]] = []
    for fault in found:
        delays = (fault.line, fault.bit, fault.operational)
        inputs += [(fault.at + delay, source, fault) for source, delay in enumerate(delays) if delay is not None]
    if stop is not None:
        inputs = [(at, source, fault) for at, source, fault in inputs if not source or not fault.at <= stop < at]
    node = Node()
    is_stopped = stop is None
    for at, source, fault in sorted(inputs):
        if not is_stopped and stop is not None and at > stop:
            node.pass_time(NOW + stop)
            node.stop()
            is_stopped = True
        node.pass_time(NOW + at)
        pci = f"0000:{fault.bus:02x}:00.0"
        if source == 0:
            for event in lines_of(fault):
                node.take_line(event)
        else:
            event = GpuEvent("xid", pci, (fault.xid,)) if source == 1 else operational(fault.xid, pci)
            node.take_gpu_event(event, NOW + at, since=NOW + min(at, fault.at + fault.since))
    node.pass_time(NOW + 1000)
    reported = {fault for _, _, fault in inputs}
    expected = [(fault, max(1, fault.links) if fault.line is not None else 1) for fault in reported]
    assert names(node.events) == sorted(
        (f"{fault.bus:02x}", str(fault.xid)) for fault, count in expected for _ in range(count)
    )
    assert names(event for event in node.events if not is_from_nvml(event)) == sorted(
        (f"{fault.bus:02x}", str(fault.xid))
        for fault, count in expected
        if fault.line is not None
        for _ in range(count)
    )


def names(events: Iterable[KernelEvent]) -> list[tuple[str, str]]:
    return sorted((event.pci[5:7], event.code) for event in events)


def test_line_of_an_old_fault_replaces_the_event_of_a_process_that_hung() -> None:
    """NVML's event and the line came late, so their times differ by much more than the window."""
    node = Node()
    node.take_gpu_event(GpuEvent("xid", PCI, (79,)), NOW, since=NOW - 60)
    node.pass_time(NOW + HOLD_SECONDS)
    node.take_line(xid_line(79, NOW - 50))
    assert [(event.time, event.sequence, is_from_nvml(event)) for event in node.events] == [(NOW - 50, 1, False)]


def test_line_keeps_the_job_of_the_event_that_it_replaces() -> None:
    node = Node()
    node.take_gpu_event(GpuEvent("xid", PCI, (79,)), NOW)
    node.pass_time(NOW + HOLD_SECONDS)
    node.events = with_jobs(node.events, {1: "4711"})
    node.take_line(xid_line(79, NOW + 3))
    assert [event.field("job") for event in node.events] == ["4711"]


def test_stop_does_not_count_an_event_beside_its_line() -> None:
    node = Node()
    node.take_line(xid_line(63, NOW))
    node.take_gpu_event(operational(63), NOW + 30, since=NOW - 1)
    node.stop()
    assert [is_from_nvml(event) for event in node.events] == [False]
