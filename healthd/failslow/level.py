"""Where the samples of a healthy regime lie, learned from its first ones and then fixed.

A level that followed its series would follow a slowness that comes gradually, which is FALCON's own miss (arXiv
2410.12588, section 6: steps below 10 % in a row). Samples are logarithms of times.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median

BATCH = 10  # samples are taken, or put aside, by so many
LEAST = 20  # samples of which a level can be known
MOST = 200  # samples of which it is made
LOOKED_AT = 2 * MOST  # samples after which it is fixed, however many of them were taken
YOUNG = 60  # samples of which the first may be a warm-up
FARTHEST = math.log(1.6)  # a sample counts as no farther than this from the others: a pause is one sample
LEAST_NOISE = 0.005
APART = 0.03  # so far from the others a batch may be whatever the noise is


@dataclass(slots=True)
class Level:
    """at: the mean, of samples that are not far off; noise: their standard deviation. Both only if known.

    seen: how many samples the regime had since then.
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
        """Takes one sample. Returns by how much the level moved.

        A batch that is far from the others is put aside. If the job comes back within three of them it fluctuates
        so, and they count; else that was the begin of something else.
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
        """The first iterations compile, tune and fill caches: what lies clearly above all that followed goes."""
        taken = self._taken
        if len(taken) > YOUNG or self.seen > 2 * YOUNG:
            return
        for cut in range(len(taken) - BATCH, 0, -BATCH):
            before, after = taken[cut - BATCH : cut], taken[cut:]
            if median(before) > median(after) + max(0.02, 4 * deviation(after) / math.sqrt(BATCH)):
                del taken[:cut]
                return


def deviation(samples: Sequence[float]) -> float:
    """The standard deviation of two samples or more."""
    mean = sum(samples) / len(samples)
    return math.sqrt(sum([(sample - mean) ** 2 for sample in samples]) / (len(samples) - 1))


def clipped(off: float) -> float:
    return FARTHEST if off > FARTHEST else -FARTHEST if off < -FARTHEST else off
