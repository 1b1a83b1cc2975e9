"""Series in which detect.py can find nothing, told by two bounds and not sample by sample: most of many healthy ones.

A slowness is told only where the mean of LASTS samples in a row is above their level by a limit. A level is the mean of
whole batches of BATCH samples in a row (level.py), in which none counts as farther than FARTHEST from the others: it
lies no lower than the lowest such mean. So where the highest mean and the lowest are less than the limit apart there is
no point, whatever the level was. That holds without restarts, after which a batch may have a gap, and without regimes.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from healthd.failslow.detect import LASTS, LIMITS
from healthd.failslow.level import BATCH, FARTHEST
from healthd.failslow.model import Kind

ROUNDING = 1e-9


def quiet(samples: NDArray[np.float64], counts: NDArray[np.int64], kind: Kind) -> NDArray[np.bool_]:
    """Of each series whether it has no point for certain. samples: series x samples, logarithms of times, of which each
    series has its first ones, so many as counts says."""
    if samples.shape[1] < max(BATCH, LASTS):
        return np.ones(len(samples), np.bool_)
    there = np.arange(samples.shape[1]) < counts[:, None]
    lowest = np.where(there, samples, np.inf).min(axis=1, keepdims=True)
    # A level's middle is no lower than the lowest sample: what is far above that may count for less, never for more.
    level = np.where(there[:, BATCH - 1 :], _means(np.minimum(samples - lowest, FARTHEST), BATCH), np.inf)
    level = lowest + level.min(axis=1, keepdims=True)
    above = _means(np.clip(samples - level, -FARTHEST, FARTHEST), LASTS)
    highest = np.where(there[:, LASTS - 1 :], above, -np.inf).max(axis=1)
    below: NDArray[np.bool_] = highest < LIMITS[kind].slow - ROUNDING
    return below


def _means(samples: NDArray[np.float64], length: int) -> NDArray[np.float64]:
    """Of each so many samples in a row, by the last one of them."""
    count = samples.shape[1] - length + 1
    means: NDArray[np.float64] = samples[:, :count].copy()
    for at in range(1, length):
        means += samples[:, at : at + count]
    means /= length
    return means
