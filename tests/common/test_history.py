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


def store_after(*readings: Observation, interval: float = 100.0, boots: str = "") -> dict[str, Series]:
    """Return the store after these readings at 0, 100, 200, ... s, in these boots ("aab"; by default all "a")."""
    store: dict[str, Series] = {}
    for number, reading in enumerate(readings):
        store = update(store, [reading], number * interval, boots[number] if boots else "a")
    return store


def growth_of(readings: list[Observation], within: float, boots: str = "") -> float | None:
    """Return the growth up to the last of the readings, as a check queries it."""
    boots = boots or "a" * len(readings)
    store = store_after(*readings[:-1], boots=boots)
    return History(store, (len(readings) - 1) * 100.0, boots[-1]).growth(readings[-1], within)


def values(*counts: float, bits: int | None = None) -> list[Observation]:
    return [counter(count, bits) for count in counts]


def test_last_ignores_reading_older_than_limit():
    past = History(store_after(counter(1)), 100.0, "a")
    assert past.last(counter(2), within_seconds=100.0) == past.last(counter(2)) == Reading(1, 0.0)
    assert past.last(counter(2), within_seconds=99.9) is None


def test_growth_of_first_reading_is_zero():
    assert growth_of(values(500), 1000) == 0


def test_growth_is_limited_to_the_given_time():
    assert growth_of(values(1, 4, 9, 9), 1000) == 8
    assert growth_of(values(1, 4, 9, 9), 150) == 5


def test_growth_within_zero_seconds_is_that_since_last_reading():
    assert growth_of(values(1, 4, 9), 0) == 5
    assert growth_of(values(1, 4, 4), 0) == 0


def test_growth_ignores_counter_value_after_boot():
    assert growth_of(values(1, 4), 1000, boots="ab") == 0


def test_growth_of_reset_counter_is_its_new_value():
    assert growth_of(values(100, 3), 1000) == 3


@pytest.mark.parametrize(("counts", "expected"), [((250, 2), 8), ((100, 2), 2), ((254, 255), None)])
def test_growth_of_narrow_counter_handles_wraparound_reset_and_maximum(counts, expected):
    assert growth_of(values(*counts, bits=8), 1000) == expected


def test_last_returns_reading_of_gauge():
    past = History(store_after(gauge(4), gauge(1)), 200.0, "a")
    last = past.last(gauge(0))
    assert last is not None
    assert (last.value, last.time) == (1, 100.0)


def test_update_keeps_no_growth_of_gauge():
    (series,) = store_after(gauge(1), gauge(5), gauge(2)).values()
    assert series.increments == ()


@pytest.mark.parametrize("reading", [gauge(0), counter(0)])
def test_last_returns_none_after_boot(reading):
    assert History(store_after(reading), 100.0, "b").last(reading) is None
    assert History({}, 100.0, "a").last(reading) is None


def test_last_returns_reading_of_any_boot_on_request():
    last = History(store_after(gauge(4)), 100.0, "b").last(gauge(5), any_boot=True)
    assert last is not None
    assert last.value == 4


def test_last_distinguishes_labels():
    assert History(store_after(counter(5, port="b")), 100.0, "a").last(counter(9, port="a")) is None


def test_rate_is_growth_per_second_since_last_reading():
    past = History(store_after(counter(100)), 50.0, "a")
    assert past.rate(counter(200)) == 2
    assert History({}, 50.0, "a").rate(counter(200)) is None
    assert History(store_after(counter(100, 8)), 50.0, "a").rate(counter(255, 8)) is None


def test_update_keeps_unread_series_for_two_days():
    store = store_after(counter(1))
    assert update(store, [], KEEP_SECONDS - 1, "a") == store
    assert update(store, [], KEEP_SECONDS + 1, "a") == {}


def test_without_growth_clears_only_the_repaired_part():
    store = update(store_after(*values(1, 4)), [counter(9, port="aa"), counter(3, port="b")], 100.0, "a")
    store = update(store, [counter(10, port="aa"), counter(5, port="b")], 200.0, "a")
    store_after_repair = without_growth(store, "a")
    assert [
        History(store_after_repair, 300.0, "a").growth(counter(n, port=p), 1000)
        for n, p in ((4, "a"), (10, "aa"), (6, "b"))
    ] == [*(0, 1, 3)]
    assert History(store_after_repair, 300.0, "a").growth(counter(6), 1000) == 2, "later growth counts"
    assert all(series.increments == () for series in without_growth(store, "").values())


@given(st.lists(st.integers(0, 50), min_size=2, max_size=3 * MAX_INCREMENTS))
def test_store_is_bounded_and_keeps_growth_of_the_window(steps):
    total, readings = 0, []
    for step in steps:
        total += step
        readings.append(counter(total))
    (series,) = store_after(*readings[:-1]).values()
    assert len(series.increments) <= MAX_INCREMENTS
    assert growth_of(readings, KEEP_SECONDS) == total - steps[0]
