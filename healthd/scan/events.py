"""Merges the messages in any machine's log into events, in file order, by the rules of the daemon.

All functions are pure.

Repeated lines are only counted. Memory is bounded for any log.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from msgspec.structs import replace

from healthd.agent.kernel_log import coalesce as coalescing
from healthd.common.model import Inventory, KernelEvent, PciDevice
from healthd.scan import coupled_events
from healthd.scan.lines import Block, Tally
from healthd.scan.messages import Message, ParsedLine, make_message, messages, slot

MAX_WAITING = 2000  # maximum number of events into which more lines may still be merged
MAX_NAMES = 10 * MAX_WAITING  # maximum number of names by which the next lines of an event are found
MAX_HOSTS = 2000
MAX_DEVICES = 256  # per host
REBOOT_SECONDS = 60.0  # if the uptime falls by this much, another boot has begun


@dataclass(slots=True)
class Machine:
    """State of one host in the log.

    Attributes:
        clock: time of the host's last line.
        offset: epoch time of its boot, known if one of its lines had both an epoch time and an uptime.
    """

    clock: float = 0.0
    offset: float | None = None
    uptime: float = 0.0
    boot: int = 0
    devices: dict[str, PciDevice] = field(default_factory=dict)
    by_slot: dict[str, dict[str, PciDevice]] = field(default_factory=dict)  # slot -> devices in or below it, by address
    by_name: dict[object, LogEvent] = field(
        default_factory=dict
    )  # events from this boot; keys: the message's name, fault and part
    nearby: deque[LogEvent] = field(
        default_factory=lambda: deque(maxlen=coupled_events.MAX_NEARBY)
    )  # events from this boot whose kind is in coupled_events.KINDS

    def learn(self, device: PciDevice, old: PciDevice | None) -> None:
        pci = device.pci
        self.devices[pci] = device
        if old is not None and old.upstream != device.upstream and slot(old.upstream) != slot(pci):
            del self.by_slot[slot(old.upstream)][pci]
        for name in (slot(pci), slot(device.upstream)):
            self.by_slot.setdefault(name, {})[pci] = device

    def related_devices(self, message: Message) -> tuple[PciDevice, ...]:
        """Return the devices that a message names (with any function number), and the devices below them."""
        by_slot = self.by_slot
        return tuple([device for name in message.slots if name in by_slot for device in by_slot[name].values()])

    def coupled_with(self, log_event: LogEvent) -> tuple[LogEvent, ...]:
        """Return the events that are evaluated together with `log_event` (coupled_events.py). Of equal events, only one
        is returned."""
        event = log_event.message.event
        found: dict[str, LogEvent] = {}
        for other in self.nearby:
            key = other.message.judgement_key
            if other is log_event or key in found or len(found) == coupled_events.MAX_COUPLED:
                continue
            if coupled_events.are_coupled(event, other.message.event, _distance(log_event, other)):
                found[key] = other
        return tuple(found.values())

    def inventory(self) -> Inventory:
        """Return the inventory. There are thousands of inventories, one for each meaning, so they share the device
        objects."""
        return Inventory(devices=tuple(self.devices.values()))


@dataclass(slots=True, eq=False)
class LogEvent:
    """An event in the log.

    Attributes:
        line: number of its first line.
        count: number of its lines.
        epoch, uptime: from the first line, or None if the line has none.
        clock, last_clock: seconds by whichever clock the host's lines have; only differences are used.
    """

    line: int
    host: str
    boot: int
    epoch: float | None
    uptime: float | None
    clock: float
    last_clock: float
    message: Message
    machine: Machine
    count: int = 1
    is_closed: bool = False

    @property
    def event(self) -> KernelEvent:
        """The event as the daemon would have recorded it."""
        return replace(
            self.message.event,
            boot_id=f"{self.host}/{self.boot}",
            time=self.clock,
            last_time=self.last_clock,
            lines=self.count,
            sequence=self.line,
        )


def events(blocks: Iterable[Block], now: float, tally: Tally) -> Iterator[LogEvent]:
    """Yield the events in a log (see merge_messages())."""
    return merge_messages(messages(blocks, now, tally))


def merge_messages(parsed: Iterable[ParsedLine]) -> Iterator[LogEvent]:
    """Yield the events in the order of their first lines.

    An event is yielded when no more lines can be merged into it.

    Lines about the same fault become one event, as in the daemon (agent/kernel_log/coalesce.py). Identical lines are
    only counted.
    """
    machines: dict[str, Machine] = {}
    waiting: deque[LogEvent] = deque()
    name_count = 0
    within = coalescing.WITHIN_SECONDS
    for number, uptime, epoch, host, lines, message in parsed:
        machine = machines.get(host) or _machine(machines, host)
        clock = _clock(machine, uptime, epoch)
        by_name = machine.by_name
        log_event = by_name.get(message.name)
        if log_event is not None and not log_event.is_closed and -within <= clock - log_event.last_clock <= within:
            log_event.count += lines
            if clock > log_event.last_clock:
                log_event.last_clock = clock
        else:
            log_event = _merge_message(by_name, message, clock, number, lines)
            if log_event is None:
                log_event = LogEvent(number, host, machine.boot, epoch, uptime, clock, clock, message, machine, lines)
                waiting.append(log_event)
                if message.event.kind in coupled_events.KINDS:
                    machine.nearby.append(log_event)
            if log_event.message.device is not None and not log_event.message.event.observed:
                _learn(machine, log_event.message)
            name_count += 3
            if name_count > MAX_NAMES:
                name_count = sum(_prune(each) for each in machines.values())
            by_name = machine.by_name
            by_name[message.name] = by_name[log_event.message.fault] = by_name[message.part] = log_event
        while waiting:
            first = waiting[0]
            if len(waiting) <= MAX_WAITING and first.machine.clock <= first.last_clock + within:
                break
            first.is_closed = True
            yield waiting.popleft()
    while waiting:
        waiting[0].is_closed = True
        yield waiting.popleft()


def _merge_message(
    by_name: dict[object, LogEvent], message: Message, clock: float, number: int, lines: int
) -> LogEvent | None:
    """Return the event into which a new message was merged, or None if the message begins a new event."""
    for name in (message.fault, message.part):
        log_event = by_name.get(name)
        if log_event is None or log_event.is_closed or abs(clock - log_event.last_clock) > coalescing.WITHIN_SECONDS:
            continue
        old = log_event.message
        grown = _merge(old, message)
        if grown is not None:
            # the earlier lines were details of this message
            if grown.event.text == message.event.text != old.event.text:
                log_event.line = number
            log_event.message = grown
            log_event.count += lines
            log_event.last_clock = max(clock, log_event.last_clock)
            return log_event
    return None


def _merge(old: Message, new: Message) -> Message | None:
    """Merge two messages. Return None if they are about different faults."""
    event = coalescing.coalesce(old.event, new.event)
    if event is None:
        return None
    event = replace(event, lines=1)
    return old if event == old.event else make_message(event)


def _distance(log_event: LogEvent, other: LogEvent) -> float:
    """Return the seconds from one event to the other: negative if `other` ended first, 0.0 if they overlap."""
    if other.last_clock < log_event.clock:
        return other.last_clock - log_event.clock
    return max(0.0, other.clock - log_event.last_clock)


def _prune(machine: Machine) -> int:
    """Remove complete events, and cached messages that can be parsed again. Return the number of names that remain."""
    machine.by_name = {
        name: log_event
        for name, log_event in machine.by_name.items()
        if not log_event.is_closed and isinstance(name, str)
    }
    return len(machine.by_name)


def _machine(machines: dict[str, Machine], host: str) -> Machine:
    """Return the host's Machine.

    If a log names more than MAX_HOSTS hosts, the names are garbage: further hosts share one Machine.
    """
    machine = machines.get(host)
    if machine is None:
        machine = machines.setdefault(host if len(machines) < MAX_HOSTS else "", Machine())
    return machine


def _clock(machine: Machine, uptime: float | None, epoch: float | None) -> float:
    """Return the time on the host's clock. If the uptime is much lower than before, another boot has begun."""
    if uptime is not None:
        if uptime < machine.uptime - REBOOT_SECONDS:
            machine.boot += 1
            machine.offset = None
            machine.by_name.clear()
            machine.nearby.clear()
        machine.uptime = uptime
        if epoch is not None:
            machine.offset = epoch - uptime
    if epoch is not None:
        machine.clock = epoch
    elif uptime is not None:
        machine.clock = uptime + (machine.offset or 0.0)
    return machine.clock


# --- devices in the log


def _learn(machine: Machine, message: Message) -> None:
    """Store a device's kind and the port above it. The kind is known from the driver that names the device."""
    assert message.device is not None
    kind, upstream = message.device
    pci = message.event.pci
    old = machine.devices.get(pci)
    if old is not None:
        kind, upstream = kind or old.kind, upstream or old.upstream
        if (kind, upstream) == (old.kind, old.upstream):
            return
    if not (kind or upstream) or len(machine.devices) >= MAX_DEVICES:
        return
    machine.learn(PciDevice(pci, "", "", "", kind or "other", upstream), old)
