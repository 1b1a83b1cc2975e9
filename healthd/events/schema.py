"""Schema of the stream: its events, their fields, and their rendering as lines of JSON. All functions are pure.

docs/events.md is the contract with readers, and docs/events.schema.json is the same contract for programs. A test
compares all three. A new field must be optional. Any other change needs a new SCHEMA.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from datetime import datetime, timezone
from typing import Any

from healthd.common.text import printable
from healthd.common.values import Value

SCHEMA = 1
MAX_BYTES = 16 << 10  # maximum size of a line, including the newline
MAX_ENTRIES = 64  # maximum length of a list; `NAME_more` counts the omitted entries
MAX_NAMES_BYTES = 12 << 10  # of a list of names; names are never truncated, nor removed to make room for other fields
MAX_TEXT = 4096  # characters per text; fewer if the line would be longer than MAX_BYTES
LATEST = 253402300799.0  # the last second of the year 9999


class Event(Value, frozen=True):
    """One of EVENTS, with its fields. Times are in epoch seconds here and become text in the line."""

    name: str
    fields: Mapping[str, Any]


class Source(Value, frozen=True):
    """Origin of the stream. `stream_id` consists of 16 random hexadecimal digits, chosen when the stream begins."""

    cluster: str
    node: str
    boot_id: str
    stream_id: str


# Types of fields. A field has the same type and meaning in all events.
TEXT, TIME, TIME_OR_NULL, WHOLE, NUMBER, FLAG = "text", "time", "time or null", "whole", "number", "flag"
TEXTS, NAMES, CONDITIONS, GPUS = "texts", "names", "conditions", "gpus"

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
    "serial": TEXT,
    "domain": TEXT,
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
    "step": TEXT,
    "next": TEXT,
    "causes": NAMES,
    "causes_more": WHOLE,
    "id": TEXT,
    "problem": TEXT,
    "proof": TEXT,
    "was_taken": FLAG,
    "conditions": CONDITIONS,
    "conditions_more": WHOLE,
    "checks": NAMES,
    "checks_more": WHOLE,
    "gpus": GPUS,
    "gpus_more": WHOLE,
    "from_seq": WHOLE,
    "to_seq": WHOLE,
    "earlier": WHOLE,
    "case": TEXT,
    "part": TEXT,
    "path": TEXT,
    "bytes": WHOLE,
    "seconds": NUMBER,
    "message": TEXT,
}
HEAD = ("schema", "cluster", "node", "boot_id", "stream_id", "seq", "time", "mono", "event")

SEVERITIES = ("info", "warning", "degraded", "critical")
STATES = ("open", "acknowledged")
STEPS = ("gpu_reset", "reboot", "power_cycle", "person")
# Allowed values for fields with a fixed set of values.
ALLOWED_VALUES = {
    "severity": SEVERITIES,
    "was": (*SEVERITIES, "acknowledged"),
    "state": STATES,
    "kind": ("edge", "level"),
    "decision": ("drain", "resume", "leave"),
    "mode": ("observe", "drain", "act"),
    "step": STEPS,
    "next": STEPS,
    "part": ("first", "full"),
}


class EventFields(Value, frozen=True):
    """The fields that an event has in addition to HEAD. `stages` are the allowed values for `stage`."""

    required: tuple[str, ...]
    optional: tuple[str, ...] = ()
    stages: tuple[str, ...] = ()


_CONDITION = (
    *("condition", "check", "instance", "code", "subject", "severity", "kind"),
    *("first", "last", "count", "jobs", "message"),
)
_MARKS = ("jobs_more", "history", "observed", "slowdown", "onset", "serial", "domain")
_CHECK = EventFields(("check", "instance", "version", "settings", "since"))
_IN_SLURM = ("sent", "confirmed", "refused")

EVENTS = {
    "started": EventFields(("version", "mode", "last_alive", "clean")),
    "stopped": EventFields(("why",)),
    "alive": EventFields(("conditions", "checks"), ("conditions_more", "checks_more")),
    "gpus": EventFields(("gpus",), ("gpus_more",)),
    "check_enabled": _CHECK,
    "check_changed": _CHECK,
    "check_disabled": _CHECK,
    "opened": EventFields(_CONDITION, ("was", *_MARKS)),
    "seen_again": EventFields(_CONDITION, _MARKS),
    "worsened": EventFields((*_CONDITION, "was"), _MARKS),
    "acknowledged": EventFields((*_CONDITION, "who"), ("why", "until", *_MARKS)),
    "cleared": EventFields((*_CONDITION, "cleared_by"), _MARKS),
    "decision": EventFields(("decision", "text")),
    "drain": EventFields(("stage", "reason"), ("error", "domain"), _IN_SLURM),
    "resume": EventFields(("stage",), ("reason", "who", "error"), _IN_SLURM),
    "requeue": EventFields(("stage", "job"), ("error",), _IN_SLURM),
    "pause": EventFields(("stage", "who", "why", "until"), (), ("begun", "ended")),
    "repaired": EventFields(("who", "code"), ("subject", "why")),
    "repair": EventFields(
        ("stage", "step", "causes"),
        ("next", "why", "id", "problem", "proof", "was_taken", "seconds", "who", "causes_more"),
        (
            *("advised", "withdrawn", "ordered", "claimed", "refused", "taken", "failed", "succeeded", "gave_up"),
            "stopped",
        ),
    ),
    "evidence": EventFields(
        ("stage", "case", "part"),
        ("path", "bytes", "seconds", "error"),
        ("begun", "saved", "stopped", "failed"),
    ),
    "dropped": EventFields(("count", "from_seq", "to_seq"), ("earlier",)),
}
CONDITION_EVENTS = ("opened", "seen_again", "worsened", "acknowledged", "cleared")
# Fields for each open condition in `alive`.
ALIVE_CONDITION_FIELDS = ("condition", "check", "instance", "code", "subject", "severity", "state")
# Fields for each GPU in `gpus`.
GPU_FIELDS = ("subject", "serial", "uuid", "name")


def render(source: Source, seq: int, time: float, mono: float, event: Event) -> str:
    """Return the event as one line of printable ASCII without a newline. With a newline, it has at most MAX_BYTES.

    `time` is in seconds since the epoch, and `mono` in seconds since boot. In a line that would be longer, texts and
    lists are truncated. Names are not, because a check that is not listed did not run.
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
    texts, entries = MAX_TEXT, MAX_ENTRIES
    while len(line := _line(fields, texts, entries)) >= MAX_BYTES and texts > 1:
        texts, entries = texts // 2, max(entries // 2, 1)
    return line


def _line(fields: Mapping[str, Any], texts: int, entries: int) -> str:
    plain: dict[str, Any] = {}
    for name, kind in FIELDS.items():
        if name not in fields:
            continue
        value = fields[name]
        if kind in (TEXTS, NAMES, CONDITIONS, GPUS):
            plain[name] = (
                _fitting_names(value) if kind == NAMES else [_plain(kind, item, texts) for item in value[:entries]]
            )
            if more := len(value) - len(plain[name]):
                plain[f"{name}_more"] = more
        else:
            plain[name] = _plain(kind, value, texts)
    return json.dumps(plain, separators=(",", ":"))


def _fitting_names(names: Iterable[str]) -> list[str]:
    """Return the names that fit into MAX_NAMES_BYTES."""
    listed, room = [], MAX_NAMES_BYTES
    for name in map(printable, names):
        if (size := len(json.dumps(name)) + 1) <= room:
            listed.append(name)
            room -= size
    return listed


def _plain(kind: str, value: Any, texts: int) -> Any:
    if kind in (TEXT, TEXTS):
        return printable(value[:texts])
    if kind in (CONDITIONS, GPUS):
        return {name: printable(text[:texts]) for name, text in value.items()}
    if kind in (TIME, TIME_OR_NULL):
        return None if value is None else format_time(value)
    return value


def format_time(time: float) -> str:
    """Format a time as RFC 3339 in UTC with milliseconds, such as "2026-11-22T12:11:20.123Z"."""
    moment = datetime.fromtimestamp(min(max(time, 0.0), LATEST), timezone.utc)
    return moment.isoformat(timespec="milliseconds").replace("+00:00", "Z")
