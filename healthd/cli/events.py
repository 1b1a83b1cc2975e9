"""`healthd events`: print the event streams of nodes."""

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
from healthd.cli.flags import Command, Parser, parse_duration
from healthd.cli.terminal import OK, REFUSED, UNKNOWN, Stop, page, write_error, write_stream

if TYPE_CHECKING:
    from healthd.events.parse import StreamEvent
    from healthd.events.reader import Cursor, Tally
    from healthd.events.sequence import StreamGap

_POLL_MS = 500
_MAX_SENTENCES = 20


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
    flags.add_config_flag(parser)


def _events(args: argparse.Namespace) -> int:
    from healthd.events import merge, reader
    from healthd.events.rows import rows

    start = time.time()
    since, until = _parse_time(args.since, "--since", start), _parse_time(args.until, "--until", start)
    if since is not None and until is not None and since > until:
        raise Stop("healthd events: --since is after --until")
    places = args.place or [flags.state_dir(args)]
    if "-" in places and (args.follow or len(places) > 1):
        raise Stop("healthd events: standard input cannot be combined with other files or --follow")
    selection = _Selection(since, until, args.code)
    tally, cursor, reported = reader.Tally(selection.since, selection.until), reader.Cursor(), _ReportedProblems()
    streams = reader.find(places, tally)

    def wait() -> bool:
        reported.report_new(tally)
        return (until is None or time.time() <= until) and _is_output_open()

    waits = args.follow and any(map(os.path.isdir, places))  # a stream may be created there
    if args.follow and (streams or waits):
        events = merge.follow(places, cursor, tally, wait, selection)
    else:
        events = merge.merged(streams, cursor, tally, selection)
    try:
        if args.json:
            write_stream(_line(event) for event in events)
        else:
            lines = rows(events, page(), nodes=len(streams) != 1, at_once=args.follow)
            write_stream(_or_none(lines, tally) if streams and not waits else lines)
    except OSError as error:
        why = error.strerror or error
        raise Stop(f"healthd events: cannot write temporary files in TMPDIR: {why}", UNKNOWN) from None
    return _report_problems(tally, cursor, reported, selection)


def _parse_time(text: str | None, flag: str, now: float) -> float | None:
    """Return the epoch seconds of a duration before now or of a date; without a zone it is local time."""
    if text is None:
        return None
    ago = parse_duration(text)
    if ago is not None:
        return now - ago
    try:
        return datetime.fromisoformat(text.replace("Z", "+00:00")).timestamp()
    except (ValueError, OverflowError, OSError):
        raise Stop(f'healthd events: {flag} must be like 2d, 2026-11-22 or 2026-11-22T13:00, got "{text}"') from None


class _Selection:
    """Selected events, and gaps that may be in the selected time.

    For gaps it records the numbers of each stream before, in and after that time.
    """

    def __init__(self, since: float | None, until: float | None, code: str | None) -> None:
        self.since = -math.inf if since is None else since
        self.until = math.inf if until is None else until
        self.code = code
        self.before: dict[tuple[str, ...], int] = {}
        self.within: dict[tuple[str, ...], tuple[int, int]] = {}
        self.after: dict[tuple[str, ...], int] = {}

    def __call__(self, event: StreamEvent) -> bool:
        """Return True if the event is selected. An event without a known time is."""
        if event.at is not None and event.key is not None and event.seq is not None:
            self._record(event.key[1:], event.seq, event.at)
        return (event.at is None or self.since <= event.at <= self.until) and _has_code(event, self.code)

    def _record(self, stream: tuple[str, ...], seq: int, at: float) -> None:
        if at < self.since:
            self.before[stream] = max(seq, self.before.get(stream, seq))
        elif at > self.until:
            self.after[stream] = min(seq, self.after.get(stream, seq))
        else:
            first, last = self.within.get(stream, (seq, seq))
            self.within[stream] = min(seq, first), max(seq, last)

    def may_contain(self, gap: StreamGap) -> bool:
        """Return True if the gap may contain lines of the selected time.

        After a change of the clock, early lines may come after late ones.
        """
        stream = gap.key[1:]
        first, last = self.within.get(stream, (math.inf, -math.inf))
        touches = gap.last >= first - 1 and gap.first <= last + 1
        return touches or self.before.get(stream, -1) < gap.first < self.after.get(stream, math.inf)


def _has_code(event: StreamEvent, pattern: str | None) -> bool:
    from fnmatch import fnmatchcase

    return pattern is None or fnmatchcase(str(event.fields.get("code", "")), pattern)


def _line(event: StreamEvent) -> str:
    """Return the original line; one that is not ASCII, and so not written by healthd, is escaped."""
    import json

    text = event.line.decode("ascii") if event.line.isascii() else json.dumps(event.fields, separators=(",", ":"))
    return f"{text}\n"


def _or_none(lines: Iterator[str], tally: Tally) -> Iterator[str]:
    """Yield the lines, or "no event" if there is none and all streams could be read."""
    first = next(lines, None)
    if first is not None:
        yield first
    elif not tally.problems:
        yield "no event\n"
    yield from lines


def _is_output_open() -> bool:
    """Wait a moment. Return False if the reader of standard output is gone."""
    import select

    poll = select.poll()
    poll.register(sys.stdout.fileno(), 0)
    return not poll.poll(_POLL_MS)


def _report_problems(tally: Tally, cursor: Cursor, reported: _ReportedProblems, selection: _Selection) -> int:
    """Report unreadable and missing events. Return the exit status."""
    status = OK
    gaps = list(filter(selection.may_contain, cursor.sequences.gaps()))
    if tally.unknown:
        names = ", ".join(f"{name} ({count:,})" for name, count in sorted(tally.unknown.items()))
        write_error(f"healthd events: written by a newer healthd, shown unchanged: {names}")
    if tally.unread:
        more = f"; {tally.unread - 1:,} more such lines" if tally.unread > 1 else ""
        # A kill leaves a truncated line: the daemon writes the line again, so its number is present.
        harmless = "" if tally.stray or gaps else "; no event is missing"
        status = write_error(f"healthd events: {tally.examples[0]}{more}{harmless}", OK if harmless else REFUSED)
    for gap in gaps[:_MAX_SENTENCES]:
        lines = f"line {gap.first} is" if gap.first == gap.last else f"lines {gap.first} to {gap.last} are"
        sentence = f"healthd events: {gap.key.node}: {lines} missing in stream {gap.key.stream_id}"
        status = write_error(sentence, REFUSED)
    if len(gaps) > _MAX_SENTENCES:
        write_error(f"healthd events: {len(gaps) - _MAX_SENTENCES:,} more such gaps")
    return max(status, reported.report_new(tally), reported.report_remaining())


class _ReportedProblems:
    """Reported read errors: each sentence once, as soon as it is known, at most _MAX_SENTENCES."""

    def __init__(self) -> None:
        self.sentences: set[str] = set()

    def report_new(self, tally: Tally) -> int:
        """Report new problems. Return the exit status."""
        for sentence in tally.problems:
            if sentence not in self.sentences:
                self.sentences.add(sentence)
                if len(self.sentences) <= _MAX_SENTENCES:
                    write_error(f"healthd events: {sentence}")
        return UNKNOWN if self.sentences else OK

    def report_remaining(self) -> int:
        more = len(self.sentences) - _MAX_SENTENCES
        return (
            write_error(f"healthd events: {more:,} more files or folders cannot be read", UNKNOWN) if more > 0 else OK
        )


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
