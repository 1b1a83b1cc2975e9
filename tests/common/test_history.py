"""history: previous readings of a check, and growth across wraparounds, resets and boots."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from healthd.common.history import (
    KEEP_SECONDS,
    MAX_INCREMENTS,
    History,
    Reading,
    Series,
    update,
    without_growth,
)
from healthd.common.model import Observation, ObservationKind

COUNTER, GAUGE = ObservationKind.COUNTER, ObservationKind.GAUGE


def counter(value: float, bits: int | None = None, port: str = "a") -> Observation:
    return Observation("errors_total", value, COUNTER, (("port", port),), bits)


def gauge(value: float) -> Observation:
    return Observation("action", value, GAUGE)


def after(*readings: Observation, apart: float = 100.0, boots: str = "") -> dict[str, Series]:
    """Return the store after these readings at 0, 100, 200, ... s, in these boots ("aab"; by default all "a")."""
    store: dict[str, Series] = {}
    for number, reading in enumerate(readings):
        store = update(store, [reading], number * apart, boots[number] if boots else "a")
    return store


def grew(readings: list[Observation], within: float, boots: str = "") -> float | None:
    """Return the growth up to the last of the readings, as a check queries it."""
    boots = boots or "a" * len(readings)
    store = after(*readings[:-1], boots=boots)
    return History(store, (len(readings) - 1) * 100.0, boots[-1]).growth(readings[-1], within)


def values(*counts: float, bits: int | None = None) -> list[Observation]:
    return [counter(count, bits) for count in counts]


def test_a_reading_that_is_older_than_asked_for_is_none():
    past = History(after(counter(1)), 100.0, "a")
    assert past.last(counter(2), within_seconds=100.0) == past.last(counter(2)) == Reading(1, 0.0)
    assert past.last(counter(2), within_seconds=99.9) is None


def test_the_first_sight_of_a_counter_is_no_growth():
    assert grew(values(500), 1000) == 0


def test_growth_is_counted_within_the_time_asked_for():
    assert grew(values(1, 4, 9, 9), 1000) == 8
    assert grew(values(1, 4, 9, 9), 150) == 5


def test_growth_within_no_time_is_that_since_the_last_reading():
    assert grew(values(1, 4, 9), 0) == 5
    assert grew(values(1, 4, 4), 0) == 0


def test_what_a_counter_shows_after_a_boot_is_no_growth():
    assert grew(values(1, 4), 1000, boots="ab") == 0


def test_a_counter_that_was_reset_grew_by_what_it_shows():
    assert grew(values(100, 3), 1000) == 3


@pytest.mark.parametrize(("counts", "expected"), [((250, 2), 8), ((100, 2), 2), ((254, 255), None)])
def test_a_narrow_counter_wraps_near_its_end_is_reset_elsewhere_and_unknown_where_it_sticks(counts, expected):
    assert grew(values(*counts, bits=8), 1000) == expected


def test_the_last_reading_of_a_gauge_is_kept_like_that_of_a_counter():
    past = History(after(gauge(4), gauge(1)), 200.0, "a")
    last = past.last(gauge(0))
    assert last is not None
    assert (last.value, last.time) == (1, 100.0)


def test_a_gauge_has_no_growth_kept():
    (series,) = after(gauge(1), gauge(5), gauge(2)).values()
    assert series.increments == ()


@pytest.mark.parametrize("reading", [gauge(0), counter(0)])
def test_another_boot_has_no_last_reading(reading):
    assert History(after(reading), 100.0, "b").last(reading) is None
    assert History({}, 100.0, "a").last(reading) is None


def test_the_last_reading_of_any_boot_is_had_where_it_is_asked_for():
    last = History(after(gauge(4)), 100.0, "b").last(gauge(5), any_boot=True)
    assert last is not None
    assert last.value == 4


def test_labels_tell_counters_apart():
    assert History(after(counter(5, port="b")), 100.0, "a").last(counter(9, port="a")) is None


def test_the_rate_is_growth_per_second_since_the_last_reading():
    past = History(after(counter(100)), 50.0, "a")
    assert past.rate(counter(200)) == 2
    assert History({}, 50.0, "a").rate(counter(200)) is None
    assert History(after(counter(100, 8)), 50.0, "a").rate(counter(255, 8)) is None


def test_what_is_no_longer_read_is_kept_for_two_days():
    store = after(counter(1))
    assert update(store, [], KEEP_SECONDS - 1, "a") == store
    assert update(store, [], KEEP_SECONDS + 1, "a") == {}


def test_a_part_that_was_repaired_has_no_growth_before_that_and_others_keep_theirs():
    store = update(after(*values(1, 4)), [counter(9, port="aa"), counter(3, port="b")], 100.0, "a")
    store = update(store, [counter(10, port="aa"), counter(5, port="b")], 200.0, "a")
    kept = without_growth(store, "a")
    assert [
        History(kept, 300.0, "a").growth(counter(n, port=p), 1000) for n, p in ((4, "a"), (10, "aa"), (6, "b"))
    ] == [*(0, 1, 3)]
    assert History(kept, 300.0, "a").growth(counter(6), 1000) == 2, "later growth counts"
    assert all(series.increments == () for series in without_growth(store, "").values())


@given(st.lists(st.integers(0, 50), min_size=2, max_size=3 * MAX_INCREMENTS))
def test_the_store_stays_bounded_and_loses_no_growth_of_the_window(steps):
    total, readings = 0, []
    for step in steps:
        total += step
        readings.append(counter(total))
    (series,) = after(*readings[:-1]).values()
    assert len(series.increments) <= MAX_INCREMENTS
    assert grew(readings, KEEP_SECONDS) == total - steps[0]
