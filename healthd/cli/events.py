"""`healthd events`: what happened on a node, as its daemon told it."""

from __future__ import annotations

import argparse
import math
import os
import sys
import textwrap
import time
from collections.abc import Iterable, Iterator, Mapping
from datetime import datetime, timezone
from itertools import groupby
from typing import TYPE_CHECKING, Any

from healthd.cli import flags
from healthd.cli.flags import Command, Parser, duration
from healthd.cli.terminal import OK, REFUSED, UNKNOWN, Stop, complain, page, stream
from healthd.common.page import SEVERITIES, Page, plain, plural
from healthd.events.parse import Told, seconds
from healthd.events.schema import HEAD, OF_CONDITIONS

if TYPE_CHECKING:
    from healthd.events.reader import Cursor, Tally
    from healthd.events.sequence import Hole

_LOOK_MS = 500
_MOST_SENTENCES = 20
_OF_CHECKS = ("check_enabled", "check_changed", "check_disabled")
_EVENT = 14  # "check_disabled"
_MOST_NODE = 24

Fields = Mapping[str, Any]


def _events_arguments(parser: Parser) -> None:
    parser.add_argument(
        "place", metavar="FILE|DIR", nargs="*", help="other streams than this node's; - is standard input"
    )
    parser.add_argument("--since", metavar="TIME", help="2d, 30m; 2026-11-22, 2026-11-22T13:00, also with Z or +01:00")
    parser.add_argument("--until", metavar="TIME", help="the same")
    parser.add_argument("--code", metavar="GLOB", help="only events of such codes: gpu_xid/*")
    parser.add_argument("--json", action="store_true", help="the lines as they are (docs/events.md)")
    parser.add_argument("--follow", action="store_true", help="go on with what is written from now on")
    parser.add_argument("--state-dir", metavar="DIR", help="where this node's stream is (default: as in the settings)")
    flags.config(parser)


def _events(args: argparse.Namespace) -> int:
    from healthd.events import merge, reader

    now = time.time()
    since, until = _moment(args.since, "--since", now), _moment(args.until, "--until", now)
    if since is not None and until is not None and since > until:
        raise Stop("healthd events: --since is after --until")
    places = args.place or [flags.state_dir(args)]
    if "-" in places and (args.follow or len(places) > 1):
        raise Stop("healthd events: standard input is read alone, and not followed")
    asked = _Asked(since, until, args.code)
    tally, cursor, said = reader.Tally(asked.since, asked.until), reader.Cursor(), _Said()
    streams = reader.find(places, tally)

    def wait() -> bool:
        said.now(tally)
        return (until is None or time.time() <= until) and _somebody_reads()

    waits = args.follow and any(map(os.path.isdir, places))  # a stream may begin there
    if args.follow and (streams or waits):
        events = merge.follow(places, cursor, tally, wait, asked)
    else:
        events = merge.merged(streams, cursor, tally, asked)
    try:
        if args.json:
            stream(_line(told) for told in events)
        else:
            shown = rows(events, page(), nodes=len(streams) != 1, at_once=args.follow)
            stream(_or_none(shown, tally) if streams and not waits else shown)
    except OSError as error:
        why = error.strerror or error
        raise Stop(f"healthd events: what is sorted by time cannot be kept in TMPDIR: {why}", UNKNOWN) from None
    return _trouble(tally, cursor, said, asked)


def _moment(text: str | None, flag: str, now: float) -> float | None:
    """Epoch seconds of a time ago or of a date; without a zone it is a local one."""
    if text is None:
        return None
    ago = duration(text)
    if ago is not None:
        return now - ago
    try:
        return datetime.fromisoformat(text.replace("Z", "+00:00")).timestamp()
    except (ValueError, OverflowError, OSError):
        raise Stop(f'healthd events: {flag}: "{text}" is no time like 2d, 2026-11-22 or 2026-11-22T13:00') from None


class _Asked:
    """Which events are asked for, and which holes may be of that time: by the numbers of each stream that are before
    it, in it and after it."""

    def __init__(self, since: float | None, until: float | None, code: str | None) -> None:
        self.since = -math.inf if since is None else since
        self.until = math.inf if until is None else until
        self.code = code
        self.before: dict[tuple[str, ...], int] = {}
        self.within: dict[tuple[str, ...], tuple[int, int]] = {}
        self.after: dict[tuple[str, ...], int] = {}

    def __call__(self, told: Told) -> bool:
        """Whether this is to be shown. What has no time that is known here is."""
        if told.at is not None and told.key is not None and told.seq is not None:
            self._is_at(told.key[1:], told.seq, told.at)
        return (told.at is None or self.since <= told.at <= self.until) and _has_code(told, self.code)

    def _is_at(self, stream: tuple[str, ...], seq: int, at: float) -> None:
        if at < self.since:
            self.before[stream] = max(seq, self.before.get(stream, seq))
        elif at > self.until:
            self.after[stream] = min(seq, self.after.get(stream, seq))
        else:
            first, last = self.within.get(stream, (seq, seq))
            self.within[stream] = min(seq, first), max(seq, last)

    def has(self, hole: Hole) -> bool:
        """Whether lines of that time may be in it. (A clock that was set may have put early lines behind late ones.)"""
        stream = hole.key[1:]
        first, last = self.within.get(stream, (math.inf, -math.inf))
        touches = hole.last >= first - 1 and hole.first <= last + 1
        return touches or self.before.get(stream, -1) < hole.first < self.after.get(stream, math.inf)


def _has_code(told: Told, pattern: str | None) -> bool:
    from fnmatch import fnmatchcase

    return pattern is None or fnmatchcase(str(told.fields.get("code", "")), pattern)


def _line(told: Told) -> str:
    """As it was read; what is not ASCII, and so is not healthd's, is escaped: no terminal and no locale changes it."""
    import json

    text = told.line.decode("ascii") if told.line.isascii() else json.dumps(told.fields, separators=(",", ":"))
    return f"{text}\n"


def _or_none(shown: Iterator[str], tally: Tally) -> Iterator[str]:
    """Yield the lines, or "no event" if there is none and all of the streams could be read."""
    first = next(shown, None)
    if first is not None:
        yield first
    elif not tally.trouble:
        yield "no event\n"
    yield from shown


def _somebody_reads() -> bool:
    """Wait a moment. False: whoever read standard output is gone."""
    import select

    poll = select.poll()
    poll.register(sys.stdout.fileno(), 0)
    return not poll.poll(_LOOK_MS)


def _trouble(tally: Tally, cursor: Cursor, said: _Said, asked: _Asked) -> int:
    """Say what could not be read and what is missing; the exit status."""
    status = OK
    holes = list(filter(asked.has, cursor.seen.holes()))
    if tally.unknown:
        names = ", ".join(f"{name} ({count:,})" for name, count in sorted(tally.unknown.items()))
        complain(f"healthd events: written by a newer healthd, shown as they are: {names}")
    if tally.unread:
        more = f"; {tally.unread - 1:,} more such lines" if tally.unread > 1 else ""
        # A torn line is what a kill leaves: the daemon writes that line again, and its number is there.
        harmless = "" if tally.stray or holes else "; no event is missing"
        status = complain(f"healthd events: {tally.examples[0]}{more}{harmless}", OK if harmless else REFUSED)
    for hole in holes[:_MOST_SENTENCES]:
        lines = f"line {hole.first} is" if hole.first == hole.last else f"lines {hole.first} to {hole.last} are"
        sentence = f"healthd events: {hole.key.node}: {lines} missing in stream {hole.key.stream_id}"
        status = complain(sentence, REFUSED)
    if len(holes) > _MOST_SENTENCES:
        complain(f"healthd events: {len(holes) - _MOST_SENTENCES:,} more such holes")
    return max(status, said.now(tally), said.rest())


class _Said:
    """What cannot be read: each sentence once, as soon as it is known, and not more than _MOST_SENTENCES."""

    def __init__(self) -> None:
        self.sentences: set[str] = set()

    def now(self, tally: Tally) -> int:
        """The exit status."""
        for sentence in tally.trouble:
            if sentence not in self.sentences:
                self.sentences.add(sentence)
                if len(self.sentences) <= _MOST_SENTENCES:
                    complain(f"healthd events: {sentence}")
        return UNKNOWN if self.sentences else OK

    def rest(self) -> int:
        more = len(self.sentences) - _MOST_SENTENCES
        return complain(f"healthd events: {more:,} more files or folders cannot be read", UNKNOWN) if more > 0 else OK


# --- rows: events as people read them (docs/events.md), in the order in which they come. A field that is missing or has
# another type is left out.


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
    return _text(f, "words") or _text(f, "why")  # a decision, a stop


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


COMMANDS = {
    "events": Command(
        _events_arguments,
        _events,
        "What happened on this node: when checks began, what they found, what was decided and done, when healthd was "
        "away. A folder is a node's, or one that has a folder for each node; rotated and gzip files are read with "
        "it, each event once.\n"
        "Exit status: 0 done, 1 events of that time are missing or cannot be read, 3 a file or folder cannot be read, "
        "64 wrong use.",
        "  healthd events --since 2d\n"
        "  healthd events --code 'gpu_*' --since 2026-11-01 --until 2026-11-08\n"
        "  healthd events --follow --json | jq -r .message\n"
        "  healthd events /srv/events\n",
    ),
}
