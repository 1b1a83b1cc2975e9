"""Evaluates the events of a log with the daemon's checks and with the devices that the log shows. Pure.

The inventory of another machine is not known. Each event is evaluated alone, or with the few nearby events that a check
evaluates it with (coupled_events.py). It is worse if the checks raise the severity of a repetition (Xid 74). A message
is evaluated once, regardless of its repeats.
"""

from __future__ import annotations

import functools
import json
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from msgspec.structs import replace

from healthd.agent.conditions.incidents import parts
from healthd.agent.kernel_log.rules.rule import pci_address
from healthd.agent.kernel_log.rules.site import SITE
from healthd.common.model import Clears, Finding, Inventory, KernelEvent, Severity
from healthd.common.text import is_decimal, regex
from healthd.scan import coupled_events
from healthd.scan.events import Seen
from healthd.scan.messages import Meaning, Message

MOST_FAULTS = 5000  # faults whose last events are kept, to detect a repetition
MOST_MEANINGS = 10_000
KEPT_OF_A_FAULT = 3
UNPROVEN = "unproven, perhaps not the kernel's own line"

Correlate = Callable[[Sequence[KernelEvent], Inventory], "Iterable[Finding]"]


class Judged(NamedTuple):
    """An event with its meaning. `context`: other events that it is evaluated with."""

    seen: Seen
    meaning: Meaning
    context: Sequence[Seen]
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
        """One sentence for people. Most are never shown, so it is computed on request."""
        event = self.seen.event
        events = (*(seen.event for seen in self.context), event)
        finding = _worst(self.correlate(events, self.meaning.node), event)
        text = event.text
        if finding is not None:
            text = regex(rf", {event.lines} lines| \({event.lines} lines\)").sub("", finding.message)  # counted here
        return f"{UNPROVEN}: {text}" if self.unproven else text

    @property
    def unproven(self) -> bool:
        """True if a user or another program may have written the line."""
        return self.seen.message.event.observed


# Events with a higher severity when they repeat; a test verifies the list.
_WORSE_AGAIN = frozenset({("xid", "74"), ("pcie_aer", "nonfatal")})


def judged(found: Iterable[Seen], correlate: Correlate) -> Iterator[Judged]:
    """Yield each event with its meaning. `correlate`: all checks as one function, with their settings."""
    meanings: dict[object, Meaning] = {}
    before: OrderedDict[object, tuple[tuple[Seen, Meaning], ...]] = OrderedDict()
    for seen in found:
        message, machine = seen.message, seen.machine
        # The meaning of an event depends only on these.
        context = machine.coupled_with(seen) if coupled_events.is_judged_with_others(message.event) else ()
        together = tuple([other.message.judged for other in context]) if context else ()
        name = (message.judged, together, machine.beside(message), not machine.devices)
        meaning = meanings.get(name)
        if meaning is None:
            if len(meanings) >= MOST_MEANINGS:
                meanings.clear()
            others = [other.message for other in context]
            meaning = meanings[name] = _meaning(message, others, correlate, machine.inventory())
        event = message.event
        if (event.kind, event.code) in _WORSE_AGAIN and not event.observed:
            key = (seen.host, seen.boot, event.kind, event.code, event.pci)
            those = before.pop(key, ())
            before[key] = (*those, (seen, meaning))[-KEPT_OF_A_FAULT:]
            worse = _worse_by(those, seen, meaning, correlate) if those else None
            if worse is not None:
                context, meaning = tuple(other for other, _ in those), worse
            if len(before) > MOST_FAULTS:
                before.popitem(last=False)
        yield Judged(seen, meaning, context, correlate)


def _meaning(message: Message, others: Sequence[Message], correlate: Correlate, node: Inventory) -> Meaning:
    """Return the meaning of one event, evaluated with `others`. It depends neither on the process nor on the time."""
    event = _alone(message, 1)
    around = [_alone(other, number) for number, other in enumerate(others, 2)] if others else []
    finding = _worst(correlate((*around, event), node), event)
    about = parts(event, node)
    if around:
        about = about.union(*(parts(other, node) for other in around))
    subject = finding.subject if finding is not None else ""
    part = subject or event.pci or next((word for word in sorted(about) if word != event.kind), "")
    if finding is None:
        return Meaning(_code(event), Severity.INFO, None, about, part, node)
    severity = min(finding.severity, Severity.WARNING) if event.observed else finding.severity
    return Meaning(finding.code, severity, finding.clears, about, part, node)


def _alone(message: Message, sequence: int) -> KernelEvent:
    return replace(message.event, pid=None, process=None, text="", sequence=sequence)


def _worse_by(
    earlier: Sequence[tuple[Seen, Meaning]], seen: Seen, alone: Meaning, correlate: Correlate
) -> Meaning | None:
    """Return the meaning of a repetition if it is worse than each single event; else None."""
    most = max(alone.severity, *(meaning.severity for _, meaning in earlier))
    if most is Severity.CRITICAL:
        return None
    event = seen.event
    together = _worst(correlate((*(other.event for other, _ in earlier), event), alone.node), event)
    if together is None or together.severity <= most:
        return None
    return alone._replace(code=together.code, severity=together.severity, clears=together.clears)


def _worst(findings: Iterable[Finding], event: KernelEvent) -> Finding | None:
    """Return the worst finding that rests on the event. A line that reports the end of a fault is no fault: INFO."""
    resting = [
        replace(finding, severity=Severity.INFO) if finding.over else finding
        for finding in findings
        if event.sequence in finding.events
    ]
    return max(resting, key=lambda finding: finding.severity, default=None)


def _code(event: KernelEvent) -> str:
    """Return the code of an event without a finding. `healthd explain` knows it if it is an Xid."""
    if event.kind == "xid":
        return f"gpu_xid/{event.code}"
    return f"{event.kind}/{event.code}".rstrip("/")


# --- as a document


def event_json(judged: Judged) -> dict[str, Any]:
    """Return one object of `healthd scan --json` (docs/json.md)."""
    seen, event = judged.seen, judged.seen.message.event
    named: dict[str, Any] = {"pattern": event.code} if event.kind == SITE else {}
    if event.kind in ("xid", "sxid") and is_decimal(event.code):
        named = {event.kind: int(event.code)}
    return {
        "line": seen.line,
        "time": seen.epoch,
        "uptime": seen.uptime,
        "host": seen.host,
        "kind": event.kind,
        "code": judged.code,
        **named,
        "pci": event.pci or pci_address(judged.meaning.part) or None,
        "pid": event.pid,
        "name": event.process,
        "severity": judged.severity.name.lower(),
        "clears": judged.clears.name.lower() if judged.clears else None,
        "unproven": judged.unproven,
        "count": seen.count,
        "text": event.text,
    }


def event_line(judged: Judged) -> str:
    """Return event_json as a line. The part that all lines of a message share is made once."""
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


def unrecognised_line(driver: str, text: str, line: int, count: int) -> str:
    """Return lines of a driver that no rule recognises as one object of `healthd scan --json`, with an event's keys."""
    where = {"line": line, "time": None, "uptime": None, "host": ""}
    what = {"kind": "unrecognised", "code": f"unrecognised/{driver}", "pci": None, "pid": None, "name": None}
    rest = {"severity": "info", "clears": None, "unproven": False, "count": count, "text": text}
    return json.dumps({**where, **what, **rest}) + "\n"


@functools.lru_cache(maxsize=1000)
def _quoted(text: str) -> str:
    return json.dumps(text)
