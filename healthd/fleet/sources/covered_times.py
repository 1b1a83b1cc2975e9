"""Determines which times were read from a server or command, and which still need a query.

sacct, sacctmgr and Prometheus share this rule. Times that were read are stored as spans. A rerun continues shortly
before the end of the last span; this overlap finds late records. --from adds earlier times that were never read. Apart
from the overlap, nothing is queried twice. The same command line can therefore be repeated, with or without --from, and
reads only new data.
"""

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime, timezone

from healthd.events.sequence import Runs
from healthd.fleet.ingest import Run

_LATEST = 253_402_300_799  # the end of the year 9999


def format_spans(read: Runs) -> str:
    """Return the spans as text: "100-200 300-400" (from, until)."""
    return " ".join(f"{first}-{last + 1}" for first, last in read)


def parse_spans(text: str) -> Runs:
    """Parse the spans from text."""
    read = Runs()
    for word in text.split():
        first, _, until = word.partition("-")
        if int(first) < int(until):
            read.add(int(first), int(until) - 1)
    return read


def latest_end(read: Runs) -> int | None:
    """Return the end of the last span, or None."""
    return max((last + 1 for _, last in read), default=None)


def uncovered_spans(
    read: Runs, begin: int | None, end: int, overlap: int, default_begin: int
) -> Iterator[tuple[int, int]]:
    """Yield the spans (from, until) to query, oldest first.

    Args:
        begin: --from, or None to continue at the end of the last span (at `default_begin` if there is none).
        overlap: number of seconds before the end of the covered time that are queried again.
    """
    until = latest_end(read)
    if until is None:
        if (start := default_begin if begin is None else begin) < end:
            yield start, end
        return
    start, tail = until - overlap if begin is None else begin, until - overlap
    for since, last in read.without(start, min(end, tail) - 1):
        yield since, last + 1
    if max(start, tail) < end:
        yield max(start, tail), end


def without_future(run: Run, read: Runs, name: str) -> Runs:
    """Remove spans that extend into the future. They come from a wrong clock.

    The whole span is read again, because it is unknown which part was already past when the span was read.
    """
    until = latest_end(read)
    if until is None or until <= run.now:
        return read
    read_until = datetime.fromtimestamp(min(until, _LATEST), timezone.utc)
    run.log(
        f"{run.source.name}: {name}: according to the store, it was read until {read_until:%Y-%m-%d %H:%M:%S} UTC, "
        "which is in the future: a clock was ahead. This period is read again"
    )
    return Runs((first, first if last >= run.now else last) for first, last in read if first < run.now)
