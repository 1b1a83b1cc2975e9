"""Evaluates the events in a log with the daemon's checks and the devices that appear in the log.

All functions are pure.

The inventory of the log's machine is not available, so the devices in the log are used. Each event is evaluated alone,
or with the few nearby events that a check needs (coupled_events.py). Some checks raise the severity if a fault repeats
(Xid 74); a repeated event then gets the higher severity. A repeated message is evaluated only once.
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
from healthd.scan.events import LogEvent
from healthd.scan.messages import Meaning, Message

MAX_FAULTS = 5000  # number of faults whose last event is kept, to detect repetitions
MAX_MEANINGS = 10_000
MAX_EVENTS_PER_FAULT = 3
UNPROVEN = "unproven, may not be the kernel's own line"

Correlate = Callable[[Sequence[KernelEvent], Inventory], "Iterable[Finding]"]


class Judged(NamedTuple):
    """An event with its meaning. `context` are the other events that are evaluated together with it."""

    log_event: LogEvent
    meaning: Meaning
    context: Sequence[LogEvent]
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
        """One sentence for the user. Most sentences are never displayed, so each is built only on request."""
        event = self.log_event.event
        events = (*(item.event for item in self.context), event)
        finding = _worst(self.correlate(events, self.meaning.node), event)
        text = event.text
        if finding is not None:
            # the number of lines is added here
            text = regex(rf", {event.lines} lines| \({event.lines} lines\)").sub("", finding.message)
        return f"{UNPROVEN}: {text}" if self.unproven else text

    @property
    def unproven(self) -> bool:
        """True if a user or another program, not the kernel, may have written the line."""
        return self.log_event.message.event.observed


# Events whose severity rises when they repeat. A test verifies the list.
_WORSE_IF_REPEATED = frozenset({("xid", "74"), ("pcie_aer", "nonfatal")})


def judge(found: Iterable[LogEvent], correlate: Correlate) -> Iterator[Judged]:
    """Yield each event with its meaning.

    Args:
        correlate: function that runs all checks with their settings.
    """
    meanings: dict[object, Meaning] = {}
    earlier: OrderedDict[object, tuple[tuple[LogEvent, Meaning], ...]] = OrderedDict()
    for log_event in found:
        message, machine = log_event.message, log_event.machine
        # An event's meaning depends only on these.
        context = machine.coupled_with(log_event) if coupled_events.may_be_coupled(message.event) else ()
        coupled = tuple([other.message.judgement_key for other in context]) if context else ()
        name = (message.judgement_key, coupled, machine.related_devices(message), not machine.devices)
        meaning = meanings.get(name)
        if meaning is None:
            if len(meanings) >= MAX_MEANINGS:
                meanings.clear()
            others = [other.message for other in context]
            meaning = meanings[name] = _meaning(message, others, correlate, machine.inventory())
        event = message.event
        if (event.kind, event.code) in _WORSE_IF_REPEATED and not event.observed:
            key = (log_event.host, log_event.boot, event.kind, event.code, event.pci)
            previous = earlier.pop(key, ())
            earlier[key] = (*previous, (log_event, meaning))[-MAX_EVENTS_PER_FAULT:]
            worse = _repetition_meaning(previous, log_event, meaning, correlate) if previous else None
            if worse is not None:
                context, meaning = tuple(other for other, _ in previous), worse
            if len(earlier) > MAX_FAULTS:
                earlier.popitem(last=False)
        yield Judged(log_event, meaning, context, correlate)


def _meaning(message: Message, others: Sequence[Message], correlate: Correlate, node: Inventory) -> Meaning:
    """Return the meaning of one event, evaluated together with `others`.

    The meaning does not depend on the event's process or time.
    """
    event = _normalised(message, 1)
    coupled = [_normalised(other, number) for number, other in enumerate(others, 2)] if others else []
    finding = _worst(correlate((*coupled, event), node), event)
    part_names = parts(event, node)
    if coupled:
        part_names = part_names.union(*(parts(other, node) for other in coupled))
    subject = finding.subject if finding is not None else ""
    part = subject or event.pci or next((word for word in sorted(part_names) if word != event.kind), "")
    if finding is None:
        return Meaning(_code(event), Severity.INFO, None, part_names, part, node)
    severity = min(finding.severity, Severity.WARNING) if event.observed else finding.severity
    return Meaning(finding.code, severity, finding.clears, part_names, part, node)


def _normalised(message: Message, sequence: int) -> KernelEvent:
    return replace(message.event, pid=None, process=None, text="", sequence=sequence)


def _repetition_meaning(
    earlier: Sequence[tuple[LogEvent, Meaning]], log_event: LogEvent, alone: Meaning, correlate: Correlate
) -> Meaning | None:
    """Return the meaning of a repeated event if it is worse than that of each single event, otherwise None."""
    worst = max(alone.severity, *(meaning.severity for _, meaning in earlier))
    if worst is Severity.CRITICAL:
        return None
    event = log_event.event
    repeated = _worst(correlate((*(other.event for other, _ in earlier), event), alone.node), event)
    if repeated is None or repeated.severity <= worst:
        return None
    return alone._replace(code=repeated.code, severity=repeated.severity, clears=repeated.clears)


def _worst(findings: Iterable[Finding], event: KernelEvent) -> Finding | None:
    """Return the worst finding that is based on the event.

    If the line reports the end of a fault, the finding is INFO.
    """
    resting = [
        replace(finding, severity=Severity.INFO) if finding.recovered else finding
        for finding in findings
        if event.sequence in finding.events
    ]
    return max(resting, key=lambda finding: finding.severity, default=None)


def _code(event: KernelEvent) -> str:
    """Return the code for an event without a finding. `healthd explain` accepts it if it is an Xid."""
    if event.kind == "xid":
        return f"gpu_xid/{event.code}"
    return f"{event.kind}/{event.code}".rstrip("/")


# --- as a document


def event_json(judged: Judged) -> dict[str, Any]:
    """Return one object for `healthd scan --json` (docs/json.md)."""
    log_event, event = judged.log_event, judged.log_event.message.event
    extra: dict[str, Any] = {"pattern": event.code} if event.kind == SITE else {}
    if event.kind in ("xid", "sxid") and is_decimal(event.code):
        extra = {event.kind: int(event.code)}
    return {
        "line": log_event.line,
        "time": log_event.epoch,
        "uptime": log_event.uptime,
        "host": log_event.host,
        "kind": event.kind,
        "code": judged.code,
        **extra,
        "pci": event.pci or pci_address(judged.meaning.part) or None,
        "pid": event.pid,
        "name": event.process,
        "severity": judged.severity.name.lower(),
        "clears": judged.clears.name.lower() if judged.clears else None,
        "unproven": judged.unproven,
        "count": log_event.count,
        "text": event.text,
    }


def event_line(judged: Judged) -> str:
    """Return event_json as a line. The part that all lines of a message share is built only once."""
    log_event, meaning = judged.log_event, judged.meaning
    message = log_event.message
    if meaning is not message.meaning:
        message.meaning = meaning
        whole = json.dumps(event_json(judged))
        message.middle = whole[whole.index('"kind": ') : whole.index('"count": ')]
        message.end = json.dumps(message.event.text)
    time = "null" if log_event.epoch is None else repr(log_event.epoch)
    uptime = "null" if log_event.uptime is None else repr(log_event.uptime)
    return (
        f'{{"line": {log_event.line}, "time": {time}, "uptime": {uptime}, "host": {_quoted(log_event.host)}, '
        f'{message.middle}"count": {log_event.count}, "text": {message.end}}}\n'
    )


def unrecognised_line(driver: str, text: str, line: int, count: int) -> str:
    """Return a driver's unrecognised lines as one object for `healthd scan --json`, with the same keys as an event."""
    location = {"line": line, "time": None, "uptime": None, "host": ""}
    identity = {"kind": "unrecognised", "code": f"unrecognised/{driver}", "pci": None, "pid": None, "name": None}
    details = {"severity": "info", "clears": None, "unproven": False, "count": count, "text": text}
    return json.dumps({**location, **identity, **details}) + "\n"


@functools.lru_cache(maxsize=1000)
def _quoted(text: str) -> str:
    return json.dumps(text)
