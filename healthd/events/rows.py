"""Events of a stream (docs/events.md) as people read them: a row each, in the order in which they come. Pure.

What a line says may be anything: whatever is not there or has another type is left out, never a mistake.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Iterator, Mapping
from datetime import datetime, timezone
from itertools import groupby
from typing import Any

from healthd.common.page import SEVERITIES, Page, plain, plural
from healthd.events.parse import Told, seconds
from healthd.events.schema import HEAD, OF_CONDITIONS

Fields = Mapping[str, Any]

_OF_CHECKS = ("check_enabled", "check_changed", "check_disabled")
_EVENT = 14  # "check_disabled"
_MOST_NODE = 24


def rows(events: Iterable[Told], page: Page, nodes: bool = False, at_once: bool = False) -> Iterator[str]:
    """Whole lines with their ends: a heading for each day, in local time, and a row for each event. `nodes`: of which
    node it is, too. `at_once`: a row does not wait for the next event, to be one with it."""
    day, wide = "", 8
    for alike in ((told,) for told in events) if at_once else _alike(events):
        told = alike[0]
        when = _local(told.at) if told.at is not None else None
        if when and (today := f"{when:%Y-%m-%d %A}, times are {when:%Z}") != day:
            yield f"{'' if not day else chr(10)}{page.heading(plain(today))}\n"
            day = today
        before = [f"{when:%H:%M:%S}" if when else "        "]
        if nodes:
            node = plain(told.key.node if told.key else "?")[:_MOST_NODE]
            wide = max(wide, len(node))
            before.append(node.ljust(wide))
        before.append(plain(_text(told.fields, "event") or "?")[:40].ljust(_EVENT))
        text = words(told) if len(alike) == 1 else _checks(alike)
        yield _row("  ".join(before) + "  ", plain(" ".join(text.split())), page)


def _alike(events: Iterable[Told]) -> Iterator[tuple[Told, ...]]:
    """Each alone, but together what is the same of several checks: a start says it of each."""

    def same(told: Told) -> tuple[Any, ...]:
        f = told.fields
        of_checks = f.get("event") in _OF_CHECKS and not told.unknown
        return (f["event"], told.key, told.at, f.get("version"), f.get("since")) if of_checks else ()

    for of_checks, group in groupby(events, same):
        if of_checks:
            yield tuple(group)
        else:
            yield from ((told,) for told in group)


def _row(before: str, text: str, page: Page) -> str:
    room = page.width - len(before)
    whole = not page.fold or room < 20
    first, *rest = [text] if whole or not text else textwrap.wrap(text, room, break_on_hyphens=False)
    severity, space, others = first.partition(" ")
    if severity in SEVERITIES:
        first = page.paint(severity) + space + others
    return "".join(f"{line.rstrip()}\n" for line in [before + first, *(" " * len(before) + more for more in rest)])


def words(told: Told) -> str:
    """What an event says, as one sentence."""
    f = told.fields
    event = f.get("event")
    if told.unknown:
        return _of_a_newer(told)
    if event in OF_CONDITIONS:
        return _condition(f)
    if event == "started":
        clean = "" if f.get("clean") is True or not f.get("last_alive") else "; it had not been stopped"
        return f"healthd {_text(f, 'version')}, mode {_text(f, 'mode')}; last alive {_time(f, 'last_alive')}{clean}"
    if event == "alive":
        standing = [_part(c) for c in _list(f, "conditions") if isinstance(c, dict)]
        names = f": {', '.join(standing)}{_more(f, 'conditions')}" if standing else ""
        looking = len(_list(f, "checks")) + _number(f, "checks_more")
        count = len(standing) + _number(f, "conditions_more")
        stand = "condition stands" if count == 1 else "conditions stand"
        return f"{count:,} {stand}{names}; {plural(looking, 'check')} looked"
    if event in _OF_CHECKS:
        return f"{_run(f)} ({_since(f)})"
    if event == "pause":
        return f"{_text(f, 'stage')}, {_text(f, 'who')}{_until(f)}{_colon(f, 'why')}"
    if event == "repaired":
        return f"{_part(f)} by {_text(f, 'who')}{_colon(f, 'why')}"
    if event == "dropped":
        which = f" ({_text(f, 'from_seq')} to {_text(f, 'to_seq')})"
        here, earlier = (_number(f, name) for name in ("count", "earlier"))
        mine = [plural(here, "event") + which] if here or not earlier else []
        before = [f"{plural(earlier, 'event')} of a stream before"] if earlier else []
        return f"{' and '.join([*mine, *before])} could not be written for too long"
    if event in ("drain", "resume", "requeue"):
        job = f" job {_text(f, 'job')}" if f.get("job") else ""
        return f"{_text(f, 'stage')}{job}{_colon(f, 'reason')}{_colon(f, 'error')}"
    return _text(f, "text") or _text(f, "why")  # a decision, a stop


def _checks(alike: tuple[Told, ...]) -> str:
    names = ", ".join(_run(told.fields) for told in alike)
    return f"{len(alike):,} checks ({_since(alike[0].fields)}): {names}"


def _run(f: Fields) -> str:
    return f"{_text(f, 'check')} {_text(f, 'instance')}".strip()


def _since(f: Fields) -> str:
    version = f"version {_text(f, 'version')}, " if f.get("version") else ""
    return f"{version}here since {_time(f, 'since')}"


def _condition(f: Fields) -> str:
    """Its message and its jobs stand where it is opened and seen, not again where it is over or known."""
    over = f.get("event") in ("acknowledged", "cleared")
    jobs = [] if over else [str(job) for job in _list(f, "jobs")]
    count = _number(f, "count")
    notes = [
        *([f"was {_text(f, 'was')}"] if f.get("was") else []),
        *([f"by {_text(f, 'who')}{_until(f)}{_colon(f, 'why')}"] if f.get("who") else []),
        *([f"ended by {_text(f, 'cleared_by')}"] if f.get("cleared_by") else []),
        *([f"{count:,} times since {_time(f, 'first')}"] if count > 1 else []),
        *([f"job {', '.join(jobs)}{_more(f, 'jobs')}"] if jobs else []),
        *(["from before healthd's first start"] if f.get("history") is True else []),
        *(["only observed"] if f.get("observed") is True else []),
    ]
    told = f" ({'; '.join(notes)})" if notes else ""
    message = "" if over else _colon(f, "message")
    return f"{_text(f, 'severity')} {_part(f)}{message}{told}"


def _of_a_newer(told: Told) -> str:
    said = ", ".join(f"{name} {value}" for name, value in told.fields.items() if name not in HEAD)
    return f"({told.unknown}, which this healthd does not know) {said}"


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
        return "not known"
    when = _local(at)
    return f"{when:%Y-%m-%d %H:%M:%S}{' UTC' if when.tzinfo is timezone.utc else ''}"


def _local(at: float) -> datetime:
    """In local time; in UTC where no date can name that: in the last hours of 9999, a day or more from UTC."""
    when = datetime.fromtimestamp(at, timezone.utc)
    try:
        return when.astimezone()
    except (OverflowError, ValueError):
        return when


def _until(f: Fields) -> str:
    return f" until {_time(f, 'until')}" if f.get("until") else ""
