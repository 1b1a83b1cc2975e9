"""The detectors with which healthd is compared: plain BOCD and a sliding window, as in the tables of FALCON (2.4).

Both detectors ignore regimes, restarts and peers. They analyse each series alone, and all points that they report
count.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from failslow.generate import Made
from healthd.failslow.model import Diagnosis, Point

HAZARD, RECENT, MIN_PROBABILITY = 1 / 250, 5, 0.9
RUN_LENGTHS = 250
WINDOW, SLOWER = 10, 0.10


def bocd(made: Made) -> Diagnosis:
    return Diagnosis(tuple(_points_by_series(made, bocd_points)))


def sliding_window(made: Made) -> Diagnosis:
    return Diagnosis(tuple(_points_by_series(made, window_points)))


def _points_by_series(
    made: Made, find_points: Callable[[Sequence[float]], tuple[Point, ...]]
) -> Iterator[tuple[Point, ...]]:
    """Yield the points of each series.

    For a gang, one series is analysed: the others differ only by the ranks' clocks.
    """
    for position, series in enumerate(made.series):
        yield find_points(series.value) if position == 0 or not made.gang else ()


def bocd_points(value: Sequence[float]) -> tuple[Point, ...]:
    """Return the points of Bayesian online change-point detection (Adams and MacKay, arXiv 0710.3742).

    It has a constant hazard and a Normal-Gamma prior at the scale of the first samples. Each time that P(r <= 5) rises
    above 0.9 is a point; P(r = 0) is not used, because it would always equal the hazard. The longest run lengths are
    merged. Changes are not verified: each change is a point, whether the job becomes faster or slower.
    """
    x = np.asarray(value, dtype=float)
    if len(x) < 2 * RECENT:
        return ()
    first = x[: 2 * WINDOW]
    mean0 = float(np.median(first))
    spread = max(float(np.median(np.abs(first - mean0))) * 1.4826, 1e-3 * mean0)
    x = (x - mean0) / spread  # units of the first samples' noise, so the prior has mean 0 and precision 1
    mu, kappa, alpha, beta = np.zeros(1), np.ones(1), np.ones(1), np.ones(1)
    weight: NDArray[np.float64] = np.ones(1)
    lgamma = np.array([math.lgamma(1 + n / 2) for n in range(RUN_LENGTHS + 2)])
    points, was_change = [], True
    for t, sample in enumerate(x):
        scale = beta * (kappa + 1) / kappa  # Student's t of 2 alpha degrees, with alpha = 1 + n / 2
        n = np.arange(len(mu))
        predictive = np.exp(lgamma[n + 1] - lgamma[n] - (alpha + 0.5) * np.log1p((sample - mu) ** 2 / (2 * scale)))
        predictive /= np.sqrt(2 * math.pi * scale)
        grown = weight * predictive
        weight = np.concatenate(([grown.sum() * HAZARD], grown * (1 - HAZARD)))
        total = weight.sum()
        if not total > 0:  # an outlier so unlikely that its probability is 0: it begins a run
            weight = np.zeros(len(weight))
            weight[0] = total = 1.0
        weight /= total
        beta = np.concatenate(([1.0], beta + kappa * (sample - mu) ** 2 / (2 * (kappa + 1))))
        mu = np.concatenate(([0.0], (kappa * mu + sample) / (kappa + 1)))
        kappa, alpha = np.concatenate(([1.0], kappa + 1)), np.concatenate(([1.0], alpha + 0.5))
        if len(weight) > RUN_LENGTHS:
            weight[-2] += weight[-1]
            weight, mu, kappa, alpha, beta = (array[:RUN_LENGTHS] for array in (weight, mu, kappa, alpha, beta))
        is_change = float(weight[: RECENT + 1].sum()) > MIN_PROBABILITY
        if is_change and not was_change and t > 2 * RECENT:
            run = int(np.argmax(weight[: RECENT + 1]))
            points.append(Point(max(0, t - max(run, 1) + 1), t, 0.0, float(weight[: RECENT + 1].sum())))
        was_change = is_change
    return tuple(points)


def window_points(value: Sequence[float]) -> tuple[Point, ...]:
    """Return a point wherever the mean of ten samples rises 10 % above the mean of the ten samples before."""
    x = np.asarray(value, dtype=float)
    if len(x) < 2 * WINDOW:
        return ()
    means = np.convolve(x, np.full(WINDOW, 1 / WINDOW), "valid")
    ratio = means[WINDOW:] / means[:-WINDOW] - 1
    above = ratio > SLOWER
    rises = np.flatnonzero(above & ~np.concatenate(([False], above[:-1])))
    return tuple(Point(int(at) + WINDOW, int(at) + 2 * WINDOW - 1, float(ratio[at]), 1.0) for at in rises)
