"""Learns the level of a healthy regime from its first samples. The level then stays fixed.

If the level followed its series, it would also follow slowness that develops gradually. FALCON misses such slowness
(arXiv 2410.12588, section 6: consecutive steps below 10 %). Samples are logarithms of times.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median

BATCH = 10  # number of samples that are accepted or set aside together
MIN_SAMPLES = 20  # number of samples needed for a level
MAX_SAMPLES = 200  # number of samples used for a level
FIXED_AFTER = 2 * MAX_SAMPLES  # number of samples after which the level is fixed, even if fewer were accepted
WARM_UP_SAMPLES = 60  # number of samples searched for a warm-up
MAX_DISTANCE = math.log(1.6)  # distances are clipped here, so that a pause counts as one sample
MIN_NOISE = 0.005
MIN_BATCH_DISTANCE = 0.03  # a batch within this distance from the other batches is always accepted


@dataclass(slots=True)
class Level:
    """A regime's level.

    Attributes:
        mean: mean of the clipped samples.
        noise: their standard deviation. Both are valid only if `is_known`.
        samples_since: samples in the regime since the level became known.
    """

    mean: float = 0.0
    noise: float = MIN_NOISE
    count: int = 0
    samples_since: int = 0
    _middle: float = 0.0
    _accepted: list[float] = field(default_factory=list)
    _batch: list[float] = field(default_factory=list)
    _set_aside: list[float] = field(default_factory=list)

    @property
    def is_known(self) -> bool:
        return self.count > 0

    @property
    def is_fixed(self) -> bool:
        return len(self._accepted) >= MAX_SAMPLES or self.samples_since >= FIXED_AFTER

    def learn(self, sample: float) -> float:
        """Add one sample. Return the change in the level.

        A batch that is far from the other batches is set aside. If the job returns to the level within three batches,
        it fluctuates, and the batches that were set aside are used. Otherwise, they were the start of another regime.
        """
        self._batch.append(sample)
        if len(self._batch) < BATCH:
            return 0.0
        batch, self._batch = self._batch, []
        max_set_aside = 3 * BATCH
        if self.is_known and abs(median(batch) - self._middle) > max(
            MIN_BATCH_DISTANCE, 2.5 * self.noise / math.sqrt(BATCH)
        ):
            if len(self._set_aside) < max_set_aside:
                self._set_aside += batch
            return 0.0
        if len(self._set_aside) < max_set_aside:
            batch = [*self._set_aside, *batch]
        self._set_aside = []
        self._accepted += batch
        self._forget_warm_up()
        return self._update()

    def _update(self) -> float:
        if len(self._accepted) < MIN_SAMPLES:
            return 0.0
        before = self.mean
        self.count = len(self._accepted)
        self._middle = median(self._accepted)
        middle = self._middle
        distances = [clip(sample - middle) for sample in self._accepted]
        self.mean = self._middle + sum(distances) / len(distances)
        self.noise = max(MIN_NOISE, standard_deviation(distances))
        return self.mean - before

    def _forget_warm_up(self) -> None:
        """Drop the first batches if they are clearly above all later ones.

        They are slower because the first iterations compile, tune and fill caches.
        """
        accepted = self._accepted
        if len(accepted) > WARM_UP_SAMPLES or self.samples_since > 2 * WARM_UP_SAMPLES:
            return
        for cut in range(len(accepted) - BATCH, 0, -BATCH):
            before, after = accepted[cut - BATCH : cut], accepted[cut:]
            if median(before) > median(after) + max(0.02, 4 * standard_deviation(after) / math.sqrt(BATCH)):
                del accepted[:cut]
                return


def standard_deviation(samples: Sequence[float]) -> float:
    """Return the standard deviation of two or more samples."""
    mean = sum(samples) / len(samples)
    return math.sqrt(sum([(sample - mean) ** 2 for sample in samples]) / (len(samples) - 1))


def clip(off: float) -> float:
    return MAX_DISTANCE if off > MAX_DISTANCE else -MAX_DISTANCE if off < -MAX_DISTANCE else off
