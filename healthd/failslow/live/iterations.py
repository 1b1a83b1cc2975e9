"""From what a counter had counted, at moments that are not quite equally far apart, to how long iterations took. Pure.

The rate is taken on a grid: what was counted between two readings is spread evenly over the time between them, so that
a reading that comes late, or not at all, moves little. Each octave halves the rate of the one before it: a period of 20
to 44 samples (period.py) is 2 to 4.4 s in the first octave of a reading each 0.1 s, 4 to 8.8 s in the second, ... 64 to
140 s in the last. An octave looks at its last 160 samples each 40: it says the mean of four to eight iterations.

Who speaks: one octave at a time, and only after it found the same period twice. Another one takes over when that has
been silent for longer than a window of the other: iterations that became longer than 44 samples are found an octave
lower.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from healthd.failslow.live.period import LEAST, MOST, WINDOW, rhythm

OCTAVES = 6
STRIDE = WINDOW // 4
MOST_MISSED = 4.0  # samples in a row that may be missing
SAME = 1.15  # two windows have the same period if they differ by no more than this


class Iteration(NamedTuple):
    """time: of the newest reading in it, on the readings' clock. seconds: how long iterations took in the mean of a
    window. strength: as Rhythm has it. step: how far apart the samples are that it was found in."""

    time: float
    seconds: float
    strength: float
    step: float


@dataclass(slots=True)
class _Octave:
    samples: deque[float] = field(default_factory=lambda: deque(maxlen=WINDOW))
    new: int = 0  # since the last look
    half: float | None = None  # a rate that waits for its neighbour
    period: float | None = None  # samples, of the last window that had one
    agreed: bool = False  # with the window before that


@dataclass(slots=True)
class Iterations:
    """One counter's readings, `seconds` apart. speaks: the octave that was heard last, None before the first."""

    seconds: float
    speaks: int | None = None
    _heard: float = -math.inf
    _last: tuple[float, float] | None = None  # time, count
    _grid: float = 0.0  # the next moment of it
    _until: float = 0.0  # what was counted in this cell so far
    _octaves: list[_Octave] = field(default_factory=lambda: [_Octave() for _ in range(OCTAVES)])

    def add(self, time: float, count: float) -> Iterator[Iteration]:
        """A reading: what was counted until then. Time or a count that goes back, and a hole of more than MOST_MISSED
        readings, begin anew; what is no number is left out."""
        if not (math.isfinite(time) and math.isfinite(count)):
            return
        last, self._last = self._last, (time, count)
        if last is None or not last[0] < time <= last[0] + (MOST_MISSED + 1) * self.seconds or count < last[1]:
            self._begin(time)
            return
        begin, rate = last[0], (count - last[1]) / (time - last[0])
        while self._grid <= time:
            self._until += rate * (self._grid - begin)
            begin = self._grid
            yield from self._push(0, self._until / self.seconds)
            self._until = 0.0
            self._grid += self.seconds
        self._until += rate * (time - begin)

    def period_seconds(self) -> float | None:
        """What is known of the period now; None: no rhythm is heard."""
        if self.speaks is None:
            return None
        period = self._octaves[self.speaks].period
        return None if period is None else period * self.seconds * 2**self.speaks

    def _begin(self, time: float) -> None:
        self._octaves = [_Octave() for _ in range(OCTAVES)]
        self._grid, self._until = time + self.seconds, 0.0
        self.speaks, self._heard = None, -math.inf

    def _push(self, number: int, rate: float) -> Iterator[Iteration]:
        octave = self._octaves[number]
        octave.samples.append(rate)
        octave.new += 1
        if octave.new >= STRIDE and len(octave.samples) == WINDOW:
            octave.new = 0
            yield from self._look(number, octave)
        if number + 1 < OCTAVES:
            if octave.half is None:
                octave.half = rate
            else:
                half, octave.half = octave.half, None
                yield from self._push(number + 1, (half + rate) / 2)

    def _look(self, number: int, octave: _Octave) -> Iterator[Iteration]:
        found = rhythm(list(octave.samples), octave.period)
        before, octave.period = octave.period, found.period if found else None
        if found is None:
            octave.agreed = False
            return
        step = self.seconds * 2**number
        octave.agreed = octave.agreed or (before is not None and 1 / SAME <= found.period / before <= SAME)
        if self.speaks != number:
            silent = self.speaks is None or self._grid - self._heard > WINDOW * step
            if not (silent and octave.agreed):
                return
            self.speaks = number
        self._heard = self._grid
        yield Iteration(self._grid, found.period * step, found.strength, step)


def seen_from(seconds: float) -> tuple[float, float]:
    """The shortest and the longest period that is seen in readings so far apart."""
    return LEAST * seconds, MOST * seconds * 2 ** (OCTAVES - 1)
