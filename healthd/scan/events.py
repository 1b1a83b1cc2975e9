"""Events of a log of any machine: its messages are coalesced as by the daemon, in file order. Pure.

Repeated lines of a message are only counted. Memory is bounded regardless of the log.
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
from healthd.scan.messages import Message, Told, message_of, messages, slot

MOST_WAITING = 2000  # events that may still grow
MOST_SAME = 10 * MOST_WAITING  # names for finding the next lines of an event
MOST_HOSTS = 2000
MOST_DEVICES = 256  # per host
REBOOT_SECONDS = 60.0  # an uptime this far before the last one belongs to another boot


@dataclass(slots=True)
class Machine:
    """State of one host in the log. `clock`: time of its last line; `offset`: epoch at its boot, if a line had epoch
    and uptime.
    """

    clock: float = 0.0
    offset: float | None = None
    uptime: float = 0.0
    boot: int = 0
    devices: dict[str, PciDevice] = field(default_factory=dict)
    by_slot: dict[str, dict[str, PciDevice]] = field(default_factory=dict)  # slot -> devices there or below, by address
    same: dict[object, Seen] = field(default_factory=dict)  # events of this boot, by the message's name, fault and part
    near: deque[Seen] = field(
        default_factory=lambda: deque(maxlen=coupled_events.MOST_NEAR)
    )  # events of this boot, of coupled_events.KINDS

    def learn(self, device: PciDevice, old: PciDevice | None) -> None:
        pci = device.pci
        self.devices[pci] = device
        if old is not None and old.upstream != device.upstream and slot(old.upstream) != slot(pci):
            del self.by_slot[slot(old.upstream)][pci]
        for name in (slot(pci), slot(device.upstream)):
            self.by_slot.setdefault(name, {})[pci] = device

    def beside(self, message: Message) -> tuple[PciDevice, ...]:
        """Return the devices that a message names, with any function, and those below them."""
        below = self.by_slot
        return tuple([device for name in message.slots if name in below for device in below[name].values()])

    def coupled_with(self, seen: Seen) -> tuple[Seen, ...]:
        """Return the events that `log_event` is evaluated with (coupled_events.py), one for each result."""
        event = seen.message.event
        found: dict[str, Seen] = {}
        for other in self.near:
            judged = other.message.judged
            if other is seen or judged in found or len(found) == coupled_events.MOST_TOGETHER:
                continue
            if coupled_events.are_coupled(event, other.message.event, _apart(seen, other)):
                found[judged] = other
        return tuple(found.values())

    def inventory(self) -> Inventory:
        """Return the inventory. Thousands of meanings have one each: they share the objects of the devices."""
        return Inventory(devices=tuple(self.devices.values()))


@dataclass(slots=True, eq=False)
class Seen:
    """An event of the log.

    `line`: the number of the first of its `count` lines; `epoch`, `uptime`: those of that line, None if it has none;
    `clock`, `last_clock`: seconds on any clock of its host's lines, only for distances.
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
    left: bool = False

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


def events(blocks: Iterable[Block], now: float, tally: Tally) -> Iterator[Seen]:
    """Yield the events of a log (merge_messages())."""
    return happened(messages(blocks, now, tally))


def happened(told: Iterable[Told]) -> Iterator[Seen]:
    """Yield events in the order of their first lines, each when it cannot grow any more.

    Lines of one fault become one event, as in the daemon (agent/kernel_log/coalesce.py); an identical line is only
    counted.
    """
    machines: dict[str, Machine] = {}
    waiting: deque[Seen] = deque()
    known = 0
    within = coalescing.WITHIN_SECONDS
    for number, uptime, epoch, host, lines, message in told:
        machine = machines.get(host) or _machine(machines, host)
        clock = _clock(machine, uptime, epoch)
        same = machine.same
        seen = same.get(message.name)
        if seen is not None and not seen.left and -within <= clock - seen.last_clock <= within:
            seen.count += lines
            if clock > seen.last_clock:
                seen.last_clock = clock
        else:
            seen = _folded(same, message, clock, number, lines)
            if seen is None:
                seen = Seen(number, host, machine.boot, epoch, uptime, clock, clock, message, machine, lines)
                waiting.append(seen)
                if message.event.kind in coupled_events.KINDS:
                    machine.near.append(seen)
            if seen.message.device is not None and not seen.message.event.observed:
                _learn(machine, seen.message)
            known += 3
            if known > MOST_SAME:
                known = sum(_forget(each) for each in machines.values())
            same = machine.same
            same[message.name] = same[seen.message.fault] = same[message.part] = seen
        while waiting:
            first = waiting[0]
            if len(waiting) <= MOST_WAITING and first.machine.clock <= first.last_clock + within:
                break
            first.left = True
            yield waiting.popleft()
    while waiting:
        waiting[0].left = True
        yield waiting.popleft()


def _folded(same: dict[object, Seen], message: Message, clock: float, number: int, lines: int) -> Seen | None:
    """Return the event into which a new message was merged; None if the message begins an event."""
    for name in (message.fault, message.part):
        seen = same.get(name)
        if seen is None or seen.left or abs(clock - seen.last_clock) > coalescing.WITHIN_SECONDS:
            continue
        old = seen.message
        grown = _grown(old, message)
        if grown is not None:
            if grown.event.text == message.event.text != old.event.text:  # earlier lines were details of this one
                seen.line = number
            seen.message = grown
            seen.count += lines
            seen.last_clock = max(clock, seen.last_clock)
            return seen
    return None


def _grown(old: Message, new: Message) -> Message | None:
    """Return both messages merged; None if they are two faults."""
    event = coalescing.coalesce(old.event, new.event)
    if event is None:
        return None
    event = replace(event, lines=1)
    return old if event == old.event else message_of(event)


def _apart(seen: Seen, other: Seen) -> float:
    """Return the seconds from one event to another: negative if `other` ended before, 0.0 if they overlap."""
    if other.last_clock < seen.clock:
        return other.last_clock - seen.clock
    return max(0.0, other.clock - seen.last_clock)


def _forget(machine: Machine) -> int:
    """Forget events that cannot grow any more, and messages, which may return. Return how many names remain."""
    machine.same = {name: seen for name, seen in machine.same.items() if not seen.left and isinstance(name, str)}
    return len(machine.same)


def _machine(machines: dict[str, Machine], host: str) -> Machine:
    """Return the host's Machine. If a log has more than MAX_HOSTS hosts, it is garbage: the others share one
    Machine.
    """
    machine = machines.get(host)
    if machine is None:
        machine = machines.setdefault(host if len(machines) < MOST_HOSTS else "", Machine())
    return machine


def _clock(machine: Machine, uptime: float | None, epoch: float | None) -> float:
    """Return the time on the host's clock; an uptime far before the last one begins another boot."""
    if uptime is not None:
        if uptime < machine.uptime - REBOOT_SECONDS:
            machine.boot += 1
            machine.offset = None
            machine.same.clear()
            machine.near.clear()
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
    """Store the kind of a device, from the driver that names it, and the port above it."""
    assert message.device is not None
    kind, upstream = message.device
    pci = message.event.pci
    old = machine.devices.get(pci)
    if old is not None:
        kind, upstream = kind or old.kind, upstream or old.upstream
        if (kind, upstream) == (old.kind, old.upstream):
            return
    if not (kind or upstream) or len(machine.devices) >= MOST_DEVICES:
        return
    machine.learn(PciDevice(pci, "", "", "", kind or "other", upstream), old)
