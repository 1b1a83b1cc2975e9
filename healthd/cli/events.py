"""`healthd events`: print nodes' event streams."""

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
        "--since", metavar="TIME", help="start: 2d, 30m, 2026-11-22 or 2026-11-22T13:00, optionally with Z or +01:00"
    )
    parser.add_argument("--until", metavar="TIME", help="end, in the same format")
    parser.add_argument("--code", metavar="GLOB", help="only events whose code matches, such as gpu_xid/*")
    parser.add_argument("--json", action="store_true", help="print the original lines (docs/events.md)")
    parser.add_argument("--follow", action="store_true", help="keep printing new events until Ctrl-C")
    parser.add_argument(
        "--state-dir", metavar="DIR", help="directory with this node's stream (default: from the settings)"
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

    waits = args.follow and any(map(os.path.isdir, places))  # a stream may be created in the directory later
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
    """Return epoch seconds for a duration before now, or for a date. A date without a time zone is local time."""
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
    """Selects events in a period, and the gaps that may contain such events.

    To evaluate gaps, the selection records each stream's line numbers before, in and after the period.
    """

    def __init__(self, since: float | None, until: float | None, code: str | None) -> None:
        self.since = -math.inf if since is None else since
        self.until = math.inf if until is None else until
        self.code = code
        self.before: dict[tuple[str, ...], int] = {}
        self.within: dict[tuple[str, ...], tuple[int, int]] = {}
        self.after: dict[tuple[str, ...], int] = {}

    def __call__(self, event: StreamEvent) -> bool:
        """Return True if the event is selected. Events with an unknown time are selected."""
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
        """Return True if the gap may contain lines from the selected period.

        After a clock change, early lines may come after later ones.
        """
        stream = gap.key[1:]
        first, last = self.within.get(stream, (math.inf, -math.inf))
        touches = gap.last >= first - 1 and gap.first <= last + 1
        return touches or self.before.get(stream, -1) < gap.first < self.after.get(stream, math.inf)


def _has_code(event: StreamEvent, pattern: str | None) -> bool:
    from fnmatch import fnmatchcase

    return pattern is None or fnmatchcase(str(event.fields.get("code", "")), pattern)


def _line(event: StreamEvent) -> str:
    """Return the original line. A line that is not ASCII was not written by healthd, and is returned with escapes."""
    import json

    text = event.line.decode("ascii") if event.line.isascii() else json.dumps(event.fields, separators=(",", ":"))
    return f"{text}\n"


def _or_none(lines: Iterator[str], tally: Tally) -> Iterator[str]:
    """Yield the lines. If there are none and all streams could be read, yield "no events"."""
    first = next(lines, None)
    if first is not None:
        yield first
    elif not tally.problems:
        yield "no events\n"
    yield from lines


def _is_output_open() -> bool:
    """Wait a moment. Return False if the reader of standard output has exited."""
    import select

    poll = select.poll()
    poll.register(sys.stdout.fileno(), 0)
    return not poll.poll(_POLL_MS)


def _report_problems(tally: Tally, cursor: Cursor, reported: _ReportedProblems, selection: _Selection) -> int:
    """Report unreadable and missing events, and return the exit status."""
    status = OK
    gaps = list(filter(selection.may_contain, cursor.sequences.gaps()))
    if tally.unknown:
        names = ", ".join(f"{name} ({count:,})" for name, count in sorted(tally.unknown.items()))
        write_error(f"healthd events: written by a newer healthd, shown unchanged: {names}")
    if tally.unread:
        more = f"; {tally.unread - 1:,} more such lines" if tally.unread > 1 else ""
        # If the daemon is killed, it may leave a truncated line. The daemon writes that line again, so its number is
        # present.
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
    """Reports each read error once, as soon as it occurs, up to _MAX_SENTENCES."""

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
        "Show what happened on this node: findings, decisions, actions and times when healthd did not run. DIR is one "
        "node's stream, or a directory with one subdirectory per node. Rotated and gzipped files are included. "
        "Duplicates are dropped.\n"
        "Exit status: 0 done, 1 events in the period are missing or unreadable, 3 a file or directory cannot be read, "
        "64 usage error.",
        "  healthd events --since 2d\n"
        "  healthd events --code 'gpu_*' --since 2026-11-01 --until 2026-11-08\n"
        "  healthd events --follow --json | jq -r .message\n"
        "  healthd events /srv/events\n",
    ),
}
