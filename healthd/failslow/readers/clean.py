"""Cleaning of one series: rows of a file become samples that are ordered, unique and positive, with the job's starts.
Pure functions.

A restart of the job is distinguished from rows that are only late. The decision about a row depends only on the rows
before it and the RESTART_RUN rows after it. Appended rows therefore change no earlier decision.
"""

from __future__ import annotations

import statistics
from array import array
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import compress, islice
from math import isfinite, nan
from operator import lt, sub

RUN = 8  # consecutive ascending rows that begin another attempt; fewer are late rows
LEAST_RUN = 3
GAP_INTERVALS = 60  # a restart takes this many usual intervals, and twice as long as any earlier gap
INTERVALS = 64  # the usual interval is the median of this many previous ones
FEWEST_INTERVALS = 8
LEAST, MOST = 1e-18, 1e18  # limits of an iteration's time in any unit; other values are errors in the file
SAME_STEP = 0.8  # of the intervals: the index then counts iterations, and a gap means missing rows

# Counters for all series of a file, as displayed.
MISSING, INFINITE, NOT_POSITIVE = "without a value", "with an infinite value", "with a value of zero or less"
NO_TIME = f"with a value that is not a time (below {LEAST:g}, or above {MOST:g})"
REPEATED, LATE, RESTARTS, NEGATIVE_PART = "repeated", "not in order", "restarts", "negative part"

Floats = Sequence[float]


@dataclass(frozen=True, slots=True)
class Raw:
    """One series with its rows in file order.

    value: NaN if missing. index: None if there is only the order of the rows. parts: busy, wait and transfer, as far as
    reported. regimes: None, or a name for each row. is_time: the index is known to be time.
    """

    value: array[float]
    index: array[float] | None = None
    parts: tuple[array[float], ...] = ()
    regimes: list[str] | None = None
    timed: bool = False


@dataclass(frozen=True, slots=True)
class Clean:
    """As RawSeries, but ordered, with values from MIN_VALUE to MAX_VALUE only.

    rows: position of each sample among the ordered rows of the series, including rows without a value; None if equal to
    the position of the sample. starts: as Series.starts.
    """

    value: Floats
    index: Floats
    parts: tuple[Floats, ...]
    regimes: Sequence[str] | None
    starts: tuple[int, ...]
    rows: Floats | None


def cleaned(raw: Raw, counts: Counter[str]) -> Clean:
    """Clean a series and count the problems under the names above."""
    value, index, parts, regimes = raw.value, raw.index, raw.parts, raw.regimes
    starts: tuple[int, ...] = (0,)
    if index is not None:
        if not all(map(lt, index, islice(index, 1, None))):
            order, starts = in_order(index, value, counts)
            value, index = _taken(value, order), _taken(index, order)
            parts = tuple(_taken(part, order) for part in parts)
            regimes = [regimes[row] for row in order] if regimes is not None else None
        starts = _with_gaps(index, starts, raw.timed)
        counts[RESTARTS] += len(starts) - 1
    rows: Floats | None = None
    if value and not (min(value) >= LEAST and sum(value) <= MOST):
        good = [_is_good(one, counts) for one in value]
        if not all(good):
            kept = list(compress(range(len(value)), good))
            rows = array("q", kept)
            value, index = _taken(value, kept), None if index is None else _taken(index, kept)
            parts = tuple(_taken(part, kept) for part in parts)
            regimes = [regimes[row] for row in kept] if regimes is not None else None
            starts = tuple(sorted({0, *(place for old in starts if (place := bisect_left(kept, old)) < len(kept))}))
    parts = tuple(_not_negative(part, counts) for part in parts)
    if index is not None:
        return Clean(value, index, parts, regimes, starts, rows)
    return Clean(value, range(len(value)) if rows is None else rows, parts, regimes, starts, rows)


def _taken(cells: array[float], places: Iterable[int]) -> array[float]:
    return array(cells.typecode, map(cells.__getitem__, places))


def _is_good(value: float, counts: Counter[str]) -> bool:
    if LEAST <= value <= MOST:
        return True
    if value != value:
        counts[MISSING] += 1
    elif not isfinite(value):
        counts[INFINITE] += 1
    else:
        counts[NOT_POSITIVE if value <= 0 else NO_TIME] += 1
    return False


def _not_negative(part: array[float], counts: Counter[str]) -> array[float]:
    """Replace negative or impossible parts by NaN."""
    if not part or (min(part) >= LEAST and sum(part) <= MOST):
        return part
    wrong = sum(one != 0 and (one < LEAST or one > MOST) for one in part)
    if not wrong:
        return part
    counts[NEGATIVE_PART] += wrong
    return array("d", [one if one == 0 or LEAST <= one <= MOST else nan for one in part])


# --- order and restarts


def in_order(index: Floats, value: Floats, counts: Counter[str]) -> tuple[list[int], tuple[int, ...]]:
    """Return the rows in order, and the positions at which the job started (always including 0).

    An index that falls back and continues over positions that already had other values is a restart from a checkpoint.
    A row with the index and value of an earlier row of its attempt is a repeat. Any other row is late: it is sorted,
    after rows with the same index.
    """
    order: list[int] = []
    starts = [0]
    attempt: list[int] = []
    seen: dict[float, list[float]] = {}
    late = False

    def end() -> None:
        if late:
            attempt.sort(key=index.__getitem__)  # stable sort
        order.extend(attempt)

    for row, place in enumerate(index):
        top = index[attempt[-1]] if attempt and not late else max(seen, default=place)
        if attempt and place < top and _goes_back(row, top, index, value, seen):
            end()
            starts.append(len(order))
            attempt, seen, late = [], {}, False
        elif _same(value[row], seen.get(place, ())):
            counts[REPEATED] += 1
            continue
        elif attempt and place < top:
            counts[LATE] += 1
            late = True
        attempt.append(row)
        seen.setdefault(place, []).append(value[row])
    end()
    return order, tuple(starts)


def _goes_back(row: int, top: float, index: Floats, value: Floats, seen: dict[float, list[float]]) -> bool:
    """Return True if another attempt begins at this row."""
    ahead = index[row : row + RUN]
    if len(ahead) < LEAST_RUN or not all(map(lt, ahead, ahead[1:])):
        return False
    passed = [place for place in ahead if place <= top]
    again = [(place, one) for place, one in zip(ahead, value[row : row + RUN], strict=True) if place in seen]
    others = sum(not _same(one, seen[place]) for place, one in again)
    return 2 * len(again) >= len(passed) and 2 * others > len(again)


def _same(value: float, seen: Sequence[float]) -> bool:
    return value in seen or (value != value and any(one != one for one in seen))


def _with_gaps(index: Floats, starts: tuple[int, ...], timed: bool) -> tuple[int, ...]:
    """Add starts after times without a sample that are longer than earlier pauses.

    An index that counts iterations (most of its intervals are the same) has no such gaps: rows are missing there.
    """
    if len(index) <= FEWEST_INTERVALS:
        return starts
    intervals = array("d", map(sub, islice(index, 1, None), index))
    if max(intervals) < GAP_INTERVALS * min(intervals):
        return starts
    found = set(starts)
    begin, longest = 0, 0.0
    for row, interval in enumerate(intervals, 1):
        if row in found:
            begin, longest = row, 0.0
            continue
        if interval > 2 * longest and row - begin > FEWEST_INTERVALS:
            before = intervals[max(begin, row - 1 - INTERVALS) : row - 1]
            usual = statistics.median(before)
            counting = not timed and sum(one == usual for one in before) >= SAME_STEP * len(before)
            if usual > 0 and interval >= GAP_INTERVALS * usual and not counting:
                found.add(row)
        longest = max(longest, interval)
    return tuple(sorted(found))


# --- units


FAR_ABOVE, FAR_BELOW = (
    10.0,
    1 / 200,
)  # units differ by 1000; overlapping parts are at most a few times the whole


def other_unit(value: Floats, parts: Sequence[Floats], whole: bool) -> str:
    """Return "above" or "below" if the sum of the parts is far from the value in most samples, otherwise "".

    The columns then have different units: no time can be spent ten times.

    Args:
        is_complete: the parts are meant to add up to the value.
    """
    shares = [sum(some) / one for one, *some in zip(value, *parts, strict=True) if all(map(isfinite, some))]
    if not shares:
        return ""
    usual = statistics.median(shares)
    if usual > FAR_ABOVE:
        return "above"
    return "below" if whole and 0 < usual < FAR_BELOW else ""
