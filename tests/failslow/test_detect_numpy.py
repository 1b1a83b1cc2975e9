"""Tests that the numpy detector finds the same points as the standard library detector."""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from healthd.failslow import detect
from healthd.failslow.bocd import MIN_PROBABILITY, RECENT, RunLengths
from healthd.failslow.model import Kind

pytestmark = pytest.mark.one_python


def random_series(seed: int) -> list[float]:
    chance = random.Random(seed)
    count, cv = chance.randrange(1, 900), chance.choice((0.01, 0.05, 0.1, 0.3))
    begin, end, height = chance.randrange(count), chance.randrange(count + 200), chance.choice((0.0, 0.15, 0.4, 2.0))
    value = [math.exp(chance.gauss(1, cv)) * (1 + height * (begin <= at < end)) for at in range(count)]
    for at in range(count):
        if chance.random() < 0.01:
            value[at] = chance.choice((0.0, math.nan, 50.0, -1.0, math.inf))
    return value


@pytest.mark.parametrize("kind", [Kind.ITERATION, Kind.TRANSFER])
def test_numpy_finds_same_points_as_standard_library(kind: Kind) -> None:
    from healthd.failslow import detect_numpy

    values = [random_series(seed) for seed in range(150)] + [[], [0.0], [1.0]]
    regimes = [
        ["a" if at % 2 else "b" for at in range(len(value))] if n % 10 == 0 else None for n, value in enumerate(values)
    ]
    starts = [(0, len(value) // 2) if n % 7 == 0 else (0,) for n, value in enumerate(values)]
    expected = [
        detect.detect(value, regime, start, kind) for value, regime, start in zip(values, regimes, starts, strict=True)
    ]
    assert detect_numpy.detect(values, regimes, starts, kind) == expected
    assert sum(map(len, expected)) > 30


def fluctuating_series(seed: int) -> list[float]:
    """Return a series of changing levels with drift and pauses, long enough for skipped parts."""
    chance = random.Random(seed)
    cv, wander, height, drift, value = chance.choice((0.01, 0.05, 0.1)), chance.choice((0, 0.02)), 1.0, 0.0, []
    for _ in range(chance.choice((700, 5000))):
        if chance.random() < 0.003:
            height = chance.choice((1.0, 1.0, 1.08, 1.15, 1.4, 0.7, 2.0))
        drift = 0.9 * drift + chance.gauss(0, wander)
        value.append(math.exp(chance.gauss(0, cv) + drift) * height * (8 if chance.random() < 0.01 else 1))
    return value


def test_skipped_parts_change_no_point() -> None:
    from healthd.failslow import detect_numpy

    values = [fluctuating_series(seed) for seed in range(16)]
    starts = [(0, len(value) // 3, len(value) // 2) if n % 3 == 0 else (0,) for n, value in enumerate(values)]
    expected = [detect.detect(value, None, start) for value, start in zip(values, starts, strict=True)]
    assert detect_numpy.detect(values, [None] * len(values), starts) == expected
    assert sum(map(len, expected)) > 15


def test_pieces_of_long_series_give_same_result_as_whole() -> None:
    import numpy as np

    from healthd.failslow import detect_numpy

    chance = np.random.default_rng(1)
    samples = chance.normal(0, 0.05, (40, 2 * detect_numpy.PIECE + detect_numpy.OVERLAP + 100))
    for row in range(40):
        samples[row, detect_numpy.PIECE + 100 * row : detect_numpy.PIECE + 100 * row + 500] += 0.4
    result = detect_numpy.run_lengths_in_pieces(samples)
    assert result.any()
    assert (result == detect_numpy.recent_run_lengths(samples)).all()


def test_run_lengths_are_equal_for_each_sample() -> None:
    import numpy as np

    from healthd.failslow import detect_numpy

    logs = [
        [math.log(abs(item)) if math.isfinite(item) and item else 0.0 for item in random_series(seed)]
        for seed in range(40)
    ]
    logs = [item for item in logs if len(item) >= 100]
    result = detect_numpy.recent_run_lengths(np.array([item[:100] for item in logs]))
    for row, item in zip(result.tolist(), logs, strict=True):
        runs = RunLengths()
        assert row == [runs.add(sample) for sample in item[:100]]


@given(st.lists(st.floats(-50, 50), min_size=1, max_size=60))
def test_smoothed_equals_detector_sample_by_sample(samples: list[float]) -> None:
    import numpy as np

    from healthd.failslow import detect_numpy

    detector = detect.Detector()
    assert detect_numpy.smoothed(np.array([samples])).tolist() == [[detector._smoothed(item) for item in samples]]


@given(st.integers(0, 2**32), st.integers(1, 6))
@example(6145, 6)  # a run that becomes the longest one had its probability counted twice
def test_recent_run_lengths_equal_run_lengths_sample_by_sample(seed: int, count: int) -> None:
    import numpy as np

    from healthd.failslow import detect_numpy

    series = [
        [math.log(time) if 0 < time < math.inf else 0.0 for time in random_series(seed + n)][:200] for n in range(count)
    ]
    shortest = min(map(len, series))
    lengths = detect_numpy.recent_run_lengths(np.array([samples[:shortest] for samples in series])).tolist()
    for samples, row in zip(series, lengths, strict=True):
        runs = RunLengths()
        for sample, length in zip(samples, row, strict=False):
            expected = runs.add(sample)
            assert length == expected or _is_tie(runs.probabilities[: RECENT + 1])


def _is_tie(chances: list[float]) -> bool:
    """numpy adds and multiplies in another order, so it may decide differently between nearly equal numbers."""
    first, second = sorted(chances[1:])[-2:][::-1]
    return first - second < 1e-9 * first or abs(sum(chances) - MIN_PROBABILITY) < 1e-9
