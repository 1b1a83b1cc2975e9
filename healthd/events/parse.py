"""Parser for one line in an event stream. All functions are pure.

docs/events.md defines a line. Lines from a newer healthd (another schema, an unknown event) are kept unchanged. A
damaged line is reported with a reason, and no data is taken from it.
"""

from __future__ import annotations

import json
from datetime import datetime, timezone
from typing import Any, NamedTuple

from healthd.common.text import regex
from healthd.events.schema import EVENTS, LATEST, SCHEMA

_MAX_SEQ = 2**63 - 1  # the maximum of a database integer
_TIME = regex(r"([0-9]{4}-[0-9]{2}-[0-9]{2}T[0-9]{2}:[0-9]{2}:[0-9]{2})(\.[0-9]{1,9})?Z")


class Key(NamedTuple):
    """Key of a stream. Lines are numbered from the beginning of the stream."""

    cluster: str
    node: str
    stream_id: str


class StreamEvent(NamedTuple):
    """An event.

    `line` is the text as read, without the newline, and `fields` is its data. `key` and `seq` are None if another
    schema lacks them. `at` is in epoch seconds, or None if a line of another schema has no time. `unknown` is the part
    that this version does not know ("schema 2", "event melted"), or "" for an event defined in docs/events.md.
    """

    line: bytes
    fields: dict[str, Any]
    key: Key | None
    seq: int | None
    at: float | None
    unknown: str = ""


class InvalidLine(NamedTuple):
    """A line that is not an event. `why` is the reason, worded as a predicate ("is not UTF-8")."""

    why: str


def parse(line: bytes) -> StreamEvent | InvalidLine:
    """Parse a line without its newline."""
    try:
        fields = json.loads(line.decode(), parse_constant=_no_constant)
    except UnicodeDecodeError:
        return InvalidLine("is not UTF-8")
    except (ValueError, RecursionError):
        return InvalidLine("is truncated or damaged: it is not JSON")
    schema = fields.get("schema") if isinstance(fields, dict) else None
    if not _is_count(schema):
        return InvalidLine('is not an event: "schema" is not a number')
    key, seq, at = _key(fields), _seq(fields.get("seq")), seconds(fields.get("time"))
    event = fields.get("event")
    if schema != SCHEMA:
        return StreamEvent(line, fields, key if seq is not None else None, seq if key else None, at, f"schema {schema}")
    if key is None or not key.stream_id:
        return InvalidLine("is damaged: cluster, node or stream_id is missing")
    if seq is None:
        return InvalidLine("is damaged: seq is missing")
    if at is None:
        return InvalidLine("is damaged: time must be UTC, such as 2026-11-22T12:11:20.123Z")
    if not isinstance(event, str) or not event:
        return InvalidLine("is damaged: event is missing")
    return StreamEvent(line, fields, key, seq, at, "" if event in EVENTS else f"event {event[:40]}")


def seconds(text: object) -> float | None:
    """Return the epoch seconds for a time like "2026-11-22T12:11:20.123Z", or None for other text and for times before
    1970.
    """
    match = _TIME.fullmatch(text) if isinstance(text, str) else None
    if match is None:
        return None
    try:
        whole = datetime.fromisoformat(match[1]).replace(tzinfo=timezone.utc).timestamp()
    except ValueError:  # an invalid date, such as February 31
        return None
    # A fraction in the last second of 9999 may round up to the year 10000.
    return min(whole + float(match[2] or 0), LATEST) if whole >= 0 else None


def dropped_range(event: StreamEvent) -> tuple[int, int] | None:
    """Return the first and last number of the lines that the node reports as dropped, or None if there are none."""
    if event.unknown or event.fields["event"] != "dropped":
        return None
    first, last = _seq(event.fields.get("from_seq")), _seq(event.fields.get("to_seq"))
    return (first, last) if first and last is not None and first <= last else None


def _no_constant(name: str) -> None:
    raise ValueError(name)  # NaN and Infinity are not JSON, though Python reads them


def _key(fields: dict[str, Any]) -> Key | None:
    values = [fields.get(name) for name in Key._fields]
    return Key(*map(str, values)) if all(isinstance(word, str) for word in values) else None


def _seq(number: object) -> int | None:
    return number if isinstance(number, int) and _is_count(number) and number <= _MAX_SEQ else None


def _is_count(number: object) -> bool:
    return isinstance(number, int) and not isinstance(number, bool) and number >= 0
