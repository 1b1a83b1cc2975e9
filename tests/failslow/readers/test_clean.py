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


def clean_rows(
    index: list[float], value: list[float] | None = None, timed: bool = False
) -> tuple[CleanSeries, Counter[str]]:
    counts: Counter[str] = Counter()
    values = [1 + math.sin(place * 12.9898) / 7 for place in range(len(index))] if value is None else value
    return clean_series(RawSeries(array("d", values), array("d", index), is_time=timed), counts), counts


def test_ordered_rows_stay_unchanged():
    found, counts = clean_rows([*range(50)])
    assert (list(found.index), found.starts, found.rows, +counts) == ([*range(50)], (0,), None, Counter())


def test_late_rows_are_sorted():
    found, counts = clean_rows([0, 1, 5, 2, 3, 4, 6, 8, 7])
    assert (list(found.index), found.starts, counts[clean.LATE]) == ([*range(9)], (0,), 4)


@settings(max_examples=60, deadline=None)
@given(st.permutations(range(40)))
def test_permuted_rows_are_one_attempt(order):
    value = [1 + place / 100 for place in order]
    found, _ = clean_rows([*map(float, order)], value)
    assert (list(found.index), found.starts) == ([*range(40)], (0,))
    assert list(found.value) == sorted(value)


def test_repeated_rows_are_dropped():
    found, counts = clean_rows([0, 1, 1, 2, 3, 0, 1, 2, 3, 4], [1, 2, 2, 3, 4, 1, 2, 3, 4, 5])
    assert (list(found.value), found.starts, counts[clean.REPEATED]) == ([1, 2, 3, 4, 5], (0,), 5)


def test_different_samples_of_same_time_are_kept():
    found, counts = clean_rows([0, 0, 1, 1, 2], [1, 2, 3, 4, 5])
    assert (list(found.value), +counts) == ([1, 2, 3, 4, 5], Counter())


@pytest.mark.parametrize("back", [0, 60, 95, 97])
def test_falling_iteration_is_restart(back):
    index = [*range(100), *range(back, 150)]
    found, counts = clean_rows([*map(float, index)])
    assert (list(found.index), found.starts, counts[clean.RESTARTS]) == (index, (0, 100), 1)


def test_late_rows_stay_in_their_attempt():
    found, _ = clean_rows([0, 1, 3, 2, *range(4, 100), *range(50, 70), 71, 70, *range(72, 150)])
    assert (list(found.index), found.starts) == ([*range(100), *range(50, 150)], (0, 100))


def test_long_time_gap_is_restart_unless_it_recurs():
    steps = ([1.0, 1.1] * 25 + [100.0]) * 4  # the first pause counts as a restart, the following ones as pauses
    index = [sum(steps[:place]) for place in range(len(steps) + 1)]
    assert clean_rows(index, timed=True)[0].starts == (0, 51)
    restart = [*index, *(index[-1] + 5000 + place for place in range(50))]
    assert clean_rows(restart, timed=True)[0].starts == (0, 51, len(index))


def test_missing_iterations_are_no_restart():
    assert clean_rows([*range(100), *range(1000, 1100)])[0].starts == (0,)
    assert clean_rows([*range(100), *range(1000, 1100)], timed=True)[0].starts == (0, 100)


ROWS = st.lists(st.tuples(st.sampled_from((1, 1, 1, 1, 2, 90, 400, -30)), st.floats(0.5, 2)), min_size=30, max_size=150)


def rows_to_columns(rows: list[tuple[int, float]]) -> tuple[list[float], list[float]]:
    index, at = [], 1000
    for step, _ in rows:
        at += step
        index.append(float(at))
    return index, [value for _, value in rows]


@settings(max_examples=150, deadline=None)
@given(ROWS, st.integers(20, 150), st.booleans())
def test_appended_rows_change_no_earlier_sample(rows, count, timed):
    rows = [(abs(step), value) for step, value in rows]
    index, value = rows_to_columns(rows)
    whole, _ = clean_rows(index, value, timed)
    part, _ = clean_rows(index[:count], value[:count], timed)
    assert list(whole.value)[: len(part.value)] == list(part.value)
    assert tuple(start for start in whole.starts if start < len(part.value)) == part.starts


@settings(max_examples=150, deadline=None)
@given(ROWS, st.sampled_from((0.5, 4.0, 1024.0)), st.integers(-5000, 10**6))
def test_scale_and_shift_of_index_change_nothing(rows, scale, shift):
    index, value = rows_to_columns(rows)
    original, counts = clean_rows(index, value)
    scaled, scaled_counts = clean_rows([place * scale + shift for place in index], value)
    assert (list(original.value), original.starts, counts) == (list(scaled.value), scaled.starts, scaled_counts)


@settings(max_examples=100, deadline=None)
@given(ROWS)
def test_only_repeats_are_lost(rows):
    index, value = rows_to_columns(rows)
    found, counts = clean_rows(index, value)
    assert len(found.value) + counts[clean.REPEATED] == len(value)
    assert set(found.value) == set(value)
    bounds = [*found.starts, len(found.index)]
    for begin, end in pairwise(bounds):
        assert list(found.index[begin:end]) == sorted(found.index[begin:end])


def test_starts_stay_with_samples_if_values_are_missing():
    value = [1.0] * 10 + [math.nan, 1.5] + [1.25 + place / 100 for place in range(20)]
    found, _ = clean_rows([*range(10), *range(22)], value)
    assert (found.starts, list(found.rows or ())[9:12]) == ((0, 10), [9, 11, 12])


# --- times

ISO = st.datetimes(min_value=datetime(1971, 1, 1))


@settings(max_examples=100, deadline=None)
@given(ISO, st.sampled_from("T "), st.sampled_from(("", "Z", "+01:00", "-0530", "+09")), st.sampled_from((0, 3, 6)))
def test_format_time_restores_text(when, separator, zone, digits):
    if when.year > 2100:
        when = when.replace(year=2026, day=min(when.day, 28))
    fraction = f".{when.microsecond:06}"[: digits + 1] if digits else ""
    text = f"{when:%Y-%m-%d}{separator}{when:%H:%M:%S}{fraction}{zone}"
    style, seconds = times.detect_style(text), times.parse_seconds(text)
    assert style is not None
    assert seconds is not None
    assert times.format_time(seconds, style) == text


@pytest.mark.parametrize(
    "text", ["", "now", "12", "2026-13-01", "2026-02-30T10:00:00", "2026-01-01T25:00:00", "2026-01-01T10:00:75"]
)
def test_invalid_time_is_none(text):
    assert times.parse_seconds(text) is None
    assert times.detect_style(text) is None
