"""Duration of a job's iterations from the readings of a counter, for a job that reports nothing. Pure functions.

A training job computes, then communicates: the bytes that a link counts every 0.1 s rise and fall once per iteration.
`find_rhythm` finds the period of a window of rates. If the rates agree with those k samples later, k is a period:

    ACF_k = 1/(L-k) sum_{t=1..L-k} (x_t - mean)(x_{t+k} - mean)  /  1/L sum_{t=1..L} (x_t - mean)^2

This is FALCON's rule (arXiv 2410.12588, 2.2 step 2) with one change. FALCON divides both sums by the same number. Its
value therefore shrinks as (L-k)/L, and a period of a fifth of the window cannot exceed 0.8. Its threshold of 0.95 is
for names of operations, which agree or differ. A rate has noise, and ACF_k is the share of its variance that the period
explains. The rules are therefore:

- THRESHOLD: more than half of the variance. Noise without memory gives a normal value with deviation 1/sqrt(L-k), 0.09:
  half is 5.6 deviations, a chance of one in a hundred million per lag. The other rules exclude series with memory and
  no period (a random walk, irregular transfers). docs/fail-slow-counters.md gives measured error rates of all rules.
- The lag is a local peak with a valley before it. There are also peaks at two and three times the lag, if the window
  has two periods of them.
- The result is the smallest such lag that is about as high as the highest one: a multiple of a period is also a period.
  Micro-batches are a shorter period within an iteration. If the iterations agree no better than their micro-batches,
  the result is the micro-batches, and their slowness is that of the job. `near`, the previous period, is kept if it
  still qualifies.
- At least MIN_PERIOD samples: a shorter period is not measured well enough to show 10 %.

If a condition fails, there is no period: the result is None, never a guess.

`Iterations` computes the rates on a grid. The count between two readings is spread evenly over the time between them,
so that a late or missing reading changes little. Each octave halves the rate of the one before it. A period of 20 to 44
samples is 2 to 4.4 s in the first octave if there is a reading every 0.1 s, 4 to 8.8 s in the second, and 64 to 140 s
in the last. An octave tests its last 160 samples after every 40 new ones: its result is the mean of four to eight
iterations.

One octave at a time gives results, and only after it found the same period twice. Another one takes over if the first
has had no result for longer than a window of the other: iterations that become longer than 44 samples are found an
octave lower.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from operator import mul
from typing import NamedTuple

WINDOW = 160  # samples
LEAST, MOST = 20, 44  # samples of a period: the window has three of them, or more
THRESHOLD = 0.5
ABOUT_AS_HIGH = 0.12  # below the highest peak: two lags of one rhythm differ by this much by chance
STAYS = 0.25  # the same for the previous period
VALLEY = 0.35  # how far the valley lies below the peak, as a share of the peak's height
LEAST_VARIATION = 0.1  # of the mean: a rate that varies less is constant, or the beat of a shorter period
MULTIPLE = 0.6  # minimum height of the peaks at multiples, as a share of the first peak's height


class Rhythm(NamedTuple):
    """A detected period. period: samples. strength: the share of the variance that the rhythm explains, 0 to 1."""

    period: float
    strength: float


def rhythm(rates: Sequence[float], near: float | None = None) -> Rhythm | None:
    """Return the period of the last WINDOW rates, which have equal distances.

    None if there is no period between MIN_PERIOD and MAX_PERIOD samples, or too few rates.

    Args:
        near: the previous period.
    """
    if len(rates) < WINDOW:
        return None
    found = acf(clipped(rates[-WINDOW:]), WINDOW - LEAST)
    if found is None:
        return None
    peaks = [lag for lag in range(2, MOST + 1) if found[lag] >= THRESHOLD and _is_rhythm(found, lag)]
    if not peaks:
        return None
    highest = max(found[lag] for lag in peaks)
    lag = next(one for one in peaks if found[one] >= highest - ABOUT_AS_HIGH)
    if near is not None:
        last = near
        stays = [one for one in peaks if found[one] >= highest - STAYS and one >= LEAST]
        if stays:
            lag = min(stays, key=lambda one: abs(math.log(one / last)))
    if lag < LEAST:
        return None
    return Rhythm(_fine(found, lag), min(1.0, found[lag]))


def acf(rates: Sequence[float], most: int) -> list[float] | None:
    """Return the unbiased autocorrelation at lags 0 to `max_lag`, or None for constant or non-finite rates."""
    count, unit = len(rates), max(map(abs, rates))
    if not 0 < unit < math.inf or not all(map(math.isfinite, rates)):
        return None
    parts = [one / unit for one in rates]  # avoids overflow of the squares
    mean = math.fsum(parts) / count
    off = [one - mean for one in parts]
    variance = sum(map(mul, off, off)) / count
    if variance <= (LEAST_VARIATION * mean) ** 2:
        return None
    return [sum(map(mul, off, off[lag:])) / ((count - lag) * variance) for lag in range(most + 1)]


def clipped(rates: Sequence[float]) -> list[float]:
    """Return the rates without extreme peaks: a checkpoint is a single burst in a window."""
    high = 1.5 * sorted(rates)[len(rates) * 94 // 100]
    return [min(one, high) for one in rates] if high > 0 else list(rates)


def _is_rhythm(found: Sequence[float], lag: int) -> bool:
    if not _is_peak(found, lag, lag) or min(found[1:lag]) > (1 - VALLEY) * found[lag]:
        return False
    multiples = [one for one in (2 * lag, 3 * lag) if one + lag < len(found)]
    return all(_height(found, one, lag) >= MULTIPLE * found[lag] for one in multiples)


def _is_peak(found: Sequence[float], lag: int, period: int) -> bool:
    return found[lag] >= _height(found, lag, period)


def _height(found: Sequence[float], lag: int, period: int) -> float:
    """Return the highest value near a lag. Durations vary, so the range grows with the number of periods."""
    reach = max(1, period // 8)
    return max(found[max(1, lag - reach) : lag + reach + 1])


def _fine(found: Sequence[float], lag: int) -> float:
    """Return the period as a fraction of samples, measured at the largest multiple that the window allows."""
    period = _top(found, lag)
    for times in (2, 3):
        goal = round(times * period)
        if goal + 2 * lag > len(found) + LEAST:
            break
        reach = max(1, lag // 8)
        around = range(max(1, goal - reach), min(len(found) - 1, goal + reach + 1))
        if not around:
            break
        at = max(around, key=found.__getitem__)
        if found[at] < MULTIPLE * found[lag]:
            break
        period = _top(found, at) / times
    return period


def _top(found: Sequence[float], lag: int) -> float:
    """Return the position of the maximum of the parabola through a peak and its neighbours."""
    if not 0 < lag < len(found) - 1:
        return float(lag)
    before, here, after = found[lag - 1 : lag + 2]
    bend = before - 2 * here + after
    if bend >= 0:
        return float(lag)
    return lag + max(-0.5, min(0.5, (before - after) / (2 * bend)))


# --- readings of a counter

OCTAVES = 6
STRIDE = WINDOW // 4
MOST_MISSED = 4.0  # samples in a row that may be missing
SAME = 1.15  # two windows have the same period if they differ by no more than this


class Iteration(NamedTuple):
    """The mean duration of the iterations in a window.

    time: of the newest reading, on the readings' clock. strength: as in Rhythm. step: seconds between the samples in
    which the period was found.
    """

    time: float
    seconds: float
    strength: float
    step: float


@dataclass(slots=True)
class _Octave:
    samples: deque[float] = field(default_factory=lambda: deque(maxlen=WINDOW))
    new: int = 0  # since the last evaluation
    half: float | None = None  # a rate that waits for the next one
    period: float | None = None  # samples, in the last window with a period
    agreed: bool = False  # the previous window had the same period


@dataclass(slots=True)
class Iterations:
    """Iteration times from one counter. seconds: time between readings. reporting_octave: octave of the last result, or
    None.
    """

    seconds: float
    speaks: int | None = None
    _heard: float = -math.inf
    _last: tuple[float, float] | None = None  # time, count
    _grid: float = 0.0  # time of the next cell
    _until: float = 0.0  # count in the current cell
    _octaves: list[_Octave] = field(default_factory=lambda: [_Octave() for _ in range(OCTAVES)])

    def add(self, time: float, count: float) -> Iterator[Iteration]:
        """Add a reading: the count at a time. Yield the durations that it completes.

        A time or count that decreases, or a gap of more than MAX_MISSED readings, resets the state. Non-finite values
        are ignored.
        """
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
        """Return the current period, or None if there is none."""
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
    """Return the shortest and the longest period, in seconds, that readings `seconds` apart can show."""
    return LEAST * seconds, MOST * seconds * 2 ** (OCTAVES - 1)
