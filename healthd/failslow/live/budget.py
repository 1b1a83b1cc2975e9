"""Whether sampling costs more than it may, and what is left out then. Pure.

It may take 0.1 % of a core. What a sample costs depends on the driver, the adapters' firmware and how many GPUs and
ports there are, so that it is measured while it runs, over a minute. Where it is too much:

1. half as many samples, if the rhythm that was found is seen in them too;
2. half of the GPUs or ports: those of one job have one rhythm;
3. half as many samples, whatever is seen in them;
4. none at all.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

from healthd.failslow.live.iterations import LEAST

SHARE = 0.001  # of a core
OVER_SECONDS = 60.0
SLOWEST_SECONDS = 5.0  # between two samples: iterations below 100 s are not seen


class Less(enum.Enum):
    SLOWER = "slower"
    FEWER = "fewer"
    NOTHING = "nothing"


@dataclass(slots=True)
class Budget:
    """began: the moment (monotonic) and the CPU seconds of this process since when is measured."""

    began: tuple[float, float]
    shares: list[float] = field(default_factory=list)  # of the last minutes, for what is told

    def share(self, now: float, cpu: float) -> float | None:
        """The share of a core since a minute ago; None while the minute lasts."""
        since, before = self.began
        if now - since < OVER_SECONDS:
            return None
        self.began = (now, cpu)
        self.shares = [*self.shares[-9:], (cpu - before) / (now - since)]
        return self.shares[-1]


def less(seconds: float, period: float | None, can_narrow: bool) -> Less:
    """What to do where it costs too much. period: the quickest rhythm that was found, seconds; None: none yet."""
    if period is not None and 2 * seconds * LEAST <= period:
        return Less.SLOWER
    if can_narrow:
        return Less.FEWER
    return Less.SLOWER if 2 * seconds <= SLOWEST_SECONDS else Less.NOTHING
