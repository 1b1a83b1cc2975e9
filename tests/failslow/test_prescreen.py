"""Tests of the prescreen: series that it skips have no point, and most healthy series are skipped."""

from __future__ import annotations

import math
import random

import pytest

from healthd.failslow import detect
from healthd.failslow.model import Kind

pytestmark = pytest.mark.one_python


def random_series(seed: int) -> list[float]:
    """Return noise, pauses, and steps with heights around the detection limit."""
    chance = random.Random(seed)
    count, noise = chance.randrange(1, 700), chance.choice((0.002, 0.01, 0.02, 0.05))
    heights, height, value = [0.0, 0.0, 0.03, 0.06, 0.09, 0.1, 0.11, 0.2, -0.1], 0.0, []
    for _ in range(count):
        if chance.random() < 0.02:
            height = chance.choice(heights)
        pause = 6.0 if chance.random() < 0.005 else 1.0
        value.append(math.exp(chance.gauss(0, noise)) * (1 + height) * pause)
    return value


@pytest.mark.parametrize("kind", [Kind.ITERATION, Kind.TRANSFER])
def test_quiet_series_has_no_point(kind: Kind) -> None:
    import numpy as np

    from healthd.failslow.detect_numpy import has_no_point

    values = [random_series(seed) for seed in range(400)]
    longest = max(map(len, values))
    samples = np.array([[*map(math.log, value), *[9.0] * (longest - len(value))] for value in values])
    is_quiet = has_no_point(samples, np.array(list(map(len, values))), kind)
    assert not any(detect.detect(value, kind=kind) for value, quiet in zip(values, is_quiet, strict=True) if quiet)
    assert 40 < is_quiet.sum() < 360


def test_nearly_all_healthy_series_are_quiet() -> None:
    import numpy as np

    from healthd.failslow.detect_numpy import has_no_point

    samples = np.random.default_rng(1).normal(0, 0.05, (1000, 100))
    assert has_no_point(samples, np.full(1000, 100), Kind.ITERATION).sum() > 950
