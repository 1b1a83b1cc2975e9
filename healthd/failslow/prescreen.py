"""Find series that certainly have no slowness, many at once with numpy. detect.py tests the other series.

Needs the extra healthd[failslow].
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from healthd.failslow.detect import LASTS, LIMITS
from healthd.failslow.level import BATCH, FARTHEST
from healthd.failslow.model import Kind, Series

MOST_SAMPLES = 1 << 21  # of one batch: 16 MiB
ROUNDING = 1e-9


def quiet_series(series: Sequence[Series]) -> set[int]:
    """Return the positions of the series that certainly have no point. A batch has series of about one length."""
    plain = [at for at, one in enumerate(series) if one.regimes is None and len(one.value) and not any(one.starts)]
    plain.sort(key=lambda at: -len(series[at].value))
    found: set[int] = set()
    while plain:
        longest = len(series[plain[0]].value)
        most = max(1, MOST_SAMPLES // longest)
        batch = [at for at in plain[:most] if 2 * len(series[at].value) >= longest]
        plain = plain[len(batch) :]
        counts = np.array([len(series[at].value) for at in batch])
        samples = np.zeros((len(batch), longest))
        for row, at in enumerate(batch):
            samples[row, : counts[row]] = np.log(series[at].value)
        found.update(at for at, still in zip(batch, quiet(samples, counts), strict=True) if still)
    return found


def quiet(samples: NDArray[np.float64], counts: NDArray[np.int64], kind: Kind = Kind.ITERATION) -> NDArray[np.bool_]:
    """Return for each series whether it certainly has no point: most healthy series need no test of each sample.

    detect.py reports a slowness only if the mean of LASTS consecutive samples exceeds the level by a limit. The level
    is the mean of whole batches of BATCH consecutive samples (level.py), in which no sample counts as farther than
    FARTHEST from the others. It is therefore at least the lowest mean of BATCH samples. If the highest mean and the
    lowest differ by less than the limit, there is no point at any level. This holds without restarts, after which a
    batch may have a gap, and without regimes.

    Args:
        samples: series x samples, logarithms of times. Each series has only its first `counts` samples.
    """
    if samples.shape[1] < max(BATCH, LASTS):
        return np.ones(len(samples), np.bool_)
    there = np.arange(samples.shape[1]) < counts[:, None]
    lowest = np.where(there, samples, np.inf).min(axis=1, keepdims=True)
    # A level's middle is at least the lowest sample. Samples far above may count for less, never for more.
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
