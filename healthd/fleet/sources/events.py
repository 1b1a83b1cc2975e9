"""Event streams of the nodes (docs/events.md): a folder with one folder per node, as rsync or rsyslog filled it.

Only new lines are read, each once. A line that another reader wrote again, or a rotated file, adds nothing. A line with
an unknown schema or event is stored whole in `rest`. Missing lines are reported: a missing line does not mean that
nothing happened.
"""

from __future__ import annotations

import json
import math
import os
from collections import Counter
from collections.abc import Callable, Iterator
from hashlib import blake2b
from typing import TYPE_CHECKING, Any, TypeAlias

from healthd.common.page import plural
from healthd.common.text import regex
from healthd.events.parse import Key, Told, dropped
from healthd.events.parse import seconds as time_of
from healthd.events.reader import Cursor, Mark, Tally, find, read
from healthd.events.schema import OF_CONDITIONS
from healthd.events.sequence import Runs, Seen
from healthd.fleet.ingest import IngestError, Run, Source
from healthd.fleet.tables import EVENTS

if TYPE_CHECKING:
    from healthd.fleet.step import Step, Value

BATCH = 500_000  # events per step: each step rewrites the months that it touches
MOST_MARKS = 64  # remembered files per stream; a node has four, logrotate at the centre keeps 24
MOST_STREAMS = 64  # remembered streams per node, which begins a new one at each boot

Row: TypeAlias = "tuple[Value, ...]"
User: TypeAlias = "Callable[[str], str | None]"


def _text(value: Any) -> str | None:
    return value if isinstance(value, str) else None


def _count(value: Any) -> int | None:
    whole = isinstance(value, int) and not isinstance(value, bool)
    return value if whole and -(2**63) <= value < 2**63 else None


def _number(value: Any) -> float | None:
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None


def _time(value: Any) -> int | None:
    found = time_of(value)
    return None if found is None else int(found)


def _flag(value: Any) -> bool | None:
    return value if isinstance(value, bool) else None


def _ids(value: Any) -> str | None:
    whole = isinstance(value, list) and all(isinstance(one, str) and one and " " not in one for one in value)
    return " ".join(value) if whole else None


# A line's field -> the table's column and the conversion. Fields without a column, or of another type, go to `rest`.
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
}
_COLUMNS = {name: place for place, name in enumerate(EVENTS.columns)}
_PLACES = {field: (_COLUMNS[column], make) for field, (column, make) in _FIELDS.items()}
_HEAD = ("schema", "cluster", "node", "stream_id", "seq", "time")
_CLUSTER, _NODE, _STREAM, _SEQ = (_COLUMNS[name] for name in ("cluster", "node", "stream_id", "seq"))
_FLAGS = (_COLUMNS["observed"], _COLUMNS["history"])
_WHO, _CLEARED_BY = _COLUMNS["who"], _COLUMNS["cleared_by"]
_PERSON = regex(r"(?P<did>repaired by |)(?P<name>.+) \(uid [0-9]+\)")
_AT, _SCHEMA, _TIMES, _DROPPED, _REST = (
    _COLUMNS[name] for name in ("time", "schema_version", "times", "dropped", "rest")
)


def row(told: Told, cluster: str, user: User = lambda name: name) -> Row:
    """Return a row of the table `events` for a parsed line.

    cluster: for a line that does not name its own yet. user: maps a person's name to the stored text.
    """
    made: list[Value] = [None] * len(_COLUMNS)
    fields = told.fields
    made[_SCHEMA] = _count(fields.get("schema"))
    made[_AT] = None if told.at is None else int(told.at)
    if told.key is not None:
        made[_CLUSTER], made[_NODE], made[_STREAM] = told.key.cluster or cluster, told.key.node, told.key.stream_id
        made[_SEQ] = told.seq
    else:  # another schema may number its lines differently: a hash of the line identifies it
        made[_CLUSTER], made[_NODE] = _text(fields.get("cluster")) or cluster, _text(fields.get("node"))
        made[_STREAM], made[_SEQ] = "?" + blake2b(told.line, digest_size=8).hexdigest(), 0
    if told.unknown:
        made[_COLUMNS["event"]] = _text(fields.get("event"))
        made[_REST] = _whole(told, user)
        return tuple(made)
    counts = _DROPPED if fields["event"] == "dropped" else _TIMES
    if fields["event"] in OF_CONDITIONS:
        for place in _FLAGS:
            made[place] = False  # lines have the field only if it is true
    rest: dict[str, Any] = {}
    for name, value in fields.items():
        if value is None or name in _HEAD:
            continue
        place, make = _PLACES.get(name) or ((counts, _count) if name == "count" else (_REST, _nothing))
        made[place] = made_of = make(value)
        if made_of is None:
            rest[name] = value
    for place in (_WHO, _CLEARED_BY):
        made[place] = _person(made[place], user)
    made[_REST] = json.dumps(rest, separators=(",", ":")) if rest else None
    return tuple(made)


def _person(text: Value, user: User) -> Value:
    """Apply `user` to the name in "root (uid 0)" or "repaired by root (uid 0)" (from agent/control/server.py)."""
    found = _PERSON.fullmatch(text) if isinstance(text, str) else None
    if found is None:
        return text
    kept = user(found["name"])
    if kept == found["name"]:
        return text
    return f"{found['did']}{kept or 'a user'}" if found["did"] else kept


def _whole(told: Told, user: User) -> str:
    """Return the line unchanged, except for persons in the fields that may name some in known events."""
    kept: dict[str, Any] = {
        name: _person(told.fields[name], user) for name in ("who", "cleared_by") if name in told.fields
    }
    if all(told.fields[name] == value for name, value in kept.items()):
        return told.line.decode("utf-8", "replace")
    fields = {name: kept.get(name, value) for name, value in told.fields.items()}
    return json.dumps({name: value for name, value in fields.items() if value is not None}, separators=(",", ":"))


def _nothing(value: Any) -> None:
    return None


def text_of(cursor: Cursor) -> str:
    """Return how far a stream was read, as text for the manifest."""
    marks = [[name, mark.position, mark.number, mark.before.hex()] for name, mark in cursor.marks.items()]
    keys = list(cursor.seen.runs)[-MOST_STREAMS:]
    seen = [[*key, list(cursor.seen.runs[key]), list(cursor.seen.dropped.get(key, ()))] for key in keys]
    return json.dumps([marks[-MOST_MARKS:], seen], separators=(",", ":"))


def cursor_of(text: str | None, key: bytes = b"") -> Cursor:
    cursor = Cursor(Seen(), key=key)
    marks, seen = json.loads(text) if text else ((), ())
    for name, position, number, before in marks:
        cursor.marks[name] = Mark(position, number, bytes.fromhex(before))
    for cluster, node, stream, runs, gone in seen:
        its = Key(cluster, node, stream)
        cursor.seen.runs[its] = Runs(runs)
        if gone:
            cursor.seen.dropped[its] = Runs(gone)
    return cursor


def ingest(run: Run, files: list[str]) -> None:
    """Read the streams one after another, in steps of BATCH_EVENTS new events."""
    where = Tally()
    streams = find(files, where)
    for sentence in where.problem:
        if not streams:
            raise IngestError(sentence)
        run.failed.append(f"{run.source.name}: {sentence}")
    ahead = run.watch(streams, unit="nodes")
    all_of = Tally()
    missing = cut = 0
    while True:
        with run.steps() as step:
            some = Part(run, step, ahead)
            step.stage("events", some.rows())
            # Each step has its own generation, so the coverage of the steps adds up.
            name = f"{', '.join(files)} {run.store.manifest.generation}"
            step.stage("ingests", some.covered(name))
        missing += some.missing
        cut += some.cut
        all_of.unknown.update(some.unknown)
        if some.is_last:
            break
    for what, lines in sorted(all_of.unknown.items()):
        run.say(f"events: {plural(lines, 'line')} of {what}, which this version does not know, stored unchanged")
    if cut:
        run.say(f"events: {plural(cut, 'line')} torn or damaged, but no event is missing")
    if missing:
        run.say(f"events: {plural(missing, 'line')} of the streams missing: lost, or not yet copied")


class Part:
    """Streams of one step."""

    def __init__(self, run: Run, step: Step, ahead: Iterator[str]) -> None:
        self.run = run
        self.step = step
        self.ahead = ahead
        self.is_last = True
        self.missing = 0
        self.cut = 0
        self.unknown: Counter[str] = Counter()
        self.unread: Counter[Value] = Counter()  # cluster -> lines of its streams

    def rows(self) -> Iterator[Row]:
        """Yield the new events of the next streams. Problems of a stream are reported after it was read."""
        done = 0
        for stream in self.ahead:
            name = f"stream {os.path.abspath(stream)}"
            cursor, tally = self._cursor(name), _tally(self.run)
            holes, left_out = _missing(cursor), 0
            kept = self._cursor(name)
            of_stream: Row | None = None
            for told in read(stream, cursor, tally):
                if told.at is None or wants(self.run, int(told.at)):
                    _keep(kept.seen, told)
                    of_stream = row(told, self.run.cluster, self.run.private.user)
                    yield of_stream
                else:
                    left_out += 1
            # Events skipped by --from and --to do not count as read: a later run searches the files for them again.
            self.step.cursor(name, text_of(kept if left_out else cursor))
            tally.events -= left_out
            missing = max(0, _missing(cursor) - holes)
            # A line torn by a kill is not an unread row: the daemon writes the line again, with its number.
            unread = tally.unread if tally.stray or missing else 0
            self._tell(stream, tally, unread)
            if of_stream is not None:
                self.unread[of_stream[_CLUSTER]] += unread
            self.missing += missing
            self.cut += tally.unread - unread
            done += tally.events
            if done >= BATCH:
                self.is_last = False
                return

    def covered(self, name: str) -> Iterator[Row]:
        """Yield a row of `ingests` for each cluster, with the times of the lines that were read."""
        now = self.run.now
        for cluster, first, last, lines in self.step.times("events", now):
            yield cluster, self.run.source.name, name, first, last, now, lines, self.unread[cluster]

    def _cursor(self, name: str) -> Cursor:
        return cursor_of(self.run.cursor(name), self.run.private.marks_key)

    def _tell(self, stream: str, tally: Tally, unread: int) -> None:
        self.run.read(tally.events)
        self.unknown.update(tally.unknown)
        if unread:
            for line in tally.examples:
                self.run.unread(line.path, line.number, line.why)
            if hidden := unread - len(tally.examples):
                self.run.unread(stream, 0, "and more", hidden)
        self.run.failed.extend(f"{self.run.source.name}: {sentence}" for sentence in tally.problem)


def _tally(run: Run) -> Tally:
    """Return a tally that ignores problems outside the requested period."""
    return Tally(
        -math.inf if run.from_time is None else run.from_time, math.inf if run.to_time is None else run.to_time
    )


def _keep(seen: Seen, told: Told) -> None:
    if told.key is not None and told.seq is not None:
        seen.is_new(told.key, told.seq)
        if numbers := dropped(told):
            seen.drop(told.key, *numbers)


def wants(run: Run, at: int) -> bool:
    return (run.from_time is None or at >= run.from_time) and (run.to_time is None or at < run.to_time)


def _missing(cursor: Cursor) -> int:
    return sum(hole.last - hole.first + 1 for hole in cursor.seen.holes())


SOURCE = Source("events", "--events", "DIR", "event streams of the nodes; DIR has one subdirectory per node", ingest)
