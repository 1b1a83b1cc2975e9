"""Tests of the detector: points found in simulated series, healthy series, and stable results with later samples."""

from __future__ import annotations

import math
import random
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from healthd.failslow.bocd import HAZARD_SAMPLES, MIN_PROBABILITY, RECENT, RunLengths
from healthd.failslow.detect import Detector, detect, isotonic_fit, median_filter
from healthd.failslow.model import Kind, Point

pytestmark = pytest.mark.one_python  # pure arithmetic that takes minutes


def times(count: int, cv: float = 0.03, seed: int = 1, usual_seconds: float = 2.0) -> list[float]:
    chance = random.Random(seed)
    return [usual_seconds * math.exp(chance.gauss(0, cv)) for _ in range(count)]


def slower(value: list[float], begin: int, end: int, height: float) -> list[float]:
    return [seconds * (1 + height) if begin <= at < end else seconds for at, seconds in enumerate(value)]


def onsets_and_reliefs(value: list[float], **options: object) -> list[tuple[int, int | None]]:
    return [(point.onset_index, point.relief_index) for point in detect(value, **options)]  # type: ignore[arg-type]


@pytest.mark.parametrize("height", [0.15, 0.3, 0.6, 3.0])
def test_step_is_found_with_onset_and_relief(height: float) -> None:
    (point,) = detect(slower(times(600), 300, 400, height))
    assert abs(point.onset_index - 300) <= 2
    assert point.relief_index is not None
    assert abs(point.relief_index - 400) <= 3
    assert point.slowdown == pytest.approx(height, rel=0.1)
    assert point.confidence > 0.95
    assert 300 + 9 <= point.alarm_index <= 300 + 30


def test_lasting_slowness_has_no_relief() -> None:
    (point,) = detect(slower(times(500), 300, 500, 0.4))
    assert point.relief_index is None


def test_ten_slow_iterations_count_and_nine_do_not() -> None:
    assert [onset for onset, _ in onsets_and_reliefs(slower(times(300, 0.01), 200, 210, 0.5))] == [200]
    assert onsets_and_reliefs(slower(times(300, 0.01), 200, 209, 0.5)) == []


def test_ramp_begins_at_ten_percent() -> None:
    value = [seconds * (1 + min(0.4, max(0, at - 200) * 0.002)) for at, seconds in enumerate(times(700, 0.02))]
    (point,) = detect(value)
    assert abs(point.onset_index - 250) <= 10
    assert point.relief_index is None


@pytest.mark.parametrize("seed", [1, 2, 3, 4])
def test_ramp_is_detected_soon_after_ten_percent(seed: int) -> None:
    value = [seconds * (1 + max(0, at - 200) * 0.001) for at, seconds in enumerate(times(500, 0.02, seed))]
    (point,) = detect(value)
    assert point.alarm_index <= 300 + 30


def test_small_steps_begin_at_sum_of_ten_percent() -> None:
    value = times(700, 0.02)
    for begin in (200, 300, 400):
        value = slower(value, begin, 700, 0.07)
    (point,) = detect(value)
    assert abs(point.onset_index - 300) <= 10


def test_lasting_slowness_is_no_new_regime() -> None:
    (point,) = detect(slower(times(5000), 300, 5000, 0.2))
    assert point.relief_index is None


def test_steps_during_learning_are_detected() -> None:
    value = times(900, 0.02)
    for begin in (40, 100, 160, 220):
        value = slower(value, begin, 900, 0.04)
    (point,) = detect(value)
    assert abs(point.onset_index - 160) <= 10


def test_pause_before_step_does_not_move_onset() -> None:
    value = slower(times(500, 0.02), 300, 500, 0.3)
    value[292:295] = [seconds * 8 for seconds in value[292:295]]
    (point,) = detect(value)
    assert abs(point.onset_index - 300) <= 2


def test_recurring_short_slowness_is_reported_twice() -> None:
    """An evaluation recurs every hundred iterations; a longer or much slower one is reported again."""
    value = times(1500)
    for begin in range(100, 1300, 100):
        value = slower(value, begin, begin + 15, 0.3)
    assert [onset for onset, _ in onsets_and_reliefs(value)] == [100, 200]
    assert [onset for onset, _ in onsets_and_reliefs(slower(value, 1305, 1400, 0.3))] == [100, 200, 1305]
    assert [onset for onset, _ in onsets_and_reliefs(slower(value, 1305, 1320, 0.9))] == [100, 200, 1305]


@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize("cv", [0.02, 0.05, 0.10])
def test_noise_is_not_slow(cv: float, seed: int) -> None:
    assert detect(times(2000, cv, seed)) == ()


def test_step_below_limit_is_ignored() -> None:
    assert detect(slower(times(1000), 300, 1000, 0.06)) == ()


def test_pauses_are_not_slow() -> None:
    value = times(2000)
    for begin in range(50, 2000, 50):
        value[begin] *= 10
        value[begin + 1] *= 5
    assert detect(value) == ()


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_two_short_disturbances_are_not_slow(seed: int) -> None:
    value = slower(slower(times(300, seed=seed), 200, 204, 0.6), 207, 210, 0.6)
    assert detect(value) == ()


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_fluctuating_job_is_reported_only_at_first(seed: int) -> None:
    chance = random.Random(seed)
    value, at = times(1200, seed=seed), 100
    while at < 1100:
        height, length = chance.uniform(0.08, 0.25), chance.randrange(15, 45)
        value = slower(value, at, at + length, height)
        at += length + chance.randrange(15, 45)
    assert all(onset < 400 for onset, _ in onsets_and_reliefs(value))


@pytest.mark.parametrize(("wave", "step"), [(0.07, 0.22), (0.06, 0.20), (0.05, 0.18)])
@pytest.mark.parametrize("lengths", [range(20, 21), range(12, 30)])
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_slowness_of_fluctuating_job_is_detected(wave: float, step: float, lengths: range, seed: int) -> None:
    chance = random.Random(seed)
    value, at = times(1200, 0.01, seed), 10
    while at < 1200:
        high = chance.choice(lengths)
        value = slower(value, at, at + high, wave)
        at += high + chance.choice(lengths)
    points = detect(slower(value, 600, 1200, step))
    assert any(580 <= candidate.onset_index <= 640 and candidate.alarm_index <= 760 for candidate in points)


def test_warm_up_is_not_slow_and_hides_no_slowness() -> None:
    warm = [1 + 3 * math.exp(-at / 10) for at in range(600)]
    value = [seconds * factor for seconds, factor in zip(times(600), warm, strict=True)]
    assert detect(value) == ()
    assert [onset for onset, _ in onsets_and_reliefs(slower(value, 300, 400, 0.3))] == [300]


def test_restart_warms_up_again_and_may_be_slower() -> None:
    value = times(600)
    value[300:320] = [seconds * (1 + 2 * math.exp(-at / 4)) for at, seconds in enumerate(value[300:320])]
    assert detect(value, starts=(0, 300)) == ()
    (point,) = detect(slower(value, 300, 600, 0.3), starts=(0, 300))
    assert 300 <= point.onset_index <= 330  # times fall until then


def test_faster_level_becomes_new_baseline() -> None:
    value = slower(times(500), 0, 100, 0.5)
    assert [onset for onset, _ in onsets_and_reliefs(slower(value, 400, 500, 0.3))] == [400]


def test_return_to_earlier_level_is_not_slow() -> None:
    value = slower(times(1200), 0, 400, 0.3)
    assert detect(slower(value, 800, 1200, 0.3)) == ()


def test_each_regime_has_own_level() -> None:
    value = slower(times(800), 400, 800, 0.5)
    assert len(detect(value)) == 1
    assert detect(value, ["batch 16"] * 400 + ["batch 24"] * 400) == ()
    mixed = ["long" if at % 3 == 0 else "short" for at in range(800)]
    value = [seconds * (2 if name == "long" else 1) for seconds, name in zip(times(800), mixed, strict=True)]
    assert detect(value, mixed) == ()
    assert [onset for onset, _ in onsets_and_reliefs(slower(value, 500, 800, 0.3), regimes=mixed)] == [500]


def test_unique_regime_names_are_ignored_and_bounded() -> None:
    detector = Detector()
    for at, seconds in enumerate(times(1000)):
        detector.add(seconds, str(at))
    assert detector.points == []
    assert len(detector._levels) == 64


def test_invalid_times_keep_their_positions() -> None:
    value = slower(times(400), 300, 400, 0.4)
    for at in range(0, 400, 7):
        value[at] = (0.0, math.nan, -1.0, math.inf)[at % 4]
    ((onset, _),) = onsets_and_reliefs(value)
    assert abs(onset - 300) <= 2


def test_transfer_times_have_higher_limit() -> None:
    value = slower(times(600), 300, 600, 0.15)
    assert len(detect(value)) == 1
    assert detect(value, kind=Kind.TRANSFER) == ()
    assert len(detect(slower(times(600), 300, 600, 0.4), kind=Kind.TRANSFER)) == 1


@pytest.mark.parametrize("value", [[], [1.0], [1.0] * 19, [2.0] * 1000, [0.0] * 100])
def test_short_or_constant_series_has_no_points(value: list[float]) -> None:
    assert detect(value) == ()


def test_step_of_constant_series_is_found() -> None:
    assert onsets_and_reliefs([2.0] * 100 + [2.5] * 50 + [2.0] * 50) == [(100, 150)]


@settings(max_examples=10)
@given(
    st.integers(0, 10**6),
    st.integers(60, 300),
    st.sampled_from([0.15, 0.3, 0.8]),
    st.lists(st.integers(0, 250), min_size=8, max_size=8),
)
def test_later_samples_move_no_onset(seed: int, begin: int, height: float, later: list[int]) -> None:
    value = slower(times(500, 0.05, seed), begin, begin + 100, height)
    whole = detect(value)
    for count in later:
        early = detect(value[: begin + count])
        assert [(point.onset_index, point.alarm_index) for point in early] == [
            (point.onset_index, point.alarm_index) for point in whole[: len(early)]
        ]
        assert [point for point in early if point.relief_index is not None] == list(whole[: len(early)])[
            : sum(point.relief_index is not None for point in early)
        ]


@settings(max_examples=30)
@given(st.integers(0, 10**6), st.sampled_from([2.0**-20, 0.25, 1024.0]))
def test_detection_is_independent_of_unit(seed: int, unit: float) -> None:
    value = slower(times(400, 0.05, seed), 200, 300, 0.3)
    assert onsets_and_reliefs(value) == onsets_and_reliefs([seconds * unit for seconds in value])


@settings(max_examples=100)
@given(
    st.lists(st.floats() | st.sampled_from([0.0, 1.0, 1.5, 5e-324, 1.7e308]), max_size=200),
    st.sets(st.integers(0, 199)),
)
def test_any_numbers_give_valid_points(value: list[float], starts: set[int]) -> None:
    for point in detect(value, starts=tuple(starts)):
        assert 0 <= point.onset_index <= point.alarm_index < len(value)
        assert 0 <= point.confidence <= 1
        assert point.relief_index is None or point.onset_index < point.relief_index < len(value)


def test_memory_of_detector_is_bounded() -> None:
    detector = Detector()
    for seconds in times(5000, 0.05):
        detector.add(seconds)
    assert len(detector._clipped) <= 160
    assert len(detector._run_lengths.probabilities) == 40


# --- run lengths


def test_probability_of_zero_run_length_is_always_hazard() -> None:
    """P(r_t = 0) is the hazard for any sample, so FALCON's rule cannot be meant as printed."""
    runs = RunLengths()
    for sample in [0.0] * 100 + [5.0] * 100:
        runs.add(sample)
        assert runs.probabilities[0] == pytest.approx(1 / HAZARD_SAMPLES) or runs.probabilities[0] == 1.0
    assert sum(runs.probabilities) == pytest.approx(1)


def test_change_point_is_found_within_five_samples() -> None:
    runs = RunLengths()
    logs = [math.log(sample) for sample in slower(times(300, 0.02), 200, 300, 0.2)]
    change_points = [(at, newest) for at, sample in enumerate(logs) if (newest := runs.add(sample)) and at > RECENT]
    assert change_points
    assert change_points[0][0] - change_points[0][1] + 1 == 200
    assert change_points[0][0] <= 200 + RECENT
    assert sum(runs.probabilities[: RECENT + 1]) < MIN_PROBABILITY


@settings(max_examples=50)
@given(st.lists(st.floats(-10, 10), max_size=60))
def test_isotonic_fit_is_ascending_with_same_sum(samples: list[float]) -> None:
    fit = isotonic_fit(samples)
    assert len(fit) == len(samples)
    assert all(value <= next_value + 1e-9 for value, next_value in pairwise(fit))
    assert math.isclose(sum(fit), sum(samples), abs_tol=1e-6)
    assert isotonic_fit(sorted(samples)) == pytest.approx(sorted(samples))


def test_median_filter_removes_single_outlier() -> None:
    assert median_filter([1.0, 1.0, 9.0, 1.0, 1.0]) == [1.0] * 5
    assert median_filter([1.0] * 8 + [9.0] * 3 + [1.0] * 4 + [2.0] * 9) == [1.0] * 15 + [2.0] * 9
    assert median_filter([1.0]) == [1.0]
    assert median_filter([]) == []


def test_point_compares_by_value() -> None:
    assert Point(1, 2, 0.1, 0.9) == Point(1, 2, 0.1, 0.9, None)
