"""What happened, by a log of any machine: its kernel lines are found fast, coalesced, and judged as by the daemon.

    blocks of lines -> those that may matter -> without prefix -> kernel events -> coalesced -> judged, in file order

Most lines of a log repeat an earlier one with other numbers. So a line is looked up by its skeleton (the line without
digits and a-f): only a new skeleton is searched for the literals of the rules, and only lines that have one are taken
apart. A message is parsed once and judged once, however often it comes (`Message`, `Meaning`): further lines of it are
counted. Memory is bounded whatever the log holds.

The checks judge an event with what the log itself has shown of its machine: another machine's inventory is not known.
Each event is judged alone; it is worse if the checks make repetition worse (Xid 74).
"""

from __future__ import annotations

import dataclasses
import functools
import json
import re
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from healthd.judge.incidents import parts
from healthd.kernel import coalesce as coalescing
from healthd.kernel import parse as kernel_parse
from healthd.kernel.prefix import Stripped, strip_prefix
from healthd.model import Clears, Finding, Inventory, KernelEvent, PciDevice, Severity

if TYPE_CHECKING:
    from healthd.scan.log_file import Block

MOST_WAITING = 2000  # events that may still grow
MOST_SAME = 10 * MOST_WAITING  # names by which their next lines are found
MOST_HOSTS = 2000
MOST_DEVICES = 256  # of a host
MOST_FAULTS = 5000  # whose last events are kept, to notice a repetition
MOST_MEANINGS = 10_000
MESSAGES_BYTES = 4 << 20  # for known messages, and as much for known lines
MESSAGE_BYTES = 2000  # what a message takes beside its text
KEPT_OF_A_FAULT = 3
SKELETON_BYTES = 2048  # a longer skeleton is not kept
SKELETONS_BYTES = 8 << 20  # for all skeletons
PREFIXES_LOOKED_AT = 50  # lines of a block, until one is seen
REBOOT_SECONDS = 60.0  # an uptime so far before the last one belongs to another boot

Correlate = Callable[[Sequence[KernelEvent], Inventory], "Iterable[Finding]"]


@dataclass(slots=True)
class Tally:
    """What was read. `kernel`: an event was seen, or a line with a prefix that only kernel lines have."""

    lines: int = 0
    kernel: bool = False
    binary: bool = False


@dataclass(slots=True)
class Machine:
    """What the log has shown of one host. `clock`: time of its last line; `offset`: epoch at its boot, if a line had
    epoch and uptime."""

    clock: float = 0.0
    offset: float | None = None
    uptime: float = 0.0
    boot: int = 0
    devices: dict[str, PciDevice] = field(default_factory=dict)
    same: dict[object, Seen] = field(default_factory=dict)  # of this boot, by message, fault and part
    meanings: dict[frozenset[str], dict[Message, Meaning]] = field(default_factory=dict)  # by the messages' slots

    def learn(self, device: PciDevice, old: PciDevice | None) -> None:
        """Keep a device. Messages that name its slots must be judged again."""
        self.devices[device.pci] = device
        if len(self.devices) == 1:
            self.meanings.clear()
        changed = {_slot(device.pci), _slot(device.upstream), _slot(old.upstream) if old else ""}
        for slots in [slots for slots in self.meanings if not slots.isdisjoint(changed)]:
            del self.meanings[slots]

    def beside(self, message: Message) -> tuple[PciDevice, ...]:
        """The devices that a message names, whatever their function, and those behind them."""
        return tuple(
            device
            for device in self.devices.values()
            if _slot(device.pci) in message.slots or _slot(device.upstream) in message.slots
        )


def _slot(address: str) -> str:
    return address.partition(".")[0]


@dataclass(slots=True, eq=False)
class Message:
    """What the lines with one text say, parsed once.

    event    without time, boot and count
    fault    coalescing.key, part: coalescing.part, as strings: they are looked up for each line
    judged   what a check's judgement may depend on in the event; it also depends on the devices in `slots`
    """

    event: KernelEvent
    fault: str
    part: str
    judged: str
    slots: frozenset[str]
    device: tuple[str, str] | None  # kind and port above, of event.pci
    meaning: Meaning | None = None  # of which `middle` and `end` are for --json
    middle: str = ""
    end: str = ""


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
        return dataclasses.replace(
            self.message.event,
            boot_id=f"{self.host}/{self.boot}",
            time=self.clock,
            last_time=self.last_clock,
            lines=self.count,
            sequence=self.line,
        )


class Meaning(NamedTuple):
    """code, severity, clears   those of the finding that rests on an event; kind/code, INFO, None if no check has one
    about   the parts that the event names, with those above them; `part`: the one that it is shown with"""

    code: str
    severity: Severity
    clears: Clears | None
    about: frozenset[str]
    part: str
    node: Inventory


class Judged(NamedTuple):
    """An event with its meaning; `earlier`: the events before it that make it worse."""

    seen: Seen
    meaning: Meaning
    earlier: Sequence[Seen]
    correlate: Correlate

    @property
    def code(self) -> str:
        return self.meaning.code

    @property
    def severity(self) -> Severity:
        return self.meaning.severity

    @property
    def clears(self) -> Clears | None:
        return self.meaning.clears

    @property
    def message(self) -> str:
        """One sentence for people. Most are never shown, so it is made when asked for."""
        event = self.seen.event
        events = (*(seen.event for seen in self.earlier), event)
        finding = _worst(self.correlate(events, self.meaning.node), event)
        if finding is None:
            return event.text
        return re.sub(rf", {event.lines} lines| \({event.lines} lines\)", "", finding.message)  # counted here


# --- the lines that may matter

_VARIES = b"0123456789abcdef"
# A date, then who wrote the line: the kernel says "kernel", or nothing if that was cut off.
_WRITTEN_BY = re.compile(
    rb"[A-Z][a-z]{2} [ \d]\d \d\d:\d\d:\d\d (?!NVRM: )"
    rb"|\d{4}-\d\d-\d\d[T ]\d\d:\d\d:\d\d(?:\.\d{1,9})?(?:Z|[+-]\d\d:?\d\d) "
)
_JSON = (b'{"', b'{ "')
_BYTES_MESSAGE = re.compile(rb'"MESSAGE" ?: ?\[')


Literals = tuple[tuple[bytes, str], ...]


def candidates(blocks: Iterable[Block], tally: Tally) -> Iterator[tuple[int, bytes, tuple[str, ...]]]:
    """(number, line, literals that it may have) of the lines that may be the kernel's and have a rule's literal."""
    named = _WRITTEN_BY.match
    known: dict[bytes, Literals] = {}
    size = 0
    owner = b""
    for first, lines in blocks:
        looked_to = 0
        tally.lines = first + len(lines) - 1
        tally.binary = tally.binary or any(b"\0" in line for line in lines[:100])
        if not tally.kernel:
            tally.kernel = any(_is_kernels(line) for line in lines[:PREFIXES_LOOKED_AT])
        may_be = [(n, line) for n, line in enumerate(lines, first) if b"kernel" in line or not named(line)]
        if not tally.kernel and may_be:
            tally.kernel = any(_is_kernels(line) for _, line in may_be[:PREFIXES_LOOKED_AT])
        for number, line in may_be:
            skeleton = line.translate(None, _VARIES)
            literals = known.get(skeleton)
            if literals is None:
                literals = _literals_of(skeleton)
                if len(skeleton) <= SKELETON_BYTES:
                    size += len(skeleton) + 100
                    if size > SKELETONS_BYTES:
                        known.clear()
                        size = 0
                    known[skeleton] = literals
            if literals and (there := tuple([text for literal, text in literals if literal in line])):
                if line.startswith(_BLANK):
                    owner, looked_to = _last_unindented(lines[looked_to : number - first], owner), number - first
                    if _continues(line, owner):
                        continue
                yield number, line, there
            elif line.startswith(_JSON) and _BYTES_MESSAGE.search(line):
                yield number, line, _ALL
        owner = _last_unindented(lines[looked_to:], owner)


def _last_unindented(lines: Sequence[bytes], otherwise: bytes) -> bytes:
    return next((line for line in reversed(lines) if not line.startswith(_BLANK)), otherwise)


def _continues(line: bytes, owner: bytes) -> bool:
    """Whether a line continues a program's text ("Mar 29 15:38:59 host name[7]: text"): journalctl indents these
    by the prefix. A service may write anything there, also a date and "kernel:"."""
    text = owner.find(b": ")
    return 0 < text <= len(line) - len(line.lstrip()) - 2


_BLANK = (b" ", b"\t")
_ALL = tuple(kernel_parse.LITERALS)
_SKELETONS = tuple((text.encode().translate(None, _VARIES), text.encode(), text) for text in _ALL)


def _literals_of(skeleton: bytes) -> Literals:
    """The literals that lines with this skeleton may have: the skeleton contains the literal's own."""
    return tuple((literal, text) for left, literal, text in _SKELETONS if left in skeleton)


def _is_kernels(line: bytes) -> bool:
    found = stripped(line, 0.0)
    return found is not None and (found.uptime is not None or found.epoch is not None or found.host != "")


# --- without prefix


# By far most lines of a storm come from a syslog daemon or dmesg. Lines that may have more before their message are
# left to strip_prefix.
_USUAL = re.compile(
    rb"(?:([A-Z][a-z]{2} [ \d]\d \d\d:\d\d:\d\d|\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(?:\.\d{1,9})?(?:Z|[+-]\d\d:\d\d)) "
    rb"([\w.-]{1,64}) kernel: )?"
    rb"(?:\[ {0,12}(\d{1,10}\.\d{6})\] )?"
    rb"(?![\[\s]|message repeated |[\w.-]{1,255}: (?:[\[<\d]|[A-Z][a-z]{2} [ \d]|kern))"
)


def stripped(line: bytes, now: float) -> Stripped | None:
    """Like strip_prefix, but faster if many lines have the same date; it reads journalctl -o json too."""
    usual = _USUAL.match(line)
    if usual is not None and (begins := usual.end()) and line.find(b"kernel:", begins) < 0 and b"\x1b" not in line:
        date, host, uptime = usual.groups()
        text = line[begins:].decode("utf-8", "replace").strip()
        return Stripped(
            text,
            None if uptime is None else float(uptime),
            None if date is None else _epoch(date, now),
            "" if host is None else host.decode("ascii"),
        )
    if line.startswith(_JSON):
        return _journal_entry(line)
    return strip_prefix(line.decode("utf-8", "replace"), now)


_SECOND = re.compile(rb"(.*:)(\d\d)(\.\d{1,9})?((?:Z|[+-]\d\d:\d\d)?)")


@functools.lru_cache(maxsize=64)
def _epoch(date: bytes, now: float) -> float | None:
    """Epoch seconds of a date. Most neighbouring lines share a minute, which is kept."""
    minute, second, fraction, zone = _SECOND.fullmatch(date).groups()  # type: ignore[union-attr]
    begins = _minute(minute + b"00" + zone, now)
    if begins is None or second > b"60":
        return None
    return begins + int(second) + (float(b"0" + fraction) if fraction else 0.0)


@functools.lru_cache(maxsize=64)
def _minute(date: bytes, now: float) -> float | None:
    found = strip_prefix(f"{date.decode('ascii')} host kernel: text", now)
    return found.epoch if found is not None else None


def _journal_entry(line: bytes) -> Stripped | None:
    """A line of journalctl -o json, as kernel/journal.py reads the journal itself."""
    try:
        entry = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return entry_of(entry) if isinstance(entry, dict) else None


def entry_of(entry: dict[str, Any]) -> Stripped | None:
    """A journal entry's fields as the kernel's message; None if the kernel did not write it."""
    message = entry.get("MESSAGE")
    if isinstance(message, list) and all(isinstance(item, int) and 0 <= item < 256 for item in message):
        message = bytes(message).decode("utf-8", "replace")
    if not isinstance(message, str) or entry.get("_TRANSPORT") != "kernel":
        return None
    if str(entry.get("SYSLOG_FACILITY", "0")) != "0" or entry.get("SYSLOG_IDENTIFIER", "kernel") != "kernel":
        return None
    received, written = _usec(entry.get("__REALTIME_TIMESTAMP")), _usec(entry.get("_SOURCE_MONOTONIC_TIMESTAMP"))
    epoch = None if received is None else received / 1e6
    late = _usec(entry.get("__MONOTONIC_TIMESTAMP"))
    if epoch is not None and late is not None and written is not None:
        epoch -= max(0, late - written) / 1e6
    uptime = None if written is None else written / 1e6
    host = entry.get("_HOSTNAME", "")
    return Stripped(message.strip(), uptime, epoch, host if isinstance(host, str) else "")


def _usec(value: object) -> int | None:
    return int(value) if isinstance(value, str) and value.isdecimal() and len(value) < 20 else None


_EXPORTED = (b"MESSAGE=", b"_TRANSPORT=", b"SYSLOG_", b"_HOSTNAME=", b"__", b"_SOURCE_")


def exported(blocks: Iterable[Block], tally: Tally) -> Iterator[tuple[int, Stripped]]:
    """The kernel's entries of journalctl -o export. Only the first line of a message is read."""
    entry: dict[str, Any] = {}
    number, binary = 0, False
    for first, lines in blocks:
        tally.lines = first + len(lines) - 1
        for place, line in enumerate(lines, first):
            if binary:
                entry["MESSAGE"], number, binary = line[8:].decode("utf-8", "replace"), place, False
            elif line.startswith(_EXPORTED):
                name, _, value = line.decode("utf-8", "replace").partition("=")
                entry[name] = value
                number = place if name == "MESSAGE" else number
            elif line == b"MESSAGE":
                binary = True
            elif not line:
                if (found := entry_of(entry)) is not None:
                    tally.kernel = True
                    yield number, found
                entry = {}
    if (found := entry_of(entry)) is not None:
        tally.kernel = True
        yield number, found


# --- events


class _Known(dict[Any, Any]):
    """What was seen before. It is forgotten as a whole when it becomes too much."""

    __slots__ = ("most", "size")

    def __init__(self, most: int) -> None:
        self.most, self.size = most, 0

    def keep(self, name: object, value: object, size: int) -> None:
        self.size += size
        if self.size > self.most:
            self.clear()
            self.size = size
        self[name] = value


def _message(event: KernelEvent) -> Message:
    driver = _DRIVEN.match(event.text)
    kind = _KIND_OF_EVENT.get(event.kind, "")
    if event.code == "fallen_off_bus":
        kind = "gpu"
    if not kind and driver:
        kind = "nvswitch" if driver[1].startswith("nvidia-nvswitch") else _KIND_OF_DRIVER.get(driver[1], "nic")
    reporter = dict(event.fields).get("reporter", "")
    return Message(
        event,
        fault=repr(coalescing.key(event)),
        part=repr(coalescing.part(event)),
        judged=repr((event.kind, event.code, event.pci, event.fields)),
        slots=frozenset(map(_slot, [event.pci, *(value for _, value in event.fields if ":" in value)])) - {""},
        device=(kind, reporter if reporter != event.pci else "") if event.pci else None,
    )


def events(blocks: Iterable[Block], now: float, tally: Tally) -> Iterator[Seen]:
    """Events in the order of their first lines, each when it can grow no more. Lines of one fault become one event, as
    in the daemon (kernel/coalesce.py); a line that repeats another word for word is only counted."""
    machines: dict[str, Machine] = {}
    waiting: deque[Seen] = deque()
    grown = _Known(MOST_SAME)
    known = 0
    within = coalescing.WITHIN_SECONDS
    for number, uptime, epoch, host, lines, message in _messages(blocks, now, tally):
        machine = machines.get(host) or _machine(machines, host)
        clock = _clock(machine, uptime, epoch)
        same = machine.same
        seen = same.get(message)
        if seen is not None and not seen.left and -within <= clock - seen.last_clock <= within:
            seen.count += lines
            if clock > seen.last_clock:
                seen.last_clock = clock
        else:
            seen = _folded(same, message, clock, number, lines, grown)
            if seen is None:
                seen = Seen(number, host, machine.boot, epoch, uptime, clock, clock, message, machine, lines)
                waiting.append(seen)
            if seen.message.device is not None:
                _learn(machine, seen.message)
            known += 3
            if known > MOST_SAME:
                known = sum(_forget(each) for each in machines.values())
            same = machine.same
            same[message] = same[seen.message.fault] = same[message.part] = seen
        while waiting:
            first = waiting[0]
            if len(waiting) <= MOST_WAITING and first.machine.clock <= first.last_clock + within:
                break
            first.left = True
            yield waiting.popleft()
    while waiting:
        waiting[0].left = True
        yield waiting.popleft()


def _folded(
    same: dict[object, Seen], message: Message, clock: float, number: int, lines: int, known: _Known
) -> Seen | None:
    """The event that took a new message in; None if the message begins one."""
    for name in (message.fault, message.part):
        seen = same.get(name)
        if seen is None or seen.left or abs(clock - seen.last_clock) > coalescing.WITHIN_SECONDS:
            continue
        old = seen.message
        try:
            grown = known[old, message]
        except KeyError:
            grown = _grown(old, message)
            known.keep((old, message), grown, 1)
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
    event = dataclasses.replace(event, lines=1)
    return old if event == old.event else _message(event)


def _forget(machine: Machine) -> int:
    """Forget events that can no longer grow, and messages, which come again. Returns how many names are left."""
    machine.same = {
        name: seen for name, seen in machine.same.items() if not seen.left and not isinstance(name, Message)
    }
    return len(machine.same)


Told = tuple[int, "float | None", "float | None", str, int, Message]


def _messages(blocks: Iterable[Block], now: float, tally: Tally) -> Iterator[Told]:
    """(number, uptime, epoch, host, lines, message) of the lines that say something."""
    iterator = iter(blocks)
    begins = next(iterator, None)
    if begins is None:
        return
    every = _chain(begins, iterator)
    texts = _Known(MESSAGES_BYTES)
    parsed = functools.partial(_parsed, texts)
    if begins.lines[0].startswith(b"__CURSOR="):
        for number, found in exported(every, tally):
            message = parsed(found.text, _ALL)
            if message is not None:
                yield number, found.uptime, found.epoch, found.host, found.lines, message
        return
    lines = _Known(MESSAGES_BYTES)
    for number, line, literals in candidates(every, tally):
        try:
            told = lines[line]
        except KeyError:
            found_in = stripped(line, now)
            told = None
            if found_in is not None:
                text, uptime, epoch, host, count = found_in
                # Escaped text may have other literals than the line itself.
                message = texts.get(text, texts)
                if message is texts:
                    message = parsed(text, _ALL if b"\\" in line else literals)
                told = None if message is None else (uptime, epoch, host, count, message)
            lines.keep(line, told, len(line) + 300)
        if told is not None:
            tally.kernel = True
            yield (number, *told)


def _parsed(texts: _Known, text: str, literals: tuple[str, ...]) -> Message | None:
    message: Message | None
    try:
        message = texts[text]
    except KeyError:
        event = kernel_parse.parse(text, literals)
        message = None if event is None else _message(event)
        texts.keep(text, message, len(text) + MESSAGE_BYTES)
    return message


def _chain(first: Block, rest: Iterator[Block]) -> Iterator[Block]:
    yield first
    yield from rest


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
        machine.uptime = uptime
        if epoch is not None:
            machine.offset = epoch - uptime
    if epoch is not None:
        machine.clock = epoch
    elif uptime is not None:
        machine.clock = uptime + (machine.offset or 0.0)
    return machine.clock


# --- what the log shows of the machine

_DRIVEN = re.compile(r"(nvidia|mlx[45]_core|bnxt_en|ice|i40e|ixgbe|nvme|nvidia-nvswitch\d*) [0-9a-f]{4,8}:")
_KIND_OF_DRIVER = {"nvidia": "gpu", "nvme": "nvme"}
_KIND_OF_EVENT = {"xid": "gpu", "sxid": "nvswitch", "mlx5": "nic", "nvme": "nvme"}


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


# --- judged

# Events that the checks judge worse when they repeat: a test holds that.
_WORSE_AGAIN = frozenset({("xid", "74"), ("pcie_aer", "nonfatal")})


def judged(found: Iterable[Seen], correlate: Correlate) -> Iterator[Judged]:
    """`correlate`: all checks' as one, with their settings."""
    meanings: dict[object, Meaning] = {}
    before: OrderedDict[object, tuple[tuple[Seen, Meaning], ...]] = OrderedDict()
    machines: dict[int, Machine] = {}  # those with meanings
    kept = 0
    for seen in found:
        message, machine = seen.message, seen.machine
        these = machine.meanings.get(message.slots)
        if these is None:
            these = machine.meanings[message.slots] = {}
        meaning = these.get(message)
        if meaning is None:
            name = (message.judged, machine.beside(message), not machine.devices)
            meaning = meanings.get(name)
            if meaning is None:
                if len(meanings) >= MOST_MEANINGS:
                    meanings.clear()
                node = Inventory(devices=tuple(machine.devices.values()))
                meaning = meanings[name] = _meaning(message, correlate, node)
            kept += 1
            if kept > MOST_MEANINGS:
                for other in machines.values():
                    other.meanings.clear()
                machines.clear()
                kept = 1
                machine.meanings[message.slots] = these = {}
            these[message] = meaning
            machines[id(machine)] = machine
        event = message.event
        earlier: tuple[Seen, ...] = ()
        if (event.kind, event.code) in _WORSE_AGAIN:
            key = (seen.host, seen.boot, event.kind, event.code, event.pci)
            those = before.pop(key, ())
            before[key] = (*those, (seen, meaning))[-KEPT_OF_A_FAULT:]
            worse = _worse_by(those, seen, meaning, correlate) if those else None
            if worse is not None:
                earlier, meaning = tuple(other for other, _ in those), worse
            if len(before) > MOST_FAULTS:
                before.popitem(last=False)
        yield Judged(seen, meaning, earlier, correlate)


def _meaning(message: Message, correlate: Correlate, node: Inventory) -> Meaning:
    """The meaning of one event alone. What a check finds depends neither on the process nor on the time."""
    event = dataclasses.replace(message.event, pid=None, process=None, text="", sequence=1)
    finding = _worst(correlate((event,), node), event)
    about = parts(event, node)
    part = event.pci or next((word for word in sorted(about) if word != event.kind), "")
    if finding is None:
        return Meaning(_code(event), Severity.INFO, None, about, part, node)
    return Meaning(finding.code, finding.severity, finding.clears, about, part, node)


def _worse_by(
    earlier: Sequence[tuple[Seen, Meaning]], seen: Seen, alone: Meaning, correlate: Correlate
) -> Meaning | None:
    """The meaning of a repetition, if it is worse than each event by itself; else None."""
    most = max(alone.severity, *(meaning.severity for _, meaning in earlier))
    if most is Severity.CRITICAL:
        return None
    event = seen.event
    together = _worst(correlate((*(other.event for other, _ in earlier), event), alone.node), event)
    if together is None or together.severity <= most:
        return None
    return alone._replace(code=together.code, severity=together.severity, clears=together.clears)


def _worst(findings: Iterable[Finding], event: KernelEvent) -> Finding | None:
    """The worst finding that rests on the event. A line that says that a fault is over is no fault: INFO."""
    resting = [
        dataclasses.replace(finding, severity=Severity.INFO) if finding.over else finding
        for finding in findings
        if event.sequence in finding.events
    ]
    return max(resting, key=lambda finding: finding.severity, default=None)


def _code(event: KernelEvent) -> str:
    """The code of an event without a finding. `healthd explain` knows it if it is an Xid."""
    if event.kind == "xid":
        return f"gpu_xid/{event.code}"
    return f"{event.kind}/{event.code}".rstrip("/")


# --- as a document


def event_json(judged: Judged) -> dict[str, Any]:
    """One object of `healthd scan --json` (docs/json.md)."""
    seen, event = judged.seen, judged.seen.message.event
    numbered = {event.kind: int(event.code)} if event.kind in ("xid", "sxid") and event.code.isdecimal() else {}
    return {
        "line": seen.line,
        "time": seen.epoch,
        "uptime": seen.uptime,
        "host": seen.host,
        "kind": event.kind,
        "code": judged.code,
        **numbered,
        "pci": event.pci or None,
        "pid": event.pid,
        "name": event.process,
        "severity": judged.severity.name.lower(),
        "clears": judged.clears.name.lower() if judged.clears else None,
        "count": seen.count,
        "text": event.text,
    }


def event_line(judged: Judged) -> str:
    """event_json as a line. The part that all lines of a message share is made once."""
    seen, meaning = judged.seen, judged.meaning
    message = seen.message
    if meaning is not message.meaning:
        message.meaning = meaning
        whole = json.dumps(event_json(judged))
        message.middle = whole[whole.index('"kind": ') : whole.index('"count": ')]
        message.end = json.dumps(message.event.text)
    time = "null" if seen.epoch is None else repr(seen.epoch)
    uptime = "null" if seen.uptime is None else repr(seen.uptime)
    return (
        f'{{"line": {seen.line}, "time": {time}, "uptime": {uptime}, "host": {_quoted(seen.host)}, '
        f'{message.middle}"count": {seen.count}, "text": {message.end}}}\n'
    )


@functools.lru_cache(maxsize=1000)
def _quoted(text: str) -> str:
    return json.dumps(text)
