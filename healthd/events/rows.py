"""Rows for people from a stream's events (docs/events.md), in the order of the stream. All functions are pure.

A field that is missing or has an unexpected type is omitted without an error.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Iterator, Mapping
from datetime import datetime, timezone
from itertools import groupby
from typing import Any

from healthd.common.page import SEVERITIES, Page, plain, plural
from healthd.events.parse import StreamEvent, seconds
from healthd.events.schema import CONDITION_EVENTS, HEAD

Fields = Mapping[str, Any]

_CHECK_EVENTS = ("check_enabled", "check_changed", "check_disabled")
_EVENT = 14  # "check_disabled"
_MAX_NODE_WIDTH = 24


def rows(events: Iterable[StreamEvent], page: Page, nodes: bool = False, at_once: bool = False) -> Iterator[str]:
    """Yield lines with newlines: a heading for each day in local time, and a row for each event.

    With `nodes`, rows include the node's name. With `at_once`, each row is yielded immediately, without waiting for
    events that could share the row.
    """
    day, width = "", 8
    for group in ((event,) for event in events) if at_once else _group_checks(events):
        event = group[0]
        when = _local(event.at) if event.at is not None else None
        if when and (today := f"{when:%Y-%m-%d %A}, times are {when:%Z}") != day:
            yield f"{'' if not day else chr(10)}{page.heading(plain(today))}\n"
            day = today
        before = [f"{when:%H:%M:%S}" if when else "        "]
        if nodes:
            node = plain(event.key.node if event.key else "?")[:_MAX_NODE_WIDTH]
            width = max(width, len(node))
            before.append(node.ljust(width))
        before.append(plain(_text(event.fields, "event") or "?")[:40].ljust(_EVENT))
        text = event_text(event) if len(group) == 1 else _checks(group)
        yield _row("  ".join(before) + "  ", plain(" ".join(text.split())), page)


def _group_checks(events: Iterable[StreamEvent]) -> Iterator[tuple[StreamEvent, ...]]:
    """Yield the events in groups. When healthd starts, equal events for several checks form one group."""

    def same(event: StreamEvent) -> tuple[Any, ...]:
        f = event.fields
        key = f.get("event") in _CHECK_EVENTS and not event.unknown
        return (f["event"], event.key, event.at, f.get("version"), f.get("since")) if key else ()

    for key, group in groupby(events, same):
        if key:
            yield tuple(group)
        else:
            yield from ((event,) for event in group)


def _row(before: str, text: str, page: Page) -> str:
    room = page.width - len(before)
    is_single_line = not page.fold or room < 20
    first, *more_lines = [text] if is_single_line or not text else textwrap.wrap(text, room, break_on_hyphens=False)
    severity, space, remainder = first.partition(" ")
    if severity in SEVERITIES:
        first = page.paint(severity) + space + remainder
    return "".join(
        f"{line.rstrip()}\n" for line in [before + first, *(" " * len(before) + more for more in more_lines)]
    )


def event_text(event: StreamEvent) -> str:
    """Return an event as one sentence."""
    f = event.fields
    kind = f.get("event")
    if event.unknown:
        return _unknown_event(event)
    if kind in CONDITION_EVENTS:
        return _condition(f)
    if kind == "started":
        clean = "" if f.get("clean") is True or not f.get("last_alive") else "; it was not shut down cleanly"
        return f"healthd {_text(f, 'version')}, mode {_text(f, 'mode')}; last alive {_time(f, 'last_alive')}{clean}"
    if kind == "alive":
        conditions = [_part(c) for c in _list(f, "conditions") if isinstance(c, dict)]
        names = f": {', '.join(conditions)}{_more(f, 'conditions')}" if conditions else ""
        check_count = len(_list(f, "checks")) + _number(f, "checks_more")
        count = len(conditions) + _number(f, "conditions_more")
        noun = "open condition" if count == 1 else "open conditions"
        return f"{count:,} {noun}{names}; {plural(check_count, 'check')} ran"
    if kind in _CHECK_EVENTS:
        return f"{_run(f)} ({_since(f)})"
    if kind == "gpus":
        gpus = [_gpu(gpu) for gpu in _list(f, "gpus") if isinstance(gpu, dict)]
        return f"{plural(len(gpus) + _number(f, 'gpus_more'), 'GPU')}: {', '.join(gpus)}{_more(f, 'gpus')}"
    if kind == "pause":
        return f"{_text(f, 'stage')}, {_text(f, 'who')}{_until(f)}{_colon(f, 'why')}"
    if kind == "evidence":
        saved = f": {_text(f, 'path')}, {_number(f, 'bytes') / 1024:,.0f} KiB" if f.get("path") else ""
        return f"{_text(f, 'stage')} ({_text(f, 'part')} part of {_text(f, 'case')}){saved}{_colon(f, 'error')}"
    if kind == "repaired":
        return f"{_part(f)} by {_text(f, 'who')}{_colon(f, 'why')}"
    if kind == "dropped":
        numbers = f" ({_text(f, 'from_seq')} to {_text(f, 'to_seq')})"
        own_count, earlier = (_number(f, name) for name in ("count", "earlier"))
        own_text = [plural(own_count, "event") + numbers] if own_count or not earlier else []
        earlier_text = [f"{plural(earlier, 'event')} from an earlier stream"] if earlier else []
        return f"{' and '.join([*own_text, *earlier_text])} were dropped because the stream could not be written"
    if kind in ("drain", "resume", "requeue"):
        job = f" job {_text(f, 'job')}" if f.get("job") else ""
        return f"{_text(f, 'stage')}{job}{_colon(f, 'reason')}{_colon(f, 'error')}"
    return _text(f, "text") or _text(f, "why")  # a decision, a stop


def _checks(group: tuple[StreamEvent, ...]) -> str:
    names = ", ".join(_run(event.fields) for event in group)
    return f"{len(group):,} checks ({_since(group[0].fields)}): {names}"


def _gpu(f: Fields) -> str:
    serial = f"serial {_text(f, 'serial')}" if f.get("serial") else _text(f, "uuid")
    return f"{_text(f, 'subject')} {serial}".strip()


def _run(f: Fields) -> str:
    return f"{_text(f, 'check')} {_text(f, 'instance')}".strip()


def _since(f: Fields) -> str:
    version = f"version {_text(f, 'version')}, " if f.get("version") else ""
    return f"{version}configured since {_time(f, 'since')}"


def _condition(f: Fields) -> str:
    """Return a condition as text. The message and jobs are included when the condition opens, not when it is cleared or
    acknowledged.
    """
    is_over = f.get("event") in ("acknowledged", "cleared")
    jobs = [] if is_over else [str(job) for job in _list(f, "jobs")]
    count = _number(f, "count")
    notes = [
        *([f"was {_text(f, 'was')}"] if f.get("was") else []),
        *([f"by {_text(f, 'who')}{_until(f)}{_colon(f, 'why')}"] if f.get("who") else []),
        *([f"ended by {_text(f, 'cleared_by')}"] if f.get("cleared_by") else []),
        *([f"{count:,} times since {_time(f, 'first')}"] if count > 1 else []),
        *([f"job {', '.join(jobs)}{_more(f, 'jobs')}"] if jobs else []),
        *([f"serial {_text(f, 'serial')}"] if f.get("serial") and not is_over else []),
        *(["before healthd's first start"] if f.get("history") is True else []),
        *(["only observed"] if f.get("observed") is True else []),
    ]
    note_text = f" ({'; '.join(notes)})" if notes else ""
    message = "" if is_over else _colon(f, "message")
    return f"{_text(f, 'severity')} {_part(f)}{message}{note_text}"


def _unknown_event(event: StreamEvent) -> str:
    fields = ", ".join(f"{name} {value}" for name, value in event.fields.items() if name not in HEAD)
    return f"({event.unknown}, unknown to this version) {fields}"


def _part(f: Fields) -> str:
    return f"{_text(f, 'code')} {_text(f, 'subject')}".strip()


def _text(f: Fields, name: str) -> str:
    value = f.get(name)
    return str(value) if isinstance(value, str | int | float) else ""


def _list(f: Fields, name: str) -> list[Any]:
    value = f.get(name)
    return value if isinstance(value, list) else []


def _number(f: Fields, name: str) -> int:
    value = f.get(name)
    return value if isinstance(value, int) else 0


def _more(f: Fields, name: str) -> str:
    return f" and {more} more" if (more := _number(f, f"{name}_more")) else ""


def _colon(f: Fields, name: str) -> str:
    return f": {_text(f, name)}" if f.get(name) else ""


def _time(f: Fields, name: str) -> str:
    at = seconds(f.get(name))
    if at is None:
        return "unknown"
    when = _local(at)
    return f"{when:%Y-%m-%d %H:%M:%S}{' UTC' if when.tzinfo is timezone.utc else ''}"


def _local(at: float) -> datetime:
    """Return local time, or UTC if no local date is valid (the last hours of 9999, an offset of a day or more)."""
    when = datetime.fromtimestamp(at, timezone.utc)
    try:
        return when.astimezone()
    except (OverflowError, ValueError):
        return when


def _until(f: Fields) -> str:
    return f" until {_time(f, 'until')}" if f.get("until") else ""
