"""Times already read from a server or command, and those still to query: one rule for sacct, sacctmgr, Prometheus.

The times that were read are stored as spans. A rerun continues at the end of the last span, minus an overlap for late
records. --from adds earlier times that were never read. Nothing is queried twice, so the same command line, with or
without --from, reads only new data.
"""

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime, timezone

from healthd.events.sequence import Runs
from healthd.fleet.ingest import Run

_LATEST = 253_402_300_799  # the end of the year 9999


def text_of(read: Runs) -> str:
    """Return the spans as text: "100-200 300-400" (from, until)."""
    return " ".join(f"{first}-{last + 1}" for first, last in read)


def of_text(text: str) -> Runs:
    """Parse the spans from text."""
    read = Runs()
    for word in text.split():
        first, _, until = word.partition("-")
        if int(first) < int(until):
            read.add(int(first), int(until) - 1)
    return read


def until_of(read: Runs) -> int | None:
    """Return the end of the last span, or None."""
    return max((last + 1 for _, last in read), default=None)


def to_ask(read: Runs, begin: int | None, end: int, late: int, first: int) -> Iterator[tuple[int, int]]:
    """Yield the spans (from, until) to query, oldest first.

    begin: --from; None: continue at the end of the last span, or at `default_begin` if there is none. overlap: overlap
    in seconds with the end of the covered time.
    """
    until = until_of(read)
    if until is None:
        if (start := first if begin is None else begin) < end:
            yield start, end
        return
    start, tail = until - late if begin is None else begin, until - late
    for since, last in read.without(start, min(end, tail) - 1):
        yield since, last + 1
    if max(start, tail) < end:
        yield max(start, tail), end


def not_ahead(run: Run, read: Runs, whose: str) -> Runs:
    """Return the spans without times in the future, which a wrong clock caused.

    It is unknown how much of such a span had passed when it was read, so it is read again from its beginning.
    """
    until = until_of(read)
    if until is None or until <= run.now:
        return read
    said = datetime.fromtimestamp(min(until, _LATEST), timezone.utc)
    run.say(
        f"{run.source.name}: {whose}: according to the store it was read until {said:%Y-%m-%d %H:%M:%S} UTC, which is "
        "in the future: a clock was ahead; this period is read again"
    )
    return Runs((first, first if last >= run.now else last) for first, last in read if first < run.now)
