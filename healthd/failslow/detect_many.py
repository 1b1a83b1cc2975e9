"""The detector for many series at once. numpy computes the run lengths of all series together (bocd.py) and excludes
series without a slowness. detect.py then tests the other series sample by sample.

Needs the extra healthd[failslow]. A test checks that it finds the same points as detect.py.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from healthd.failslow import bocd
from healthd.failslow.bocd import GOES_ON, KEPT, LEAST_CHANCE, PRIOR_BETA, RECENT, RUNS
from healthd.failslow.detect import LASTS, LIMITS, run
from healthd.failslow.level import BATCH, FARTHEST
from healthd.failslow.model import Kind, Point

MOST_TOGETHER = 2048  # series: each array of runs has 640 KiB
MOST_SAMPLES = 1 << 21  # per batch: 16 MiB
PIECE = 8192  # samples of one piece of a long series; the pieces are computed together
ROUNDING = 1e-9
FORGOTTEN = 1024  # samples by which pieces overlap; after them run lengths do not depend on where a piece begins


def detect(
    values: Sequence[Sequence[float]],
    regimes: Sequence[Sequence[str] | None],
    starts: Sequence[Sequence[int]],
    kind: Kind = Kind.ITERATION,
) -> list[tuple[Point, ...]]:
    """Return what `detect.detect` returns for each series. Series of similar length form one batch."""
    points: list[tuple[Point, ...]] = [()] * len(values)
    together: list[int] = []
    for place in sorted(range(len(values)), key=lambda place: -len(values[place])):
        # With regimes, run lengths need times minus the level of the regime, which only the detector knows.
        if regimes[place] is not None or not len(values[place]):
            points[place] = run(values[place], None, regimes[place], starts[place], kind)
            continue
        longest = len(values[together[0]]) if together else len(values[place])
        full = len(together) >= MOST_TOGETHER or (len(together) + 1) * longest > MOST_SAMPLES
        if together and (full or len(values[place]) * 2 < longest):
            _together(values, starts, kind, together, points)
            together = []
        together.append(place)
    if together:
        _together(values, starts, kind, together, points)
    return points


def _together(
    values: Sequence[Sequence[float]],
    starts: Sequence[Sequence[int]],
    kind: Kind,
    places: Sequence[int],
    points: list[tuple[Point, ...]],
) -> None:
    """Detect the points of one batch and store them in `points`.

    Args:
        batch: indices of series with samples, the longest first.
    """
    samples = np.empty((len(places), len(values[places[0]])))
    counts = []
    for row, place in enumerate(places):
        logs = [math.log(time) for time in values[place] if 0 < time < math.inf] or [0.0]
        samples[row, : len(logs)] = logs
        samples[row, len(logs) :] = logs[-1]
        counts.append(len(logs))
    still = quiet(samples, np.array(counts), kind)
    loud = [row for row, place in enumerate(places) if not still[row] or any(starts[place])]
    if not loud:
        return
    lengths = in_pieces(smoothed(samples[loud]))
    for nth, row in enumerate(loud):
        place = places[row]
        following = iter(lengths[nth].tolist())
        of_each = [next(following) if 0 < time < math.inf else 0 for time in values[place]]
        points[place] = run(values[place], of_each, None, starts[place], kind)


def in_pieces(samples: NDArray[np.float64]) -> NDArray[np.int8]:
    """Return the same as `recent_run_lengths`. A long series is cut: one series takes as long as a hundred."""
    count, length = samples.shape
    if length <= PIECE + FORGOTTEN:
        return newest(samples)
    padded = np.pad(samples, ((0, 0), (0, -(length - FORGOTTEN) % PIECE)), mode="edge")
    pieces = np.lib.stride_tricks.sliding_window_view(padded, PIECE + FORGOTTEN, axis=1)[:, ::PIECE]
    told = newest(pieces.reshape(-1, PIECE + FORGOTTEN)).reshape(pieces.shape)
    later = told[:, :, FORGOTTEN:].reshape(count, -1)
    return np.concatenate((told[:, 0, :FORGOTTEN], later), axis=1)[:, :length]


def smoothed(samples: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the median of each sample and the two before it. Shape: series x samples."""
    padded = np.pad(samples, ((0, 0), (2, 0)), mode="edge")
    return np.median((padded[:, :-2], padded[:, 1:-1], padded[:, 2:]), axis=0)


def newest(samples: NDArray[np.float64]) -> NDArray[np.int8]:
    """Return what RunLengths.add returns for each sample. samples: series x samples, logarithms of times."""
    count, length = samples.shape
    lengths = np.zeros((count, length), np.int8)
    factors, shapes, powers, steps = (
        np.array(values)[:, None] for values in (bocd.FACTORS, bocd.SHAPES, bocd.POWERS, bocd.STEPS)
    )
    # Shape: runs x series, so that each row is contiguous. A run of r samples moves down by one row each time.
    chances, means, betas = np.zeros((RUNS, count)), np.zeros((RUNS, count)), np.full((RUNS, count), PRIOR_BETA)
    chances[0] = 1.0
    means[:] = samples[:, 0]
    for at in range(1, length):
        sample = samples[:, at]
        off = sample - means
        grown = off * off
        grown *= shapes
        grown += betas
        weights = np.divide(betas, grown)
        np.power(weights, powers, out=weights)
        weights *= chances
        weights *= factors
        weights /= np.sqrt(betas)
        off *= steps
        means += off
        longest = weights[-1] >= weights[-2]
        means[-1] = np.where(longest, means[-1], means[-2])
        grown[-1] = np.where(longest, grown[-1] * KEPT, grown[-2])
        weights[-1] += weights[-2]
        weights[-2] = 0.0
        weights *= GOES_ON / weights.sum(axis=0)
        chances[1:-1], chances[-1] = weights[:-2], weights[-1]
        chances[0] = 1 - GOES_ON
        means[1:-1] = means[:-2].copy()
        betas[1:-1], betas[-1] = grown[:-2], grown[-1]
        means[0], betas[0] = sample, PRIOR_BETA
        recent = chances[: RECENT + 1]
        likely = recent.sum(axis=0) > LEAST_CHANCE
        if likely.any():
            lengths[likely, at] = recent[1:, likely].argmax(axis=0) + 1
    return lengths


def quiet(samples: NDArray[np.float64], counts: NDArray[np.int64], kind: Kind) -> NDArray[np.bool_]:
    """Return True for each series that certainly has no point. Most healthy series then need no test of each sample.

    detect.py reports a slowness only if the mean of MIN_SLOW_SAMPLES consecutive samples exceeds the level by a limit.
    The level is the mean of whole batches of BATCH consecutive samples (level.py), in which each sample is clipped at
    MAX_DISTANCE from the others. It is therefore at least the lowest mean of BATCH samples. If the highest mean and the
    lowest differ by less than the limit, there is no point at any level. This is valid without restarts, after which a
    batch may have a gap, and without regimes.

    Args:
        samples: series x samples, logarithms of times. Only the first `counts` samples of each series are valid.
    """
    if samples.shape[1] < max(BATCH, LASTS):
        return np.ones(len(samples), np.bool_)
    there = np.arange(samples.shape[1]) < counts[:, None]
    lowest = np.where(there, samples, np.inf).min(axis=1, keepdims=True)
    # The median of a level is at least the lowest sample. Clipping can only lower samples far above it.
    level = np.where(there[:, BATCH - 1 :], _means(np.minimum(samples - lowest, FARTHEST), BATCH), np.inf)
    level = lowest + level.min(axis=1, keepdims=True)
    above = _means(np.clip(samples - level, -FARTHEST, FARTHEST), LASTS)
    highest = np.where(there[:, LASTS - 1 :], above, -np.inf).max(axis=1)
    below: NDArray[np.bool_] = highest < LIMITS[kind].slow - ROUNDING
    return below


def _means(samples: NDArray[np.float64], length: int) -> NDArray[np.float64]:
    """Return the mean of each `length` consecutive samples."""
    count = samples.shape[1] - length + 1
    means: NDArray[np.float64] = samples[:, :count].copy()
    for at in range(1, length):
        means += samples[:, at : at + count]
    means /= length
    return means
