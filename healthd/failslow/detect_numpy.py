"""The detector for many series at once. numpy excludes most series without slowness before detect.py tests the others.

numpy computes the run lengths of all series together (bocd.py). detect.py then tests the remaining series sample by
sample. Requires the optional dependencies `healthd[failslow]`. A test checks that this module finds the same points as
detect.py.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from healthd.failslow import bocd
from healthd.failslow.bocd import BETA_KEPT_SHARE, CONTINUE_PROBABILITY, MIN_PROBABILITY, PRIOR_BETA, RECENT, RUNS
from healthd.failslow.detect import LIMITS, MIN_SLOW_SAMPLES, run_detector
from healthd.failslow.level import BATCH, MAX_DISTANCE
from healthd.failslow.model import Kind, Point

MAX_BATCH_SERIES = 2048  # number of series; each array of runs takes 640 KiB
MAX_BATCH_SAMPLES = 1 << 21  # number of samples per batch: 16 MiB
PIECE = 8192  # samples per piece of a long series; the pieces are computed together
ROUNDING = 1e-9
# number of samples by which pieces overlap; after the overlap, run lengths no longer depend on where a piece begins
OVERLAP = 1024


def detect(
    values: Sequence[Sequence[float]],
    regimes: Sequence[Sequence[str] | None],
    starts: Sequence[Sequence[int]],
    kind: Kind = Kind.ITERATION,
) -> list[tuple[Point, ...]]:
    """Return the result of `detect.detect` for each series. Series with similar lengths form a batch."""
    points: list[tuple[Point, ...]] = [()] * len(values)
    batch: list[int] = []
    for series_index in sorted(range(len(values)), key=lambda series_index: -len(values[series_index])):
        # With regimes, run lengths are computed from times minus the regime's level, which only the detector knows.
        if regimes[series_index] is not None or not len(values[series_index]):
            points[series_index] = run_detector(
                values[series_index], None, regimes[series_index], starts[series_index], kind
            )
            continue
        longest_length = len(values[batch[0]]) if batch else len(values[series_index])
        is_full = len(batch) >= MAX_BATCH_SERIES or (len(batch) + 1) * longest_length > MAX_BATCH_SAMPLES
        if batch and (is_full or len(values[series_index]) * 2 < longest_length):
            _detect_batch(values, starts, kind, batch, points)
            batch = []
        batch.append(series_index)
    if batch:
        _detect_batch(values, starts, kind, batch, points)
    return points


def _detect_batch(
    values: Sequence[Sequence[float]],
    starts: Sequence[Sequence[int]],
    kind: Kind,
    batch: Sequence[int],
    points: list[tuple[Point, ...]],
) -> None:
    """Detect the points in one batch and store them in `points`.

    Args:
        batch: indices of series with samples, longest first.
    """
    samples = np.empty((len(batch), len(values[batch[0]])))
    counts = []
    for row, series_index in enumerate(batch):
        logs = [math.log(time) for time in values[series_index] if 0 < time < math.inf] or [0.0]
        samples[row, : len(logs)] = logs
        samples[row, len(logs) :] = logs[-1]
        counts.append(len(logs))
    is_healthy = has_no_point(samples, np.array(counts), kind)
    unresolved = [row for row, series_index in enumerate(batch) if not is_healthy[row] or any(starts[series_index])]
    if not unresolved:
        return
    lengths = run_lengths_in_pieces(smoothed(samples[unresolved]))
    for nth, row in enumerate(unresolved):
        series_index = batch[row]
        following = iter(lengths[nth].tolist())
        run_lengths = [next(following) if 0 < time < math.inf else 0 for time in values[series_index]]
        points[series_index] = run_detector(values[series_index], run_lengths, None, starts[series_index], kind)


def run_lengths_in_pieces(samples: NDArray[np.float64]) -> NDArray[np.int8]:
    """Return the result of `recent_run_lengths`.

    Long series are split into pieces, because numpy needs about as much time for one series as for a hundred.
    """
    count, length = samples.shape
    if length <= PIECE + OVERLAP:
        return recent_run_lengths(samples)
    padded = np.pad(samples, ((0, 0), (0, -(length - OVERLAP) % PIECE)), mode="edge")
    pieces = np.lib.stride_tricks.sliding_window_view(padded, PIECE + OVERLAP, axis=1)[:, ::PIECE]
    piece_lengths = recent_run_lengths(pieces.reshape(-1, PIECE + OVERLAP)).reshape(pieces.shape)
    later = piece_lengths[:, :, OVERLAP:].reshape(count, -1)
    return np.concatenate((piece_lengths[:, 0, :OVERLAP], later), axis=1)[:, :length]


def smoothed(samples: NDArray[np.float64]) -> NDArray[np.float64]:
    """Replace each sample by the median of the sample and the two before it. Shape: series x samples."""
    padded = np.pad(samples, ((0, 0), (2, 0)), mode="edge")
    return np.median((padded[:, :-2], padded[:, 1:-1], padded[:, 2:]), axis=0)


def recent_run_lengths(samples: NDArray[np.float64]) -> NDArray[np.int8]:
    """Return the result of RunLengths.add for each sample.

    Args:
        samples: series x samples, logarithms of times.
    """
    count, length = samples.shape
    lengths = np.zeros((count, length), np.int8)
    factors, shapes, powers, steps = (
        np.array(values)[:, None] for values in (bocd.FACTORS, bocd.SHAPES, bocd.POWERS, bocd.STEPS)
    )
    # Shape: runs x series, so that each row is contiguous. A run of r samples moves down by one row each time.
    probabilities, means, betas = np.zeros((RUNS, count)), np.zeros((RUNS, count)), np.full((RUNS, count), PRIOR_BETA)
    probabilities[0] = 1.0
    means[:] = samples[:, 0]
    for at in range(1, length):
        sample = samples[:, at]
        off = sample - means
        grown = off * off
        grown *= shapes
        grown += betas
        weights = np.divide(betas, grown)
        np.power(weights, powers, out=weights)
        weights *= probabilities
        weights *= factors
        weights /= np.sqrt(betas)
        off *= steps
        means += off
        keeps_last = weights[-1] >= weights[-2]
        means[-1] = np.where(keeps_last, means[-1], means[-2])
        grown[-1] = np.where(keeps_last, grown[-1] * BETA_KEPT_SHARE, grown[-2])
        weights[-1] += weights[-2]
        weights[-2] = 0.0
        weights *= CONTINUE_PROBABILITY / weights.sum(axis=0)
        probabilities[1:-1], probabilities[-1] = weights[:-2], weights[-1]
        probabilities[0] = 1 - CONTINUE_PROBABILITY
        means[1:-1] = means[:-2].copy()
        betas[1:-1], betas[-1] = grown[:-2], grown[-1]
        means[0], betas[0] = sample, PRIOR_BETA
        recent = probabilities[: RECENT + 1]
        likely = recent.sum(axis=0) > MIN_PROBABILITY
        if likely.any():
            lengths[likely, at] = recent[1:, likely].argmax(axis=0) + 1
    return lengths


def has_no_point(samples: NDArray[np.float64], counts: NDArray[np.int64], kind: Kind) -> NDArray[np.bool_]:
    """Return True for each series that certainly has no point. Most healthy series then need no further test.

    detect.py reports slowness only if the mean of MIN_SLOW_SAMPLES consecutive samples exceeds the level by a limit.
    The level is the mean of whole batches of BATCH consecutive samples (level.py), so it is at least the lowest mean of
    BATCH samples. (Samples in a batch are clipped at MAX_DISTANCE from the others.) If the highest mean of
    MIN_SLOW_SAMPLES exceeds the lowest mean of BATCH samples by less than the limit, no level allows a point. This is
    valid only without regimes and without restarts, because a batch may have a gap after a restart.

    Args:
        samples: series x samples, logarithms of times. Only the first `counts` samples of each series are valid.
    """
    if samples.shape[1] < max(BATCH, MIN_SLOW_SAMPLES):
        return np.ones(len(samples), np.bool_)
    is_present = np.arange(samples.shape[1]) < counts[:, None]
    lowest = np.where(is_present, samples, np.inf).min(axis=1, keepdims=True)
    # The median of a level is at least the lowest sample. Clipping can lower only samples that are far above the
    # median.
    level = np.where(is_present[:, BATCH - 1 :], _means(np.minimum(samples - lowest, MAX_DISTANCE), BATCH), np.inf)
    level = lowest + level.min(axis=1, keepdims=True)
    above = _means(np.clip(samples - level, -MAX_DISTANCE, MAX_DISTANCE), MIN_SLOW_SAMPLES)
    highest = np.where(is_present[:, MIN_SLOW_SAMPLES - 1 :], above, -np.inf).max(axis=1)
    below: NDArray[np.bool_] = highest < LIMITS[kind].slow - ROUNDING
    return below


def _means(samples: NDArray[np.float64], length: int) -> NDArray[np.float64]:
    """Return the mean of each run of `length` consecutive samples."""
    count = samples.shape[1] - length + 1
    means: NDArray[np.float64] = samples[:, :count].copy()
    for at in range(1, length):
        means += samples[:, at : at + count]
    means /= length
    return means
