"""Which times were read of what we ask ourselves, and which are to be asked: one rule for sacct, sacctmgr, Prometheus.

What was read is remembered as stretches of time. A rerun goes on at the end of the last, less what may still come late;
a --from adds what was never read since then; what was read is not asked again. So the same line, with --from or
without, reads only what is new.
"""

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime, timezone

from healthd.events.sequence import Runs
from healthd.fleet.ingest import Run

_LATEST = 253_402_300_799  # the end of the year 9999


def text_of(read: Runs) -> str:
    """ "100-200 300-400": from, until."""
    return " ".join(f"{first}-{last + 1}" for first, last in read)


def of_text(text: str) -> Runs:
    """Return the stretches of such a text."""
    read = Runs()
    for word in text.split():
        first, _, until = word.partition("-")
        if int(first) < int(until):
            read.add(int(first), int(until) - 1)
    return read


def until_of(read: Runs) -> int | None:
    """The end of the last stretch."""
    return max((last + 1 for _, last in read), default=None)


def to_ask(read: Runs, begin: int | None, end: int, late: int, first: int) -> Iterator[tuple[int, int]]:
    """(from, until), the oldest first. `begin`: --from; None: where the last reading ended, `first` if there is none.
    `late`: seconds before the end of what was read that are asked again."""
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
    """The same without what is not yet: a clock was ahead. How much of that stretch was over when it was asked for
    nobody knows, so that it is read anew from where it began."""
    until = until_of(read)
    if until is None or until <= run.now:
        return read
    said = datetime.fromtimestamp(min(until, _LATEST), timezone.utc)
    run.say(
        f"{run.source.name}: {whose}: the store says that it was read until {said:%Y-%m-%d %H:%M:%S} UTC, which is not "
        "yet: a clock was ahead, and this stretch is read anew"
    )
    return Runs((first, first if last >= run.now else last) for first, last in read if first < run.now)
