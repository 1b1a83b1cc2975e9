"""Reads the nodes' event streams (docs/events.md) from a folder that rsync or rsyslog fills.

The folder has one subfolder for each node. Each line is read only once, even if it was written again or its file was
rotated. A line with an unknown schema or event is stored unchanged in `rest`. Missing lines are reported, because
events may have been lost with them.
"""

from __future__ import annotations

import json
import math
import os
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from hashlib import blake2b
from typing import TYPE_CHECKING, Any, TypeAlias

from healthd.common.page import plural
from healthd.common.text import regex
from healthd.events.cursor_text import dump_cursor, load_cursor
from healthd.events.parse import StreamEvent, dropped_range
from healthd.events.parse import seconds as time_of
from healthd.events.reader import Cursor, Tally, find, read
from healthd.events.schema import CONDITION_EVENTS
from healthd.events.sequence import ReadSequences
from healthd.fleet.ingest import IngestError, Run, Source
from healthd.fleet.tables import EVENTS

if TYPE_CHECKING:
    from healthd.fleet.step import Step, Value

BATCH_EVENTS = 500_000  # number of events per step; each step rewrites the months for which it has rows

Row: TypeAlias = "tuple[Value, ...]"
UserFilter: TypeAlias = "Callable[[str], str | None]"


def _text(value: Any) -> str | None:
    return value if isinstance(value, str) else None


def _count(value: Any) -> int | None:
    is_integer = isinstance(value, int) and not isinstance(value, bool)
    return value if is_integer and -(2**63) <= value < 2**63 else None


def _number(value: Any) -> float | None:
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None


def _time(value: Any) -> int | None:
    found = time_of(value)
    return None if found is None else int(found)


def _flag(value: Any) -> bool | None:
    return value if isinstance(value, bool) else None


def _ids(value: Any) -> str | None:
    is_valid = isinstance(value, list) and all(isinstance(item, str) and item and " " not in item for item in value)
    return " ".join(value) if is_valid else None


# Maps each field in a line to the table's column and the conversion. Fields without a column, or with another type, go
# to `rest`.
_FIELDS: dict[str, tuple[str, Callable[[Any], Value]]] = {
    "boot_id": ("boot_id", _text),
    "mono": ("mono", _number),
    "event": ("event", _text),
    "stage": ("stage", _text),
    "condition": ("condition_id", _text),
    "check": ("check_name", _text),
    "instance": ("check_instance", _text),
    "code": ("code", _text),
    "subject": ("subject", _text),
    "severity": ("severity", _text),
    "was": ("was", _text),
    "kind": ("kind", _text),
    "first": ("first_time", _time),
    "last": ("last_time", _time),
    "jobs": ("jobs", _ids),
    "message": ("message", _text),
    "cleared_by": ("cleared_by", _text),
    "decision": ("decision", _text),
    "reason": ("reason", _text),
    "who": ("who", _text),
    "why": ("why", _text),
    "until": ("until_time", _time),
    "version": ("version", _text),
    "since": ("since_time", _time),
    "last_alive": ("last_alive_time", _time),
    "observed": ("observed", _flag),
    "history": ("history", _flag),
    "slowdown": ("slowdown", _number),
    "onset": ("onset_time", _time),
    "serial": ("serial", _text),
    "domain": ("nvlink_domain", _text),
}
_COLUMNS = {name: place for place, name in enumerate(EVENTS.columns)}
_POSITIONS = {field: (_COLUMNS[column], make) for field, (column, make) in _FIELDS.items()}
_HEAD_FIELDS = ("schema", "cluster", "node", "stream_id", "seq", "time")
_CLUSTER_COLUMN, _NODE_COLUMN, _STREAM_COLUMN, _SEQ_COLUMN = (
    _COLUMNS[name] for name in ("cluster", "node", "stream_id", "seq")
)
_GPU_HEAD_COLUMNS = tuple(_COLUMNS[name] for name in ("cluster", "node", "stream_id", "seq", "time"))
_FLAG_COLUMNS = (_COLUMNS["observed"], _COLUMNS["history"])
_WHO_COLUMN, _CLEARED_BY_COLUMN = _COLUMNS["who"], _COLUMNS["cleared_by"]
_PERSON = regex(r"(?P<did>repaired by |)(?P<name>.+) \(uid [0-9]+\)")
_TIME_COLUMN, _SCHEMA_COLUMN, _TIMES_COLUMN, _DROPPED_COLUMN, _REST_COLUMN = (
    _COLUMNS[name] for name in ("time", "schema_version", "times", "dropped", "rest")
)


def row(parsed: StreamEvent, cluster: str, user: UserFilter = lambda name: name) -> Row:
    """Return a row for the table `events` from a parsed line.

    Args:
        cluster: used for a line that does not name one.
        user: maps a person's name to the stored text.
    """
    values: list[Value] = [None] * len(_COLUMNS)
    fields = parsed.fields
    values[_SCHEMA_COLUMN] = _count(fields.get("schema"))
    values[_TIME_COLUMN] = None if parsed.at is None else int(parsed.at)
    if parsed.key is not None:
        values[_CLUSTER_COLUMN], values[_NODE_COLUMN], values[_STREAM_COLUMN] = (
            parsed.key.cluster or cluster,
            parsed.key.node,
            parsed.key.stream_id,
        )
        values[_SEQ_COLUMN] = parsed.seq
    else:  # another schema may number its lines differently, so a hash identifies the line
        values[_CLUSTER_COLUMN], values[_NODE_COLUMN] = (
            _text(fields.get("cluster")) or cluster,
            _text(fields.get("node")),
        )
        values[_STREAM_COLUMN], values[_SEQ_COLUMN] = "?" + blake2b(parsed.line, digest_size=8).hexdigest(), 0
    if parsed.unknown:
        values[_COLUMNS["event"]] = _text(fields.get("event"))
        values[_REST_COLUMN] = _raw_line(parsed, user)
        return tuple(values)
    count_column = _DROPPED_COLUMN if fields["event"] == "dropped" else _TIMES_COLUMN
    if fields["event"] in CONDITION_EVENTS:
        for position in _FLAG_COLUMNS:
            values[position] = False  # lines contain the field only if it is true
    unmapped: dict[str, Any] = {}
    for name, value in fields.items():
        if value is None or name in _HEAD_FIELDS:
            continue
        position, make = _POSITIONS.get(name) or (
            (count_column, _count) if name == "count" else (_REST_COLUMN, _unmapped)
        )
        values[position] = converted = make(value)
        if converted is None:
            unmapped[name] = value
    for position in (_WHO_COLUMN, _CLEARED_BY_COLUMN):
        values[position] = _filter_person(values[position], user)
    values[_REST_COLUMN] = json.dumps(unmapped, separators=(",", ":")) if unmapped else None
    return tuple(values)


def gpu_rows(event_row: Row, fields: Mapping[str, Any]) -> Iterator[Row]:
    """Yield the rows for the table `gpus` from the fields of a line, whose row for the table `events` is given.

    A line of another event and a GPU without an address have none.
    """
    listed = fields.get("gpus") if fields.get("event") == "gpus" else None
    for gpu in listed if isinstance(listed, list) else ():
        if isinstance(gpu, dict) and _text(gpu.get("subject")):
            names = (_text(gpu.get(name)) or None for name in ("subject", "serial", "uuid", "name"))
            yield (*(event_row[position] for position in _GPU_HEAD_COLUMNS), *names)


def _filter_person(text: Value, user: UserFilter) -> Value:
    """Apply `user` to the name in text like "root (uid 0)" or "repaired by root (uid 0)" (from
    agent/control/server.py).
    """
    found = _PERSON.fullmatch(text) if isinstance(text, str) else None
    if found is None:
        return text
    filtered = user(found["name"])
    if filtered == found["name"]:
        return text
    return f"{found['did']}{filtered or 'a user'}" if found["did"] else filtered


def _raw_line(parsed: StreamEvent, user: UserFilter) -> str:
    """Replace people's names in a line. Only fields of known events that may contain names are changed."""
    filtered: dict[str, Any] = {
        name: _filter_person(parsed.fields[name], user) for name in ("who", "cleared_by") if name in parsed.fields
    }
    if all(parsed.fields[name] == value for name, value in filtered.items()):
        return parsed.line.decode("utf-8", "replace")
    fields = {name: filtered.get(name, value) for name, value in parsed.fields.items()}
    return json.dumps({name: value for name, value in fields.items() if value is not None}, separators=(",", ":"))


def _unmapped(value: Any) -> None:
    return None


def ingest(run: Run, files: list[str]) -> None:
    """Read the streams one after another, in steps of BATCH_EVENTS new events."""
    search_tally = Tally()
    streams = find(files, search_tally)
    for sentence in search_tally.problems:
        if not streams:
            raise IngestError(sentence)
        run.failed.append(f"{run.source.name}: {sentence}")
    pending = run.track(streams, unit="nodes")
    totals = Tally()
    missing = torn = 0
    while True:
        with run.steps() as step:
            batch = StreamBatch(run, step, pending)
            step.stage("events", batch.rows())
            step.stage("gpus", batch.gpus)
            # The name contains the store's generation. Each step then has its own row, and the coverage of all steps
            # adds up.
            name = f"{', '.join(files)} {run.store.manifest.generation}"
            step.stage("ingests", batch.covered(name))
        missing += batch.missing
        torn += batch.torn
        totals.unknown.update(batch.unknown)
        if batch.is_last:
            break
    for kind, lines in sorted(totals.unknown.items()):
        run.log(f"events: {plural(lines, 'line')} of {kind} that this version does not support; stored unchanged")
    if torn:
        run.log(f"events: {plural(torn, 'line')} torn or damaged, but no event is missing")
    if missing:
        run.log(f"events: {plural(missing, 'line')} missing from the streams: lost or not yet copied")


class StreamBatch:
    """The streams that are read in one step."""

    def __init__(self, run: Run, step: Step, ahead: Iterator[str]) -> None:
        self.run = run
        self.step = step
        self.pending = ahead
        self.is_last = True
        self.gpus: list[Row] = []  # for the table `gpus`
        self.missing = 0
        self.torn = 0
        self.unknown: Counter[str] = Counter()
        self.unread: Counter[Value] = Counter()  # number of lines in each cluster's streams

    def rows(self) -> Iterator[Row]:
        """Yield the new events in the next streams. After a stream is read, report any problems with it."""
        events_read = 0
        for stream in self.pending:
            name = f"stream {os.path.abspath(stream)}"
            cursor, tally = self._cursor(name), _new_tally(self.run)
            missing_before, skipped = _count_missing(cursor), 0
            stored_cursor = self._cursor(name)
            last_row: Row | None = None
            for parsed in read(stream, cursor, tally):
                if parsed.at is None or is_in_period(self.run, int(parsed.at)):
                    _mark_read(stored_cursor.sequences, parsed)
                    last_row = row(parsed, self.run.cluster, self.run.privacy.user)
                    if not parsed.unknown:
                        self.gpus += gpu_rows(last_row, parsed.fields)
                    yield last_row
                else:
                    skipped += 1
            # Events that were skipped because of --from and --to do not count as read, so a later run searches the
            # files for them again.
            self.step.cursor(name, dump_cursor(stored_cursor if skipped else cursor))
            tally.events -= skipped
            missing = max(0, _count_missing(cursor) - missing_before)
            # A line that was truncated because the daemon was killed is not an unread row: the daemon writes the line
            # again with the same number.
            unread = tally.unread if tally.stray or missing else 0
            self._report(stream, tally, unread)
            if last_row is not None:
                self.unread[last_row[_CLUSTER_COLUMN]] += unread
            self.missing += missing
            self.torn += tally.unread - unread
            events_read += tally.events
            if events_read >= BATCH_EVENTS:
                self.is_last = False
                return

    def covered(self, name: str) -> Iterator[Row]:
        """Yield a row of `ingests` for each cluster, with the times of the lines that were read."""
        now = self.run.now
        for cluster, first, last, lines in self.step.covered_times("events", now):
            yield cluster, self.run.source.name, name, first, last, now, lines, self.unread[cluster]

    def _cursor(self, name: str) -> Cursor:
        return load_cursor(self.run.cursor(name), self.run.privacy.marks_key)

    def _report(self, stream: str, tally: Tally, unread: int) -> None:
        self.run.read(tally.events)
        self.unknown.update(tally.unknown)
        if unread:
            for line in tally.examples:
                self.run.unread(line.path, line.number, line.why)
            if hidden := unread - len(tally.examples):
                self.run.unread(stream, 0, "and more", hidden)
        self.run.failed.extend(f"{self.run.source.name}: {sentence}" for sentence in tally.problems)


def _new_tally(run: Run) -> Tally:
    """Return a counter of unread rows that ignores rows outside the requested period."""
    return Tally(
        -math.inf if run.from_time is None else run.from_time, math.inf if run.to_time is None else run.to_time
    )


def _mark_read(sequences: ReadSequences, parsed: StreamEvent) -> None:
    if parsed.key is not None and parsed.seq is not None:
        sequences.is_new(parsed.key, parsed.seq)
        if numbers := dropped_range(parsed):
            sequences.drop(parsed.key, *numbers)


def is_in_period(run: Run, at: int) -> bool:
    return (run.from_time is None or at >= run.from_time) and (run.to_time is None or at < run.to_time)


def _count_missing(cursor: Cursor) -> int:
    return sum(hole.last - hole.first + 1 for hole in cursor.sequences.gaps())


SOURCE = Source("events", "--events", "DIR", "event streams from the nodes; DIR has one subdirectory per node", ingest)
