"""The words of the stream: which events there are, what each says, and how one becomes a line of JSON. Pure.

docs/events.md is the contract with whoever reads the lines, docs/events.schema.json the same for programs; a test holds
all three together. A field is added as one that may be missing; whatever else changes is a new SCHEMA.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from datetime import datetime, timezone
from typing import Any

from healthd.common.text import printable
from healthd.common.values import Value

SCHEMA = 1
MOST_BYTES = 16 << 10  # of a line, with its end
MOST_ENTRIES = 64  # of a list; `NAME_more` says how many are left out
MOST_NAMES_BYTES = 12 << 10  # of a list of names in the line; each is whole, and none gives way to other fields
MOST_TEXT = 4096  # characters of a text; less of each where the line would be longer than MOST_BYTES
LATEST = 253402300799.0  # the last second that a date of four digits can name


class Event(Value, frozen=True):
    """One of EVENTS and its fields. A time is seconds since the epoch here, and becomes a text in the line."""

    name: str
    fields: Mapping[str, Any]


class Source(Value, frozen=True):
    """Whose stream it is. `stream_id`: 16 hexadecimal digits, drawn when the stream began."""

    cluster: str
    node: str
    boot_id: str
    stream_id: str


# What a field holds. One name means the same in all events.
TEXT, TIME, TIME_OR_NULL, WHOLE, NUMBER, FLAG = "text", "time", "time or null", "whole", "number", "flag"
TEXTS, NAMES, CONDITIONS = "texts", "names", "conditions"

FIELDS = {
    "schema": WHOLE,
    "cluster": TEXT,
    "node": TEXT,
    "boot_id": TEXT,
    "stream_id": TEXT,
    "seq": WHOLE,
    "time": TIME,
    "mono": NUMBER,
    "event": TEXT,
    "stage": TEXT,
    "condition": TEXT,
    "check": TEXT,
    "instance": TEXT,
    "code": TEXT,
    "subject": TEXT,
    "severity": TEXT,
    "was": TEXT,
    "state": TEXT,
    "kind": TEXT,
    "first": TIME,
    "last": TIME,
    "count": WHOLE,
    "jobs": TEXTS,
    "jobs_more": WHOLE,
    "cleared_by": TEXT,
    "history": FLAG,
    "observed": FLAG,
    "slowdown": NUMBER,
    "onset": TIME,
    "decision": TEXT,
    "text": TEXT,
    "reason": TEXT,
    "job": TEXT,
    "error": TEXT,
    "who": TEXT,
    "why": TEXT,
    "until": TIME,
    "version": TEXT,
    "settings": TEXT,
    "since": TIME,
    "mode": TEXT,
    "last_alive": TIME_OR_NULL,
    "clean": FLAG,
    "conditions": CONDITIONS,
    "conditions_more": WHOLE,
    "checks": NAMES,
    "checks_more": WHOLE,
    "from_seq": WHOLE,
    "to_seq": WHOLE,
    "earlier": WHOLE,
    "message": TEXT,
}
HEAD = ("schema", "cluster", "node", "boot_id", "stream_id", "seq", "time", "mono", "event")

SEVERITIES = ("info", "warning", "degraded", "critical")
STATES = ("open", "acknowledged")
# The only words that a field may hold, where that is so.
WORDS = {
    "severity": SEVERITIES,
    "was": (*SEVERITIES, "acknowledged"),
    "state": STATES,
    "kind": ("edge", "level"),
    "decision": ("drain", "resume", "leave"),
    "mode": ("observe", "drain", "act"),
}


class Says(Value, frozen=True):
    """Which fields an event has besides HEAD: always, and where they apply. `stages`: the words of its `stage`."""

    always: tuple[str, ...]
    at_times: tuple[str, ...] = ()
    stages: tuple[str, ...] = ()


_CONDITION = (
    *("condition", "check", "instance", "code", "subject", "severity", "kind"),
    *("first", "last", "count", "jobs", "message"),
)
_MARKS = ("jobs_more", "history", "observed", "slowdown", "onset")
_CHECK = Says(("check", "instance", "version", "settings", "since"))
_IN_SLURM = ("sent", "confirmed", "refused")

EVENTS = {
    "started": Says(("version", "mode", "last_alive", "clean")),
    "stopped": Says(("why",)),
    "alive": Says(("conditions", "checks"), ("conditions_more", "checks_more")),
    "check_enabled": _CHECK,
    "check_changed": _CHECK,
    "check_disabled": _CHECK,
    "opened": Says(_CONDITION, ("was", *_MARKS)),
    "seen_again": Says(_CONDITION, _MARKS),
    "worsened": Says((*_CONDITION, "was"), _MARKS),
    "acknowledged": Says((*_CONDITION, "who"), ("why", "until", *_MARKS)),
    "cleared": Says((*_CONDITION, "cleared_by"), _MARKS),
    "decision": Says(("decision", "text")),
    "drain": Says(("stage", "reason"), ("error",), _IN_SLURM),
    "resume": Says(("stage",), ("reason", "who", "error"), _IN_SLURM),
    "requeue": Says(("stage", "job"), ("error",), _IN_SLURM),
    "pause": Says(("stage", "who", "why", "until"), (), ("begun", "ended")),
    "repaired": Says(("who", "code"), ("subject", "why")),
    "dropped": Says(("count", "from_seq", "to_seq"), ("earlier",)),
}
OF_CONDITIONS = ("opened", "seen_again", "worsened", "acknowledged", "cleared")
# What `alive` says of each condition that stands.
STANDING = ("condition", "check", "instance", "code", "subject", "severity", "state")


def render(source: Source, seq: int, time: float, mono: float, event: Event) -> str:
    """The event as one line of printable ASCII, without its end; at most MOST_BYTES with it.

    `time`: seconds since the epoch, `mono`: since the boot. Where it would be longer, texts and lists are cut, but no
    names: what is not named did not look.
    """
    fields = {
        "schema": SCHEMA,
        "cluster": source.cluster,
        "node": source.node,
        "boot_id": source.boot_id,
        "stream_id": source.stream_id,
        "seq": seq,
        "time": time,
        "mono": round(mono, 3),
        "event": event.name,
        **event.fields,
    }
    texts, entries = MOST_TEXT, MOST_ENTRIES
    while len(line := _line(fields, texts, entries)) >= MOST_BYTES and texts > 1:
        texts, entries = texts // 2, max(entries // 2, 1)
    return line


def _line(fields: Mapping[str, Any], texts: int, entries: int) -> str:
    plain: dict[str, Any] = {}
    for name, kind in FIELDS.items():
        if name not in fields:
            continue
        value = fields[name]
        if kind in (TEXTS, NAMES, CONDITIONS):
            plain[name] = _whole(value) if kind == NAMES else [_plain(kind, one, texts) for one in value[:entries]]
            if more := len(value) - len(plain[name]):
                plain[f"{name}_more"] = more
        else:
            plain[name] = _plain(kind, value, texts)
    return json.dumps(plain, separators=(",", ":"))


def _whole(names: Iterable[str]) -> list[str]:
    """Those that fit."""
    kept, room = [], MOST_NAMES_BYTES
    for name in map(printable, names):
        if (size := len(json.dumps(name)) + 1) <= room:
            kept.append(name)
            room -= size
    return kept


def _plain(kind: str, value: Any, texts: int) -> Any:
    if kind in (TEXT, TEXTS):
        return printable(value[:texts])
    if kind == CONDITIONS:
        return {name: printable(text[:texts]) for name, text in value.items()}
    if kind in (TIME, TIME_OR_NULL):
        return None if value is None else when(value)
    return value


def when(time: float) -> str:
    """RFC 3339 in UTC with milliseconds: "2026-11-22T12:11:20.123Z"."""
    moment = datetime.fromtimestamp(min(max(time, 0.0), LATEST), timezone.utc)
    return moment.isoformat(timespec="milliseconds").replace("+00:00", "Z")
