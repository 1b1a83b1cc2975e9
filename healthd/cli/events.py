"""`healthd events`: what happened on a node, as its daemon told it."""

from __future__ import annotations

import argparse
import math
import os
import sys
import time
from collections.abc import Iterator
from datetime import datetime
from typing import TYPE_CHECKING

from healthd.cli import flags
from healthd.cli.flags import Command, Parser, duration
from healthd.cli.terminal import OK, REFUSED, UNKNOWN, Stop, complain, page, stream

if TYPE_CHECKING:
    from healthd.events.parse import Told
    from healthd.events.reader import Cursor, Tally
    from healthd.events.sequence import Hole

_LOOK_MS = 500
_MOST_SENTENCES = 20


def _events_arguments(parser: Parser) -> None:
    parser.add_argument(
        "place", metavar="FILE|DIR", nargs="*", help="event streams to read instead of this node's; -: standard input"
    )
    parser.add_argument(
        "--since", metavar="TIME", help="start: 2d, 30m, 2026-11-22 or 2026-11-22T13:00, also with Z or +01:00"
    )
    parser.add_argument("--until", metavar="TIME", help="end, in the same format")
    parser.add_argument("--code", metavar="GLOB", help="only events with matching codes: gpu_xid/*")
    parser.add_argument("--json", action="store_true", help="print the original lines (docs/events.md)")
    parser.add_argument("--follow", action="store_true", help="continue with new events until Ctrl-C")
    parser.add_argument(
        "--state-dir", metavar="DIR", help="directory of this node's stream (default: as in the settings)"
    )
    flags.config(parser)


def _events(args: argparse.Namespace) -> int:
    from healthd.events import merge, reader
    from healthd.events.rows import rows

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
    elif not tally.problem:
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
        for sentence in tally.problem:
            if sentence not in self.sentences:
                self.sentences.add(sentence)
                if len(self.sentences) <= _MOST_SENTENCES:
                    complain(f"healthd events: {sentence}")
        return UNKNOWN if self.sentences else OK

    def rest(self) -> int:
        more = len(self.sentences) - _MOST_SENTENCES
        return complain(f"healthd events: {more:,} more files or folders cannot be read", UNKNOWN) if more > 0 else OK


COMMANDS = {
    "events": Command(
        _events_arguments,
        _events,
        "Show what happened on this node: findings, decisions, actions, and times when healthd did not run. DIR is one "
        "node's stream, or a directory with one subdirectory per node. Rotated and gzipped files are included; "
        "duplicates are dropped.\n"
        "Exit status: 0 done, 1 events of the period are missing or unreadable, 3 a file or directory cannot be read, "
        "64 usage error.",
        "  healthd events --since 2d\n"
        "  healthd events --code 'gpu_*' --since 2026-11-01 --until 2026-11-08\n"
        "  healthd events --follow --json | jq -r .message\n"
        "  healthd events /srv/events\n",
    ),
}
