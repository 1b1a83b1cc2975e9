"""Measures the iterations of a job that reports nothing itself, from readings of a counter. All functions are pure.

A training job computes, then communicates: if a link's bytes are counted every 0.1 s, they rise and fall once in each
iteration. `find_rhythm` finds the period in a window of rates. If the rates agree with the rates k samples later, k is
a period:

    ACF_k = 1/(L-k) sum_{t=1..L-k} (x_t - mean)(x_{t+k} - mean)  /  1/L sum_{t=1..L} (x_t - mean)^2

This is FALCON's rule (arXiv 2410.12588, 2.2 step 2), with one change. FALCON divides both sums by the same number. Its
ACF_k therefore shrinks in proportion to (L-k)/L: for a period of a fifth of the window, it cannot exceed 0.8. FALCON's
threshold of 0.95 is meant for names of operations, which either agree or differ. A rate has noise, and ACF_k is the
share of the rate's variance that the period explains. The rules are therefore:

- THRESHOLD: the period must explain more than half of the variance. For noise without memory, ACF_k is normal with the
  deviation 1/sqrt(L-k), or 0.09. Half is 5.6 deviations, which has a chance of one in a hundred million for each lag.
  The other rules exclude series that have memory but no period (a random walk, irregular transfers).
  docs/fail-slow-counters.md gives measured error rates of all rules.
- The lag is a local peak with a valley before it. If the window has at least two such periods, there must also be peaks
  at two and three times the lag.
- The result is the smallest such lag whose peak is about as high as the highest peak, because each multiple of a period
  is also a period. Micro-batches are a shorter period within an iteration. If iterations do not agree better than
  micro-batches, the result is the period of the micro-batches, which become slow together with the job. The previous
  period, `near`, is kept if it still meets all rules.
- The period has at least MIN_PERIOD samples. A shorter period is not measured precisely enough to detect a slowdown of
  10 %.

If any rule is not met, the result is None, never a guess.

`Iterations` computes the rates on a grid. The growth of the count between two readings is spread evenly over the time
between them, so that a late or missing reading changes little. Rates are sampled in several octaves, each with half as
many samples per second as the one before. With a reading every 0.1 s, a period of 20 to 44 samples is 2 to 4.4 s in the
first octave, 4 to 8.8 s in the second, and 64 to 140 s in the last. After every 40 new samples, an octave tests its
last 160 samples, so its result is the mean of four to eight iterations.

Only one octave at a time gives results, and only after it has found the same period twice. If it has had no result for
longer than the window of another octave, the other octave takes over. If iterations become longer than 44 samples, the
next octave with fewer samples finds them.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from operator import mul
from typing import NamedTuple

WINDOW = 160  # number of samples
MIN_PERIOD, MAX_PERIOD = 20, 44  # in samples; the window has three or more periods
THRESHOLD = 0.5
# a peak this much below the highest counts as equally high; by chance, two lags of one rhythm differ by this much
PEAK_MARGIN = 0.12
PREVIOUS_MARGIN = 0.25  # the same distance for the previous period
VALLEY = 0.35  # depth of the valley below the peak, as a share of the peak's height
# share of the mean; a rate that varies by less is constant, or varies only because it beats with a shorter period
MIN_VARIATION = 0.1
MULTIPLE_SHARE = 0.6  # minimum height of the peaks at multiples, as a share of the first peak's height


class Rhythm(NamedTuple):
    """A detected period.

    Attributes:
        period: length in samples.
        strength: share of the variance that the period explains, 0 to 1.
    """

    period: float
    strength: float


def find_rhythm(rates: Sequence[float], near: float | None = None) -> Rhythm | None:
    """Return the period in the last WINDOW rates, which are equally spaced.

    Return None if there are too few rates or no period between MIN_PERIOD and MAX_PERIOD samples.

    Args:
        near: the previous period.
    """
    if len(rates) < WINDOW:
        return None
    correlation = autocorrelation(clip_peaks(rates[-WINDOW:]), WINDOW - MIN_PERIOD)
    if correlation is None:
        return None
    peaks = [lag for lag in range(2, MAX_PERIOD + 1) if correlation[lag] >= THRESHOLD and _is_rhythm(correlation, lag)]
    if not peaks:
        return None
    highest = max(correlation[lag] for lag in peaks)
    lag = next(candidate for candidate in peaks if correlation[candidate] >= highest - PEAK_MARGIN)
    if near is not None:
        previous = near
        near_previous = [
            candidate
            for candidate in peaks
            if correlation[candidate] >= highest - PREVIOUS_MARGIN and candidate >= MIN_PERIOD
        ]
        if near_previous:
            lag = min(near_previous, key=lambda candidate: abs(math.log(candidate / previous)))
    if lag < MIN_PERIOD:
        return None
    return Rhythm(_fractional_period(correlation, lag), min(1.0, correlation[lag]))


def autocorrelation(rates: Sequence[float], max_lag: int) -> list[float] | None:
    """Return the unbiased autocorrelation at lags 0 to `max_lag`, or None if the rates are constant or not finite."""
    count, unit = len(rates), max(map(abs, rates))
    if not 0 < unit < math.inf or not all(map(math.isfinite, rates)):
        return None
    parts = [value / unit for value in rates]  # avoids overflow of the squares
    mean = math.fsum(parts) / count
    deviations = [value - mean for value in parts]
    variance = sum(map(mul, deviations, deviations)) / count
    if variance <= (MIN_VARIATION * mean) ** 2:
        return None
    return [sum(map(mul, deviations, deviations[lag:])) / ((count - lag) * variance) for lag in range(max_lag + 1)]


def clip_peaks(rates: Sequence[float]) -> list[float]:
    """Return the rates without extreme peaks, such as the single burst of a checkpoint."""
    high = 1.5 * sorted(rates)[len(rates) * 94 // 100]
    return [min(rate, high) for rate in rates] if high > 0 else list(rates)


def _is_rhythm(correlation: Sequence[float], lag: int) -> bool:
    if not _is_peak(correlation, lag, lag) or min(correlation[1:lag]) > (1 - VALLEY) * correlation[lag]:
        return False
    multiples = [multiple for multiple in (2 * lag, 3 * lag) if multiple + lag < len(correlation)]
    return all(_peak_height(correlation, multiple, lag) >= MULTIPLE_SHARE * correlation[lag] for multiple in multiples)


def _is_peak(correlation: Sequence[float], lag: int, period: int) -> bool:
    return correlation[lag] >= _peak_height(correlation, lag, period)


def _peak_height(correlation: Sequence[float], lag: int, period: int) -> float:
    """Return the highest value near a lag.

    The searched range grows with the number of periods, because durations vary.
    """
    reach = max(1, period // 8)
    return max(correlation[max(1, lag - reach) : lag + reach + 1])


def _fractional_period(correlation: Sequence[float], lag: int) -> float:
    """Return the period in fractional samples, measured at the largest multiple that the window allows."""
    period = _parabola_top(correlation, lag)
    for times in (2, 3):
        goal = round(times * period)
        if goal + 2 * lag > len(correlation) + MIN_PERIOD:
            break
        reach = max(1, lag // 8)
        around = range(max(1, goal - reach), min(len(correlation) - 1, goal + reach + 1))
        if not around:
            break
        at = max(around, key=correlation.__getitem__)
        if correlation[at] < MULTIPLE_SHARE * correlation[lag]:
            break
        period = _parabola_top(correlation, at) / times
    return period


def _parabola_top(correlation: Sequence[float], lag: int) -> float:
    """Return the position of the maximum of the parabola through a peak and its neighbours."""
    if not 0 < lag < len(correlation) - 1:
        return float(lag)
    before, peak, after = correlation[lag - 1 : lag + 2]
    bend = before - 2 * peak + after
    if bend >= 0:
        return float(lag)
    return lag + max(-0.5, min(0.5, (before - after) / (2 * bend)))


# --- readings of a counter

OCTAVES = 6
STRIDE = WINDOW // 4
MAX_MISSED = 4.0  # maximum number of consecutive samples that may be missing
SAME_PERIOD_RATIO = 1.15  # two windows have the same period if they differ by no more than this


class Iteration(NamedTuple):
    """The mean duration of the iterations in a window.

    Attributes:
        time: time of the newest reading, on the readings' clock.
        strength: as in Rhythm.
        step: seconds between the samples in which the period was found.
    """

    time: float
    seconds: float
    strength: float
    step: float


@dataclass(slots=True)
class _Octave:
    samples: deque[float] = field(default_factory=lambda: deque(maxlen=WINDOW))
    new_samples: int = 0  # since the last evaluation
    pending_rate: float | None = None  # a rate that will be combined with the next one for the next octave
    period: float | None = None  # in samples, in the last window with a period
    is_confirmed: bool = False  # the previous window had the same period


@dataclass(slots=True)
class Iterations:
    """Computes iteration times from one counter.

    Attributes:
        seconds: time between readings.
        reporting_octave: octave of the last result, or None.
    """

    seconds: float
    reporting_octave: int | None = None
    _last_result_at: float = -math.inf
    _last: tuple[float, float] | None = None  # time, count
    _next_grid_time: float = 0.0  # time of the next cell
    _cell_count: float = 0.0  # count in the current cell
    _octaves: list[_Octave] = field(default_factory=lambda: [_Octave() for _ in range(OCTAVES)])

    def add(self, time: float, count: float) -> Iterator[Iteration]:
        """Add a reading: the count at a given time. Yield the durations that this reading completes.

        If the time or the count decreases, or if more than MAX_MISSED readings are missing, the state is reset.
        Non-finite values are ignored.
        """
        if not (math.isfinite(time) and math.isfinite(count)):
            return
        last, self._last = self._last, (time, count)
        if last is None or not last[0] < time <= last[0] + (MAX_MISSED + 1) * self.seconds or count < last[1]:
            self._begin(time)
            return
        begin, rate = last[0], (count - last[1]) / (time - last[0])
        while self._next_grid_time <= time:
            self._cell_count += rate * (self._next_grid_time - begin)
            begin = self._next_grid_time
            yield from self._push(0, self._cell_count / self.seconds)
            self._cell_count = 0.0
            self._next_grid_time += self.seconds
        self._cell_count += rate * (time - begin)

    def period_seconds(self) -> float | None:
        """Return the current period, or None if there is none."""
        if self.reporting_octave is None:
            return None
        period = self._octaves[self.reporting_octave].period
        return None if period is None else period * self.seconds * 2**self.reporting_octave

    def _begin(self, time: float) -> None:
        self._octaves = [_Octave() for _ in range(OCTAVES)]
        self._next_grid_time, self._cell_count = time + self.seconds, 0.0
        self.reporting_octave, self._last_result_at = None, -math.inf

    def _push(self, number: int, rate: float) -> Iterator[Iteration]:
        octave = self._octaves[number]
        octave.samples.append(rate)
        octave.new_samples += 1
        if octave.new_samples >= STRIDE and len(octave.samples) == WINDOW:
            octave.new_samples = 0
            yield from self._evaluate(number, octave)
        if number + 1 < OCTAVES:
            if octave.pending_rate is None:
                octave.pending_rate = rate
            else:
                pending_rate, octave.pending_rate = octave.pending_rate, None
                yield from self._push(number + 1, (pending_rate + rate) / 2)

    def _evaluate(self, number: int, octave: _Octave) -> Iterator[Iteration]:
        found = find_rhythm(list(octave.samples), octave.period)
        before, octave.period = octave.period, found.period if found else None
        if found is None:
            octave.is_confirmed = False
            return
        step = self.seconds * 2**number
        octave.is_confirmed = octave.is_confirmed or (
            before is not None and 1 / SAME_PERIOD_RATIO <= found.period / before <= SAME_PERIOD_RATIO
        )
        if self.reporting_octave != number:
            is_silent = self.reporting_octave is None or self._next_grid_time - self._last_result_at > WINDOW * step
            if not (is_silent and octave.is_confirmed):
                return
            self.reporting_octave = number
        self._last_result_at = self._next_grid_time
        yield Iteration(self._next_grid_time, found.period * step, found.strength, step)


def detectable_periods(seconds: float) -> tuple[float, float]:
    """Return the shortest and the longest period, in seconds, that can be detected with readings `seconds` apart."""
    return MIN_PERIOD * seconds, MAX_PERIOD * seconds * 2 ** (OCTAVES - 1)
