"""Tests of the period of a counter's rate, on simulated rates with a known answer (bench/failslow/counters.py)."""

from __future__ import annotations

import math
import random
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from healthd.failslow.detect import Detector
from healthd.failslow.live.iterations import (
    MAX_PERIOD,
    MIN_PERIOD,
    OCTAVES,
    WINDOW,
    Iteration,
    Iterations,
    autocorrelation,
    detectable_periods,
    find_rhythm,
)

sys.path.insert(0, str(Path(__file__).parents[3] / "bench"))
from failslow import counters

FLOATS = st.floats(allow_nan=True, allow_infinity=True)


def made(period: float, count: int = WINDOW, noise: float = 0.1, micro: int = 1, seed: int = 1) -> list[float]:
    rng = random.Random(seed)
    return counters.noisy(rng, counters.bursts(rng, count, period, 0.3, 0.02, micro), noise)


@pytest.mark.parametrize("period", [20.5, 23, 28.3, 34, 39.7])
@pytest.mark.parametrize("micro", [1, 4])
def test_the_period_is_that_of_the_iterations_to_two_percent(period: float, micro: int) -> None:
    found = find_rhythm(made(period, micro=micro))
    assert found is not None
    assert found.period == pytest.approx(period, rel=0.02)
    assert 0.5 <= found.strength <= 1


@pytest.mark.parametrize("seed", range(20))
def test_what_has_no_rhythm_has_no_period(seed: int) -> None:
    for signal in counters.no_training(random.Random(seed), WINDOW, 0.1):
        assert find_rhythm(signal.rate) is None, signal.kind


@pytest.mark.parametrize("period", [0.3, 0.97, 1.04, 2.1, 3.1, 5, 9.7, 12, 18])
def test_a_rhythm_that_is_too_quick_is_told_as_none_and_not_by_its_multiple(period: float) -> None:
    assert find_rhythm(made(period, noise=0.02)) is None


def test_a_rhythm_that_is_too_slow_for_the_window_is_none() -> None:
    assert find_rhythm(made(3 * MAX_PERIOD, noise=0.02)) is None


def test_micro_batches_that_are_all_alike_are_a_rhythm_of_their_own() -> None:
    found = find_rhythm(made(24, noise=0.02))
    assert found is not None
    assert found.period == pytest.approx(24, rel=0.02)


def test_a_period_that_doubled_is_not_taken_for_the_one_before_it() -> None:
    found = find_rhythm(made(42, noise=0.1), near=21)
    assert found is not None
    assert found.period == pytest.approx(42, rel=0.03)


def test_fewer_samples_than_a_window_tell_nothing() -> None:
    assert find_rhythm(made(25)[:-1]) is None


@pytest.mark.parametrize("rates", [[0.0] * WINDOW, [7e18] * WINDOW, [math.nan] * WINDOW, [math.inf] * WINDOW])
def test_rates_that_do_not_vary_or_are_no_numbers_have_none(rates: list[float]) -> None:
    assert find_rhythm(rates) is None


@settings(deadline=None, max_examples=60)
@given(st.lists(FLOATS, min_size=WINDOW, max_size=WINDOW + 5), st.none() | st.floats(1, 100))
def test_any_rates_have_a_period_between_the_bounds_or_none(rates: list[float], near: float | None) -> None:
    found = find_rhythm(rates, near)
    if found is not None:
        assert MIN_PERIOD - 1 <= found.period <= MAX_PERIOD + 1
        assert 0 < found.strength <= 1


@settings(deadline=None, max_examples=30)
@given(st.floats(20.5, 40), st.floats(1e-6, 1e12), st.integers(0, 2**16))
def test_a_rhythm_does_not_depend_on_what_is_counted(period: float, unit: float, seed: int) -> None:
    rates = made(period, noise=0.05, seed=seed)
    one, other = find_rhythm(rates), find_rhythm([rate * unit for rate in rates])
    assert one is not None
    assert other is not None
    assert other.period == pytest.approx(one.period, rel=1e-6)


def test_the_autocorrelation_does_not_shrink_with_the_lag() -> None:
    """For a pure rhythm it is 1 at each multiple of the period; a biased estimate would be (L-k)/L."""
    found = autocorrelation([math.sin(2 * math.pi * at / 32) for at in range(WINDOW)], 4 * 32)
    assert found is not None
    assert [found[lag] for lag in (32, 64, 96, 128)] == pytest.approx([1, 1, 1, 1], abs=1e-9)


# --- iteration times from counter readings


def read(rates: list[float], seconds: float, seed: int = 1, missed: float = 0.0, late: float = 0.0) -> list[Iteration]:
    rng, iterations, found, count = random.Random(seed), Iterations(seconds), list[Iteration](), 0.0
    for at, rate in enumerate(rates):
        count += rate
        if rng.random() >= missed:
            found += iterations.add((at + rng.uniform(0, late)) * seconds, count * 1000)
    return found


@pytest.mark.parametrize("period_seconds", [2.5, 4.3, 7.0, 15.0, 30.0])
def test_iterations_of_any_length_are_found_in_some_octave(period_seconds: float) -> None:
    rates = made(period_seconds / 0.1, count=int(60 * period_seconds / 0.1))
    found = read(rates, 0.1, missed=0.02, late=0.3)
    assert len(found) >= 5
    assert [one.seconds for one in found] == pytest.approx([period_seconds] * len(found), rel=0.03)
    assert [one.time for one in found] == sorted(one.time for one in found)


@pytest.mark.parametrize("slower", [1.15, 1.3, 1.8, 2.6])
def test_iterations_that_get_longer_are_slow_from_then_on(slower: float) -> None:
    rng, half = random.Random(4), 9000
    rates = counters.bursts(rng, half, 30, 0.3, 0.02) + counters.bursts(rng, 2 * half, 30 * slower, 0.3 / slower, 0.02)
    found = read(counters.noisy(rng, rates, 0.1), 0.1)
    detector = Detector()
    for one in found:
        detector.add(one.seconds)
    (point,) = detector.points
    assert point.slowdown == pytest.approx(slower - 1, rel=0.1)
    assert 0.1 * half <= found[point.onset_index].time <= 0.1 * half + 150
    assert found[point.alarm_index].time <= 0.1 * half + 600


def test_a_steady_job_with_evaluations_and_checkpoints_is_not_slow() -> None:
    rng = random.Random(5)
    rates = []
    for number in range(40):
        rates += counters.bursts(rng, 900, 26, 0.3, 0.02)
        rates += counters.bursts(rng, 90, 9, 0.4, 0.05) if number % 2 else [0.0] * 60 + [4.0] * 20
    detector = Detector()
    found = read(counters.noisy(rng, rates, 0.1), 0.1)
    for one in found:
        detector.add(one.seconds)
    assert len(found) > 200
    assert detector.points == []


def test_one_window_alone_says_nothing() -> None:
    assert read(made(25, count=WINDOW + 5), 0.1) == []


@pytest.mark.parametrize("broken", ["back", "clock", "hole"])
def test_a_counter_or_a_clock_that_goes_back_and_a_hole_begin_anew(broken: str) -> None:
    iterations, rates = Iterations(0.1), made(25, count=1200)
    found, count = list[Iteration](), 0.0
    for at, rate in enumerate(rates):
        count += rate
        found += iterations.add(at * 0.1, count)
    assert found
    assert iterations.period_seconds() == pytest.approx(2.5, rel=0.03)
    at, now = (1200 * 0.1, count - 5) if broken == "back" else (0.1, count) if broken == "clock" else (300.0, count)
    assert list(iterations.add(at, now)) == []
    assert iterations.period_seconds() is None


@settings(deadline=None, max_examples=60)
@given(st.lists(st.tuples(FLOATS, FLOATS), max_size=60))
def test_any_readings_are_taken(readings: list[tuple[float, float]]) -> None:
    iterations = Iterations(0.1)
    for time, count in readings:
        assert all(one.seconds > 0 for one in iterations.add(time, count))


def test_what_can_be_seen_follows_from_the_distance_of_the_readings() -> None:
    assert detectable_periods(0.1) == pytest.approx((2.0, 4.4 * 2 ** (OCTAVES - 1)))
