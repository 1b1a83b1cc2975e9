"""What happened, by a log of any machine: its messages are coalesced as by the daemon, in file order. Pure.

Further lines of a known message are counted. Memory is bounded whatever the log holds.
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
MOST_SAME = 10 * MOST_WAITING  # names by which their next lines are found
MOST_HOSTS = 2000
MOST_DEVICES = 256  # of a host
REBOOT_SECONDS = 60.0  # an uptime so far before the last one belongs to another boot


@dataclass(slots=True)
class Machine:
    """What the log has shown of one host. `clock`: time of its last line; `offset`: epoch at its boot, if a line had
    epoch and uptime."""

    clock: float = 0.0
    offset: float | None = None
    uptime: float = 0.0
    boot: int = 0
    devices: dict[str, PciDevice] = field(default_factory=dict)
    by_slot: dict[str, dict[str, PciDevice]] = field(default_factory=dict)  # ... and those below a slot, by address
    same: dict[object, Seen] = field(default_factory=dict)  # of this boot, by message's name, fault and part
    near: deque[Seen] = field(
        default_factory=lambda: deque(maxlen=coupled_events.MOST_NEAR)
    )  # of this boot, of coupled.KINDS

    def learn(self, device: PciDevice, old: PciDevice | None) -> None:
        pci = device.pci
        self.devices[pci] = device
        if old is not None and old.upstream != device.upstream and slot(old.upstream) != slot(pci):
            del self.by_slot[slot(old.upstream)][pci]
        for name in (slot(pci), slot(device.upstream)):
            self.by_slot.setdefault(name, {})[pci] = device

    def beside(self, message: Message) -> tuple[PciDevice, ...]:
        """The devices that a message names, whatever their function, and those behind them."""
        below = self.by_slot
        return tuple([device for name in message.slots if name in below for device in below[name].values()])

    def coupled_with(self, seen: Seen) -> tuple[Seen, ...]:
        """Return the events that `seen` is judged with (coupled_events.py), one for each judgement."""
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
        """Of thousands of meanings each has one: their devices are the same objects."""
        return Inventory(devices=tuple(self.devices.values()))


@dataclass(slots=True, eq=False)
class Seen:
    """An event of the log. `line`: the number of the first of its `count` lines; `epoch`, `uptime`: that line's, None
    if it has none; `clock`, `last_clock`: seconds on whatever clock its host's lines have, for distances only."""

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
    """The events of a log (happened())."""
    return happened(messages(blocks, now, tally))


def happened(told: Iterable[Told]) -> Iterator[Seen]:
    """Events in the order of their first lines, each when it can grow no more. Lines of one fault become one event, as
    in the daemon (agent/kernel_log/coalesce.py); a line that repeats another word for word is only counted."""
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
    """The event that took a new message in; None if the message begins one."""
    for name in (message.fault, message.part):
        seen = same.get(name)
        if seen is None or seen.left or abs(clock - seen.last_clock) > coalescing.WITHIN_SECONDS:
            continue
        old = seen.message
        grown = _grown(old, message)
        if grown is not None:
            if grown.event.text == message.event.text != old.event.text:  # the lines before were details of this one
                seen.line = number
            seen.message = grown
            seen.count += lines
            seen.last_clock = max(clock, seen.last_clock)
            return seen
    return None


def _grown(old: Message, new: Message) -> Message | None:
    """Both messages as one; None if they are two faults."""
    event = coalescing.coalesce(old.event, new.event)
    if event is None:
        return None
    event = replace(event, lines=1)
    return old if event == old.event else message_of(event)


def _apart(seen: Seen, other: Seen) -> float:
    """Return the seconds from one event to another: negative if `other` was over before, 0.0 if they overlap."""
    if other.last_clock < seen.clock:
        return other.last_clock - seen.clock
    return max(0.0, other.clock - seen.last_clock)


def _forget(machine: Machine) -> int:
    """Forget events that can no longer grow, and messages, which come again. Returns how many names are left."""
    machine.same = {name: seen for name, seen in machine.same.items() if not seen.left and isinstance(name, str)}
    return len(machine.same)


def _machine(machines: dict[str, Machine], host: str) -> Machine:
    """The host's Machine. A log of more than MOST_HOSTS hosts is garbage: the others share one Machine."""
    machine = machines.get(host)
    if machine is None:
        machine = machines.setdefault(host if len(machines) < MOST_HOSTS else "", Machine())
    return machine


def _clock(machine: Machine, uptime: float | None, epoch: float | None) -> float:
    """Seconds on the host's clock; an uptime far before the last one begins another boot."""
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


# --- what the log shows of the machine


def _learn(machine: Machine, message: Message) -> None:
    """Learn what a device is, from the driver that names it, and which port is above it."""
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
