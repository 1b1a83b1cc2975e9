"""Tests of cleaning rows into samples: order, repeats, restarts, and appended rows."""

from __future__ import annotations

import math
from array import array
from collections import Counter
from datetime import datetime
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from healthd.failslow import times
from healthd.failslow.readers import clean
from healthd.failslow.readers.clean import CleanSeries, RawSeries, clean_series


def of(index: list[float], value: list[float] | None = None, timed: bool = False) -> tuple[CleanSeries, Counter[str]]:
    counts: Counter[str] = Counter()
    values = [1 + math.sin(place * 12.9898) / 7 for place in range(len(index))] if value is None else value
    return clean_series(RawSeries(array("d", values), array("d", index), is_time=timed), counts), counts


def test_what_is_in_order_stays_as_it_is():
    found, counts = of([*range(50)])
    assert (list(found.index), found.starts, found.rows, +counts) == ([*range(50)], (0,), None, Counter())


def test_late_rows_are_put_in_their_places():
    found, counts = of([0, 1, 5, 2, 3, 4, 6, 8, 7])
    assert (list(found.index), found.starts, counts[clean.LATE]) == ([*range(9)], (0,), 4)


@settings(max_examples=60, deadline=None)
@given(st.permutations(range(40)))
def test_rows_in_any_order_are_one_attempt(order):
    value = [1 + place / 100 for place in order]
    found, _ = of([*map(float, order)], value)
    assert (list(found.index), found.starts) == ([*range(40)], (0,))
    assert list(found.value) == sorted(value)


def test_rows_that_repeat_are_left_out():
    found, counts = of([0, 1, 1, 2, 3, 0, 1, 2, 3, 4], [1, 2, 2, 3, 4, 1, 2, 3, 4, 5])
    assert (list(found.value), found.starts, counts[clean.REPEATED]) == ([1, 2, 3, 4, 5], (0,), 5)


def test_other_samples_of_the_same_time_are_kept():
    found, counts = of([0, 0, 1, 1, 2], [1, 2, 3, 4, 5])
    assert (list(found.value), +counts) == ([1, 2, 3, 4, 5], Counter())


@pytest.mark.parametrize("back", [0, 60, 95, 97])
def test_an_iteration_that_falls_back_is_a_restart(back):
    index = [*range(100), *range(back, 150)]
    found, counts = of([*map(float, index)])
    assert (list(found.index), found.starts, counts[clean.RESTARTS]) == (index, (0, 100), 1)


def test_late_rows_of_an_attempt_stay_in_it():
    found, _ = of([0, 1, 3, 2, *range(4, 100), *range(50, 70), 71, 70, *range(72, 150)])
    assert (list(found.index), found.starts) == ([*range(100), *range(50, 150)], (0, 100))


def test_a_long_gap_of_time_is_a_restart_and_a_pause_that_comes_again_is_none():
    steps = ([1.0, 1.1] * 25 + [100.0]) * 4  # the first pause counts as a restart, the following ones as pauses
    index = [sum(steps[:place]) for place in range(len(steps) + 1)]
    assert of(index, timed=True)[0].starts == (0, 51)
    restart = [*index, *(index[-1] + 5000 + place for place in range(50))]
    assert of(restart, timed=True)[0].starts == (0, 51, len(index))


def test_iterations_that_are_lacking_are_no_restart():
    assert of([*range(100), *range(1000, 1100)])[0].starts == (0,)
    assert of([*range(100), *range(1000, 1100)], timed=True)[0].starts == (0, 100)


ROWS = st.lists(st.tuples(st.sampled_from((1, 1, 1, 1, 2, 90, 400, -30)), st.floats(0.5, 2)), min_size=30, max_size=150)


def walked(rows: list[tuple[int, float]]) -> tuple[list[float], list[float]]:
    index, at = [], 1000
    for step, _ in rows:
        at += step
        index.append(float(at))
    return index, [value for _, value in rows]


@settings(max_examples=150, deadline=None)
@given(ROWS, st.integers(20, 150), st.booleans())
def test_rows_that_are_appended_in_order_change_nothing_before(rows, count, timed):
    rows = [(abs(step), value) for step, value in rows]
    index, value = walked(rows)
    whole, _ = of(index, value, timed)
    part, _ = of(index[:count], value[:count], timed)
    assert list(whole.value)[: len(part.value)] == list(part.value)
    assert tuple(start for start in whole.starts if start < len(part.value)) == part.starts


@settings(max_examples=150, deadline=None)
@given(ROWS, st.sampled_from((0.5, 4.0, 1024.0)), st.integers(-5000, 10**6))
def test_scale_and_shift_of_the_index_change_nothing(rows, scale, shift):
    index, value = walked(rows)
    one, counts = of(index, value)
    other, others = of([place * scale + shift for place in index], value)
    assert (list(one.value), one.starts, counts) == (list(other.value), other.starts, others)


@settings(max_examples=100, deadline=None)
@given(ROWS)
def test_no_sample_is_lost_but_repeats(rows):
    index, value = walked(rows)
    found, counts = of(index, value)
    assert len(found.value) + counts[clean.REPEATED] == len(value)
    assert set(found.value) == set(value)
    bounds = [*found.starts, len(found.index)]
    for begin, end in pairwise(bounds):
        assert list(found.index[begin:end]) == sorted(found.index[begin:end])


def test_starts_stay_with_their_samples_where_values_are_missing():
    value = [1.0] * 10 + [math.nan, 1.5] + [1.25 + place / 100 for place in range(20)]
    found, _ = of([*range(10), *range(22)], value)
    assert (found.starts, list(found.rows or ())[9:12]) == ((0, 10), [9, 11, 12])


# --- times

ISO = st.datetimes(min_value=datetime(1971, 1, 1))


@settings(max_examples=100, deadline=None)
@given(ISO, st.sampled_from("T "), st.sampled_from(("", "Z", "+01:00", "-0530", "+09")), st.sampled_from((0, 3, 6)))
def test_a_time_is_told_as_it_stood(when, separator, zone, digits):
    if when.year > 2100:
        when = when.replace(year=2026, day=min(when.day, 28))
    fraction = f".{when.microsecond:06}"[: digits + 1] if digits else ""
    text = f"{when:%Y-%m-%d}{separator}{when:%H:%M:%S}{fraction}{zone}"
    how, since = times.detect_style(text), times.parse_seconds(text)
    assert how is not None
    assert since is not None
    assert times.format_time(since, how) == text


@pytest.mark.parametrize(
    "text", ["", "now", "12", "2026-13-01", "2026-02-30T10:00:00", "2026-01-01T25:00:00", "2026-01-01T10:00:75"]
)
def test_what_is_no_time_is_none(text):
    assert times.parse_seconds(text) is None
    assert times.detect_style(text) is None
