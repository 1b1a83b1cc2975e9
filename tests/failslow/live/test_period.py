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


def simulated_rates(
    period: float, count: int = WINDOW, noise: float = 0.1, micro: int = 1, seed: int = 1
) -> list[float]:
    rng = random.Random(seed)
    return counters.noisy(rng, counters.bursts(rng, count, period, 0.3, 0.02, micro), noise)


@pytest.mark.parametrize("period", [20.5, 23, 28.3, 34, 39.7])
@pytest.mark.parametrize("micro", [1, 4])
def test_period_is_accurate_to_two_percent(period: float, micro: int) -> None:
    found = find_rhythm(simulated_rates(period, micro=micro))
    assert found is not None
    assert found.period == pytest.approx(period, rel=0.02)
    assert 0.5 <= found.strength <= 1


@pytest.mark.parametrize("seed", range(20))
def test_signal_without_rhythm_has_no_period(seed: int) -> None:
    for signal in counters.no_training(random.Random(seed), WINDOW, 0.1):
        assert find_rhythm(signal.rate) is None, signal.kind


@pytest.mark.parametrize("period", [0.3, 0.97, 1.04, 2.1, 3.1, 5, 9.7, 12, 18])
def test_too_short_period_is_not_found_as_multiple(period: float) -> None:
    assert find_rhythm(simulated_rates(period, noise=0.02)) is None


def test_period_too_long_for_window_is_not_found() -> None:
    assert find_rhythm(simulated_rates(3 * MAX_PERIOD, noise=0.02)) is None


def test_equal_micro_batches_have_their_own_period() -> None:
    found = find_rhythm(simulated_rates(24, noise=0.02))
    assert found is not None
    assert found.period == pytest.approx(24, rel=0.02)


def test_doubled_period_is_not_confused_with_previous_one() -> None:
    found = find_rhythm(simulated_rates(42, noise=0.1), near=21)
    assert found is not None
    assert found.period == pytest.approx(42, rel=0.03)


def test_incomplete_window_has_no_period() -> None:
    assert find_rhythm(simulated_rates(25)[:-1]) is None


@pytest.mark.parametrize("rates", [[0.0] * WINDOW, [7e18] * WINDOW, [math.nan] * WINDOW, [math.inf] * WINDOW])
def test_constant_or_invalid_rates_have_no_period(rates: list[float]) -> None:
    assert find_rhythm(rates) is None


@settings(deadline=None, max_examples=60)
@given(st.lists(FLOATS, min_size=WINDOW, max_size=WINDOW + 5), st.none() | st.floats(1, 100))
def test_period_of_any_rates_is_within_bounds(rates: list[float], near: float | None) -> None:
    found = find_rhythm(rates, near)
    if found is not None:
        assert MIN_PERIOD - 1 <= found.period <= MAX_PERIOD + 1
        assert 0 < found.strength <= 1


@settings(deadline=None, max_examples=30)
@given(st.floats(20.5, 40), st.floats(1e-6, 1e12), st.integers(0, 2**16))
def test_period_is_independent_of_unit(period: float, unit: float, seed: int) -> None:
    rates = simulated_rates(period, noise=0.05, seed=seed)
    original, scaled = find_rhythm(rates), find_rhythm([rate * unit for rate in rates])
    assert original is not None
    assert scaled is not None
    assert scaled.period == pytest.approx(original.period, rel=1e-6)


def test_autocorrelation_is_unbiased() -> None:
    """For a pure rhythm it is 1 at each multiple of the period; a biased estimate would be (L-k)/L."""
    found = autocorrelation([math.sin(2 * math.pi * at / 32) for at in range(WINDOW)], 4 * 32)
    assert found is not None
    assert [found[lag] for lag in (32, 64, 96, 128)] == pytest.approx([1, 1, 1, 1], abs=1e-9)


# --- iteration times from counter readings


def read_iterations(
    rates: list[float], seconds: float, seed: int = 1, missed: float = 0.0, late: float = 0.0
) -> list[Iteration]:
    rng, iterations, found, count = random.Random(seed), Iterations(seconds), list[Iteration](), 0.0
    for at, rate in enumerate(rates):
        count += rate
        if rng.random() >= missed:
            found += iterations.add((at + rng.uniform(0, late)) * seconds, count * 1000)
    return found


@pytest.mark.parametrize("period_seconds", [2.5, 4.3, 7.0, 15.0, 30.0])
def test_iterations_of_any_length_are_found(period_seconds: float) -> None:
    rates = simulated_rates(period_seconds / 0.1, count=int(60 * period_seconds / 0.1))
    found = read_iterations(rates, 0.1, missed=0.02, late=0.3)
    assert len(found) >= 5
    assert [iteration.seconds for iteration in found] == pytest.approx([period_seconds] * len(found), rel=0.03)
    assert [iteration.time for iteration in found] == sorted(iteration.time for iteration in found)


@pytest.mark.parametrize("slower", [1.15, 1.3, 1.8, 2.6])
def test_longer_iterations_are_detected_as_slow(slower: float) -> None:
    rng, half = random.Random(4), 9000
    rates = counters.bursts(rng, half, 30, 0.3, 0.02) + counters.bursts(rng, 2 * half, 30 * slower, 0.3 / slower, 0.02)
    found = read_iterations(counters.noisy(rng, rates, 0.1), 0.1)
    detector = Detector()
    for iteration in found:
        detector.add(iteration.seconds)
    (point,) = detector.points
    assert point.slowdown == pytest.approx(slower - 1, rel=0.1)
    assert 0.1 * half <= found[point.onset_index].time <= 0.1 * half + 150
    assert found[point.alarm_index].time <= 0.1 * half + 600


def test_steady_job_with_pauses_is_not_slow() -> None:
    rng = random.Random(5)
    rates = []
    for number in range(40):
        rates += counters.bursts(rng, 900, 26, 0.3, 0.02)
        rates += counters.bursts(rng, 90, 9, 0.4, 0.05) if number % 2 else [0.0] * 60 + [4.0] * 20
    detector = Detector()
    found = read_iterations(counters.noisy(rng, rates, 0.1), 0.1)
    for iteration in found:
        detector.add(iteration.seconds)
    assert len(found) > 200
    assert detector.points == []


def test_single_window_gives_no_iterations() -> None:
    assert read_iterations(simulated_rates(25, count=WINDOW + 5), 0.1) == []


@pytest.mark.parametrize("broken", ["back", "clock", "hole"])
def test_counter_reset_clock_reset_or_gap_restarts_search(broken: str) -> None:
    iterations, rates = Iterations(0.1), simulated_rates(25, count=1200)
    found, count = list[Iteration](), 0.0
    for at, rate in enumerate(rates):
        count += rate
        found += iterations.add(at * 0.1, count)
    assert found
    assert iterations.period_seconds() == pytest.approx(2.5, rel=0.03)
    at, count_now = (
        (1200 * 0.1, count - 5) if broken == "back" else (0.1, count) if broken == "clock" else (300.0, count)
    )
    assert list(iterations.add(at, count_now)) == []
    assert iterations.period_seconds() is None


@settings(deadline=None, max_examples=60)
@given(st.lists(st.tuples(FLOATS, FLOATS), max_size=60))
def test_any_readings_are_accepted(readings: list[tuple[float, float]]) -> None:
    iterations = Iterations(0.1)
    for time, count in readings:
        assert all(iteration.seconds > 0 for iteration in iterations.add(time, count))


def test_detectable_periods_follow_from_sampling_interval() -> None:
    assert detectable_periods(0.1) == pytest.approx((2.0, 4.4 * 2 ** (OCTAVES - 1)))
