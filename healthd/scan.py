"""What happened, by a log of any machine: its kernel lines, found fast, folded, and judged as the daemon would have.

    blocks of lines -> those that may matter -> without prefix -> kernel events -> folded -> judged, in the file's order

Most lines of a log say what was said before, with other numbers. So a line is looked up by its skeleton (the line
without digits and a-f): only a skeleton that is new is searched for the literals of the rules, and only lines that have
one are taken apart. Memory is bounded whatever the log holds.

An event is judged by the checks with what the log itself has shown of its machine: another machine's inventory is not
known. Judged alone, or worse where the checks make repetition worse (Xid 74).
"""

from __future__ import annotations

import dataclasses
import functools
import json
import re
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from healthd import kernel_fold, kernel_parse
from healthd.kernel_prefix import Stripped, strip_prefix
from healthd.model import Clears, Finding, Inventory, KernelEvent, PciDevice, Severity

if TYPE_CHECKING:
    from healthd.log_file import Block

MOST_WAITING = 2000  # events that may still grow
MOST_SAME = 10 * MOST_WAITING  # what their next lines are known by
MOST_HOSTS = 2000
MOST_DEVICES = 256  # of one host
MOST_FAULTS = 5000  # whose last events are kept, to know a repeated one
KEPT_OF_A_FAULT = 3
SKELETON_BYTES = 2048  # a longer one is not kept
SKELETONS_BYTES = 8 << 20  # all that are kept
PREFIXES_LOOKED_AT = 50  # of each block, until one is seen
REBOOT_SECONDS = 60.0  # an uptime that much before the last one is another boot's

Correlate = Callable[[Sequence[KernelEvent], Inventory], "Iterable[Finding]"]


@dataclass(slots=True)
class Tally:
    """What was read. `kernel`: a line with a prefix that only the kernel's have was seen, or an event."""

    lines: int = 0
    kernel: bool = False
    binary: bool = False


@dataclass(slots=True)
class Machine:
    """What the log has shown of one host. `clock`: time of its last line; `offset`: epoch at its boot, where a line had
    both."""

    clock: float = 0.0
    offset: float | None = None
    uptime: float = 0.0
    boot: int = 0
    devices: dict[str, PciDevice] = field(default_factory=dict)

    def inventory(self) -> Inventory:
        return Inventory(devices=tuple(self.devices.values()))


@dataclass(slots=True)
class Seen:
    """An event of the log. `line`: of the first of its `count` lines; `epoch`, `uptime`: of that line, None if it does
    not say; `clock` and `last_clock`: seconds on whatever clock its host's lines have, for distances only."""

    line: int
    host: str
    epoch: float | None
    uptime: float | None
    clock: float
    last_clock: float
    event: KernelEvent
    machine: Machine
    count: int = 1
    left: bool = False


@dataclass(frozen=True, slots=True)
class Judged:
    """code, severity, clears   of the finding that rests on the event; kind/code, INFO, None where no check minds
    message   one sentence for people"""

    seen: Seen
    code: str
    severity: Severity
    clears: Clears | None
    message: str
    node: Inventory


# --- the lines that may matter

_VARIES = b"0123456789abcdef"
# A date that is followed by who wrote the line: the kernel says "kernel", or nothing where that was cut off.
_WRITTEN_BY = re.compile(
    rb"[A-Z][a-z]{2} [ \d]\d \d\d:\d\d:\d\d (?!NVRM: )"
    rb"|\d{4}-\d\d-\d\d[T ]\d\d:\d\d:\d\d(?:\.\d{1,9})?(?:Z|[+-]\d\d:?\d\d) "
)
_JSON = (b'{"', b'{ "')
_BYTES_MESSAGE = re.compile(rb'"MESSAGE" ?: ?\[')


Literals = tuple[tuple[bytes, str], ...]


def candidates(blocks: Iterable[Block], tally: Tally) -> Iterator[tuple[int, bytes, tuple[str, ...]]]:
    """(number, line, literals that it may have) of the lines that have one of a rule and may be the kernel's."""
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
    """Whether it is a further line of what a program wrote ("Mar 29 15:38:59 host name[7]: text"): journalctl indents
    these by the prefix. A service may write anything there, also a date and "kernel:"."""
    text = owner.find(b": ")
    return 0 < text <= len(line) - len(line.lstrip()) - 2


_BLANK = (b" ", b"\t")
_ALL = tuple(kernel_parse.LITERALS)
_SKELETONS = tuple((text.encode().translate(None, _VARIES), text.encode(), text) for text in _ALL)


def _literals_of(skeleton: bytes) -> Literals:
    """The literals that lines of a skeleton may have: what is left of them stands in it."""
    return tuple((literal, text) for left, literal, text in _SKELETONS if left in skeleton)


def _is_kernels(line: bytes) -> bool:
    found = stripped(line, 0.0)
    return found is not None and (found.uptime is not None or found.epoch is not None or found.host != "")


# --- without prefix


# By far most lines of a storm: those of a syslog daemon. What may have more before its message is left to strip_prefix.
_USUAL = re.compile(
    rb"([A-Z][a-z]{2} [ \d]\d \d\d:\d\d:\d\d|\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(?:\.\d{1,9})?(?:Z|[+-]\d\d:\d\d)) "
    rb"([\w.-]{1,64}) kernel: \[ {0,12}(\d{1,10}\.\d{6})\] (?![\[\s])"
)


def stripped(line: bytes, now: float) -> Stripped | None:
    """As strip_prefix, faster where many lines have the same date, and for journalctl -o json."""
    usual = _USUAL.match(line)
    if usual is not None and b"kernel:" not in line[usual.end() :]:
        date, host, uptime = usual.groups()
        text = line[usual.end() :].decode("utf-8", "replace").strip()
        return Stripped(text, float(uptime), _epoch(date, now), host.decode("ascii"))
    if line.startswith(_JSON):
        return _journal_entry(line)
    return strip_prefix(line.decode("utf-8", "replace"), now)


@functools.lru_cache(maxsize=64)
def _epoch(date: bytes, now: float) -> float | None:
    found = strip_prefix(f"{date.decode('ascii')} host kernel: text", now)
    return found.epoch if found is not None else None


def _journal_entry(line: bytes) -> Stripped | None:
    """A line of journalctl -o json, as kernel_journal reads the journal itself."""
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
    """The kernel's entries of journalctl -o export. Of a message of several lines the first is read."""
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


@functools.lru_cache(maxsize=1024)
def _parsed(text: str, literals: tuple[str, ...]) -> KernelEvent | None:
    return kernel_parse.parse(text, literals)


def events(blocks: Iterable[Block], now: float, tally: Tally) -> Iterator[Seen]:
    """Events in the order of their first lines; each is given once it can grow no more. Lines of one fault are folded
    as the daemon does (kernel_fold.py); one that says the same word for word is only counted."""
    machines: dict[str, Machine] = {}
    waiting: deque[Seen] = deque()
    same: dict[tuple[object, ...], Seen] = {}  # by the words, the fault, and the part
    for number, found, literals in _messages(blocks, now, tally):
        new = _parsed(found.text, literals)
        if new is None:
            continue
        tally.kernel = True
        machine = _machine(machines, found.host)
        clock = _clock(machine, found)
        words = (found.host, machine.boot, found.text)
        seen = same.get(words)
        if seen is not None and not seen.left and abs(clock - seen.last_clock) <= kernel_fold.WITHIN_SECONDS:
            seen.last_clock = max(clock, seen.last_clock)
            seen.count += 1
        else:
            boot = f"{found.host}/{machine.boot}"
            new = dataclasses.replace(new, boot_id=boot, time=clock, last_time=clock, sequence=number)
            seen = _folded(same, new, number)
            if seen is None:
                seen = Seen(number, found.host, found.epoch, found.uptime, clock, clock, new, machine)
                waiting.append(seen)
            if len(same) > MOST_SAME:  # two ways to know each that waits; the words come again
                same = {name: other for name, other in same.items() if not other.left and len(name) == 2}
            same[words] = same["fault", kernel_fold.key(seen.event)] = same["part", kernel_fold.part(new)] = seen
            _learn(machine, seen.event)
        while waiting and (len(waiting) > MOST_WAITING or _is_over(waiting[0])):
            yield _leaving(waiting)
    while waiting:
        yield _leaving(waiting)


def _folded(same: dict[tuple[object, ...], Seen], new: KernelEvent, number: int) -> Seen | None:
    """The event that a new one was counted into."""
    for key in (("fault", kernel_fold.key(new)), ("part", kernel_fold.part(new))):
        seen = same.get(key)
        if seen is None or seen.left:
            continue
        grown = kernel_fold.fold(_counted(seen), new)
        if grown is not None:
            if grown.text == new.text != seen.event.text:  # what came before were details of it
                seen.line = number
            seen.event, seen.count, seen.last_clock = grown, grown.lines, grown.last_time
            return seen
    return None


def _counted(seen: Seen) -> KernelEvent:
    if (seen.event.lines, seen.event.last_time) == (seen.count, seen.last_clock):
        return seen.event
    return dataclasses.replace(seen.event, last_time=seen.last_clock, lines=seen.count)


def _is_over(seen: Seen) -> bool:
    return seen.machine.clock > seen.last_clock + kernel_fold.WITHIN_SECONDS


def _leaving(waiting: deque[Seen]) -> Seen:
    seen = waiting.popleft()
    seen.event = _counted(seen)
    seen.left = True
    return seen


def _messages(blocks: Iterable[Block], now: float, tally: Tally) -> Iterator[tuple[int, Stripped, tuple[str, ...]]]:
    iterator = iter(blocks)
    begins = next(iterator, None)
    if begins is None:
        return
    every = _chain(begins, iterator)
    if begins.lines[0].startswith(b"__CURSOR="):
        for number, found in exported(every, tally):
            yield number, found, _ALL
        return
    for number, line, literals in candidates(every, tally):
        found_in = stripped(line, now)
        if found_in is not None:
            # What is escaped in the line may have other literals than the line itself.
            yield number, found_in, _ALL if b"\\" in line else literals


def _chain(first: Block, rest: Iterator[Block]) -> Iterator[Block]:
    yield first
    yield from rest


def _machine(machines: dict[str, Machine], host: str) -> Machine:
    """A log of more hosts than can be is a log of garbage: the rest shares one."""
    machine = machines.get(host)
    if machine is None:
        machine = machines.setdefault(host if len(machines) < MOST_HOSTS else "", Machine())
    return machine


def _clock(machine: Machine, found: Stripped) -> float:
    """Seconds on the host's clock; an uptime far before the last one begins another boot."""
    if found.uptime is not None:
        if found.uptime < machine.uptime - REBOOT_SECONDS:
            machine.boot += 1
            machine.offset = None
        machine.uptime = found.uptime
        if found.epoch is not None:
            machine.offset = found.epoch - found.uptime
    if found.epoch is not None:
        machine.clock = found.epoch
    elif found.uptime is not None:
        machine.clock = found.uptime + (machine.offset or 0.0)
    return machine.clock


# --- what the log shows of the machine

_DRIVEN = re.compile(r"(nvidia|mlx[45]_core|bnxt_en|ice|i40e|ixgbe|nvme|nvidia-nvswitch\d*) [0-9a-f]{4,8}:")
_KIND_OF_DRIVER = {"nvidia": "gpu", "nvme": "nvme"}
_KIND_OF_EVENT = {"xid": "gpu", "sxid": "nvswitch", "mlx5": "nic", "nvme": "nvme"}


def _learn(machine: Machine, event: KernelEvent) -> None:
    """What a device is, by the driver that speaks of it, and which port is above it."""
    if not event.pci or len(machine.devices) >= MOST_DEVICES:
        return
    driver = _DRIVEN.match(event.text)
    kind = _KIND_OF_EVENT.get(event.kind, "")
    if event.code == "fallen_off_bus":
        kind = "gpu"
    if not kind and driver:
        kind = "nvswitch" if driver[1].startswith("nvidia-nvswitch") else _KIND_OF_DRIVER.get(driver[1], "nic")
    reporter = dict(event.fields).get("reporter", "")
    old = machine.devices.get(event.pci)
    upstream = reporter if reporter != event.pci else ""
    if not kind and not upstream and old is None:
        return
    kind = kind or (old.kind if old else "other")
    upstream = upstream or (old.upstream if old else "")
    if old is None or (old.kind, old.upstream) != (kind, upstream):
        machine.devices[event.pci] = PciDevice(event.pci, "", "", "", kind, upstream)


# --- judged


def judged(found: Iterable[Seen], correlate: Correlate) -> Iterator[Judged]:
    """`correlate`: all checks' as one, with their settings."""
    before: OrderedDict[object, tuple[KernelEvent, ...]] = OrderedDict()
    for seen in found:
        event = seen.event
        node = seen.machine.inventory()
        key = (event.boot_id, event.kind, event.code, event.pci)
        earlier = before.pop(key, ())
        yield _judge(seen, earlier, correlate, node)
        before[key] = (*earlier, event)[-KEPT_OF_A_FAULT:]
        if len(before) > MOST_FAULTS:
            before.popitem(last=False)


def _judge(seen: Seen, earlier: Sequence[KernelEvent], correlate: Correlate, node: Inventory) -> Judged:
    event = seen.event
    alone = _worst(correlate((event,), node), event)
    if earlier:
        together = _worst(correlate((*earlier, event), node), event)
        each = [_worst(correlate((one,), node), one) for one in earlier] if _worse(together, alone) else []
        # Worse than each of them by itself: it is the repetition that the check minds.
        if _worse(together, alone) and all(_worse(together, one) for one in each):
            alone = together
    if alone is None:
        return Judged(seen, _code(event), Severity.INFO, None, event.text, node)
    message = re.sub(rf", {seen.count} lines| \({seen.count} lines\)", "", alone.message)  # counted here
    return Judged(seen, alone.code, alone.severity, alone.clears, message, node)


def _worst(findings: Iterable[Finding], event: KernelEvent) -> Finding | None:
    """The worst finding that rests on the event. The log's own word that a fault is over is none any more."""
    resting = [
        dataclasses.replace(finding, severity=Severity.INFO) if finding.over else finding
        for finding in findings
        if event.sequence in finding.events
    ]
    return max(resting, key=lambda finding: finding.severity, default=None)


def _worse(one: Finding | None, other: Finding | None) -> bool:
    return one is not None and (other is None or one.severity > other.severity)


def _code(event: KernelEvent) -> str:
    """Of what no check finds: still what `healthd explain` takes, where that is a number of NVIDIA's."""
    if event.kind == "xid":
        return f"gpu_xid/{event.code}"
    return f"{event.kind}/{event.code}".rstrip("/")


# --- as a document


def event_json(judged: Judged) -> dict[str, Any]:
    """One object of `healthd scan --json` (docs/json.md)."""
    seen, event = judged.seen, judged.seen.event
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
