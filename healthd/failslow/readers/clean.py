"""Cleans a series: turns a file's rows into ordered, unique, positive samples, and finds the job's starts.

All functions are pure.

Rows after a job restart must be distinguished from rows that were only written late. The decision about a row depends
only on the rows before it and on the RESTART_RUN rows after it. Rows that are appended later therefore never change it.
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

RESTART_RUN = 8  # this number of consecutive ascending rows begins another attempt; a shorter run is late rows
MIN_RESTART_RUN = 3
GAP_INTERVALS = 60  # a gap is a restart if it lasts this many usual intervals, and twice as long as any earlier gap
INTERVALS = 64  # the usual interval is the median of this many previous intervals
MIN_INTERVALS = 8
MIN_VALUE, MAX_VALUE = 1e-18, 1e18  # limits for an iteration's time in any unit; other values are errors in the file
# if at least this share of intervals is equal, the index counts iterations, and a gap means missing rows
SAME_STEP = 0.8

# Names of the counters of problems in a file, as displayed.
MISSING, INFINITE, NOT_POSITIVE = "without a value", "with an infinite value", "with a value of zero or less"
NO_TIME = f"with a value that is not a time (below {MIN_VALUE:g} or above {MAX_VALUE:g})"
REPEATED, LATE, RESTARTS, NEGATIVE_PART = "repeated", "not in order", "restarts", "negative part"

Floats = Sequence[float]


@dataclass(frozen=True, slots=True)
class RawSeries:
    """One series with its rows in file order.

    Attributes:
        value: NaN if missing.
        index: None if only the order of the rows is known.
        parts: the reported times among busy, wait and transfer.
        regimes: None, or a name for each row.
        is_time: True if the index is known to be a time.
    """

    value: array[float]
    index: array[float] | None = None
    parts: tuple[array[float], ...] = ()
    regimes: list[str] | None = None
    is_time: bool = False


@dataclass(frozen=True, slots=True)
class CleanSeries:
    """Like RawSeries, but in order and only with values from MIN_VALUE to MAX_VALUE.

    Attributes:
        rows: position of each sample among all ordered rows of the series, including rows without a value; None if
            these positions are the samples' own.
        starts: as in Series.
    """

    value: Floats
    index: Floats
    parts: tuple[Floats, ...]
    regimes: Sequence[str] | None
    starts: tuple[int, ...]
    rows: Floats | None


def clean_series(raw: RawSeries, counts: Counter[str]) -> CleanSeries:
    """Clean a series, and count the problems in its rows under the names above."""
    value, index, parts, regimes = raw.value, raw.index, raw.parts, raw.regimes
    starts: tuple[int, ...] = (0,)
    if index is not None:
        if not all(map(lt, index, islice(index, 1, None))):
            order, starts = sort_rows(index, value, counts)
            value, index = _select(value, order), _select(index, order)
            parts = tuple(_select(part, order) for part in parts)
            regimes = [regimes[row] for row in order] if regimes is not None else None
        starts = _add_gap_starts(index, starts, raw.is_time)
        counts[RESTARTS] += len(starts) - 1
    rows: Floats | None = None
    if value and not (min(value) >= MIN_VALUE and sum(value) <= MAX_VALUE):
        valid = [_is_valid(sample, counts) for sample in value]
        if not all(valid):
            valid_rows = list(compress(range(len(value)), valid))
            rows = array("q", valid_rows)
            value, index = _select(value, valid_rows), None if index is None else _select(index, valid_rows)
            parts = tuple(_select(part, valid_rows) for part in parts)
            regimes = [regimes[row] for row in valid_rows] if regimes is not None else None
            starts = tuple(
                sorted(
                    {0, *(position for old in starts if (position := bisect_left(valid_rows, old)) < len(valid_rows))}
                )
            )
    parts = tuple(_mask_invalid(part, counts) for part in parts)
    if index is not None:
        return CleanSeries(value, index, parts, regimes, starts, rows)
    return CleanSeries(value, range(len(value)) if rows is None else rows, parts, regimes, starts, rows)


def _select(cells: array[float], rows: Iterable[int]) -> array[float]:
    return array(cells.typecode, map(cells.__getitem__, rows))


def _is_valid(value: float, counts: Counter[str]) -> bool:
    if MIN_VALUE <= value <= MAX_VALUE:
        return True
    if value != value:
        counts[MISSING] += 1
    elif not isfinite(value):
        counts[INFINITE] += 1
    else:
        counts[NOT_POSITIVE if value <= 0 else NO_TIME] += 1
    return False


def _mask_invalid(part: array[float], counts: Counter[str]) -> array[float]:
    """Replace negative or impossible parts with NaN."""
    if not part or (min(part) >= MIN_VALUE and sum(part) <= MAX_VALUE):
        return part
    invalid_count = sum(sample != 0 and (sample < MIN_VALUE or sample > MAX_VALUE) for sample in part)
    if not invalid_count:
        return part
    counts[NEGATIVE_PART] += invalid_count
    return array("d", [sample if sample == 0 or MIN_VALUE <= sample <= MAX_VALUE else nan for sample in part])


# --- order and restarts


def sort_rows(index: Floats, value: Floats, counts: Counter[str]) -> tuple[list[int], tuple[int, ...]]:
    """Return the rows in order, and the positions at which the job started (always including 0).

    If the index falls back and runs again over positions that already had other values, the job restarted from a
    checkpoint (a new attempt). A row with the same index and value as an earlier row of its attempt is a repeat. Any
    other row whose index falls back is late, and is sorted after rows with the same index.
    """
    order: list[int] = []
    starts = [0]
    attempt: list[int] = []
    values_by_position: dict[float, list[float]] = {}
    has_late_rows = False

    def end_attempt() -> None:
        if has_late_rows:
            attempt.sort(key=index.__getitem__)  # stable sort
        order.extend(attempt)

    for row, position in enumerate(index):
        highest = index[attempt[-1]] if attempt and not has_late_rows else max(values_by_position, default=position)
        if attempt and position < highest and _is_restart(row, highest, index, value, values_by_position):
            end_attempt()
            starts.append(len(order))
            attempt, values_by_position, has_late_rows = [], {}, False
        elif _has_value(value[row], values_by_position.get(position, ())):
            counts[REPEATED] += 1
            continue
        elif attempt and position < highest:
            counts[LATE] += 1
            has_late_rows = True
        attempt.append(row)
        values_by_position.setdefault(position, []).append(value[row])
    end_attempt()
    return order, tuple(starts)


def _is_restart(
    row: int, highest: float, index: Floats, value: Floats, values_by_position: dict[float, list[float]]
) -> bool:
    """Return True if another attempt begins at this row."""
    ahead = index[row : row + RESTART_RUN]
    if len(ahead) < MIN_RESTART_RUN or not all(map(lt, ahead, ahead[1:])):
        return False
    passed = [position for position in ahead if position <= highest]
    repeated = [
        (position, sample)
        for position, sample in zip(ahead, value[row : row + RESTART_RUN], strict=True)
        if position in values_by_position
    ]
    changed = sum(not _has_value(sample, values_by_position[position]) for position, sample in repeated)
    return 2 * len(repeated) >= len(passed) and 2 * changed > len(repeated)


def _has_value(value: float, earlier: Sequence[float]) -> bool:
    return value in earlier or (value != value and any(other != other for other in earlier))


def _add_gap_starts(index: Floats, starts: tuple[int, ...], is_time: bool) -> tuple[int, ...]:
    """Add starts after gaps that are longer than earlier pauses.

    If the index counts iterations (most of its intervals are equal), a gap is not a restart: rows are missing.
    """
    if len(index) <= MIN_INTERVALS:
        return starts
    intervals = array("d", map(sub, islice(index, 1, None), index))
    if max(intervals) < GAP_INTERVALS * min(intervals):
        return starts
    found = set(starts)
    begin, longest_interval = 0, 0.0
    for row, interval in enumerate(intervals, 1):
        if row in found:
            begin, longest_interval = row, 0.0
            continue
        if interval > 2 * longest_interval and row - begin > MIN_INTERVALS:
            before = intervals[max(begin, row - 1 - INTERVALS) : row - 1]
            usual = statistics.median(before)
            is_counter = not is_time and sum(earlier == usual for earlier in before) >= SAME_STEP * len(before)
            if usual > 0 and interval >= GAP_INTERVALS * usual and not is_counter:
                found.add(row)
        longest_interval = max(longest_interval, interval)
    return tuple(sorted(found))


# --- units


FAR_ABOVE, FAR_BELOW = (
    10.0,
    1 / 200,
    # different units differ by a factor of 1000; parts in the same unit, even overlapping, are at most a few times the
    # whole
)


def unit_mismatch(value: Floats, parts: Sequence[Floats], is_complete: bool) -> str:
    """Return "above" or "below" if the sum of the parts is far from the value in most samples, otherwise "".

    The parts then have another unit than the value, because their sum cannot be ten times the whole.

    Args:
        is_complete: True if the parts should add up to the value.
    """
    shares = [
        sum(part_values) / total
        for total, *part_values in zip(value, *parts, strict=True)
        if all(map(isfinite, part_values))
    ]
    if not shares:
        return ""
    usual = statistics.median(shares)
    if usual > FAR_ABOVE:
        return "above"
    return "below" if is_complete and 0 < usual < FAR_BELOW else ""
