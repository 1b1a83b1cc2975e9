"""The level of a healthy regime, learned from its first samples and then fixed.

A level that followed its series would also follow slowness that develops gradually. FALCON misses such slowness (arXiv
2410.12588, section 6: consecutive steps below 10 %). Samples are logarithms of times.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median

BATCH = 10  # samples that are accepted or set aside together
LEAST = 20  # needed for a level
MOST = 200  # used for a level
LOOKED_AT = 2 * MOST  # samples after which the level is fixed, even if fewer were accepted
YOUNG = 60  # samples in which a warm-up is searched
FARTHEST = math.log(1.6)  # distances are clipped here, so that a pause counts as one sample
LEAST_NOISE = 0.005
APART = 0.03  # distance that a batch may always have from the others


@dataclass(slots=True)
class Level:
    """Level of a regime.

    mean: mean of the clipped samples. noise: their standard deviation. Both are valid only if `is_known`.
    samples_since: samples of the regime since the level is known.
    """

    at: float = 0.0
    noise: float = LEAST_NOISE
    count: int = 0
    seen: int = 0
    _middle: float = 0.0
    _taken: list[float] = field(default_factory=list)
    _batch: list[float] = field(default_factory=list)
    _aside: list[float] = field(default_factory=list)

    @property
    def known(self) -> bool:
        return self.count > 0

    @property
    def fixed(self) -> bool:
        return len(self._taken) >= MOST or self.seen >= LOOKED_AT

    def learn(self, sample: float) -> float:
        """Add one sample. Return by how much the level moved.

        A batch that is far from the others is set aside. If the job returns to the level within three batches, it
        fluctuates, and these batches count. Otherwise they were the begin of another regime.
        """
        self._batch.append(sample)
        if len(self._batch) < BATCH:
            return 0.0
        batch, self._batch = self._batch, []
        room = 3 * BATCH
        if self.known and abs(median(batch) - self._middle) > max(APART, 2.5 * self.noise / math.sqrt(BATCH)):
            if len(self._aside) < room:
                self._aside += batch
            return 0.0
        if len(self._aside) < room:
            batch = [*self._aside, *batch]
        self._aside = []
        self._taken += batch
        self._forget_warm_up()
        return self._settle()

    def _settle(self) -> float:
        if len(self._taken) < LEAST:
            return 0.0
        before = self.at
        self.count = len(self._taken)
        self._middle = median(self._taken)
        middle = self._middle
        off = [clipped(sample - middle) for sample in self._taken]
        self.at = self._middle + sum(off) / len(off)
        self.noise = max(LEAST_NOISE, deviation(off))
        return self.at - before

    def _forget_warm_up(self) -> None:
        """Drop the first batches if they are clearly above all that follow: first iterations compile, tune and fill
        caches.
        """
        taken = self._taken
        if len(taken) > YOUNG or self.seen > 2 * YOUNG:
            return
        for cut in range(len(taken) - BATCH, 0, -BATCH):
            before, after = taken[cut - BATCH : cut], taken[cut:]
            if median(before) > median(after) + max(0.02, 4 * deviation(after) / math.sqrt(BATCH)):
                del taken[:cut]
                return


def deviation(samples: Sequence[float]) -> float:
    """Return the standard deviation of two or more samples."""
    mean = sum(samples) / len(samples)
    return math.sqrt(sum([(sample - mean) ** 2 for sample in samples]) / (len(samples) - 1))


def clipped(off: float) -> float:
    return FARTHEST if off > FARTHEST else -FARTHEST if off < -FARTHEST else off
