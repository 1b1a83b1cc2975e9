"""The period of a counter's rate: how long an iteration takes, of a job that tells nothing. Pure.

A training job computes, then talks: the bytes that a link counts each 0.1 s rise and fall once an iteration. Where the
rate agrees with itself k samples later, k is a period:

    ACF_k = 1/(L-k) sum_{t=1..L-k} (x_t - mean)(x_{t+k} - mean)  /  1/L sum_{t=1..L} (x_t - mean)^2

That is FALCON's rule (arXiv 2410.12588, 2.2 step 2) with one change: theirs divides both sums by the same, so that it
shrinks as (L-k)/L, and a rhythm of a fifth of the window cannot pass 0.8. Their 0.95 is for names of operations, which
agree or do not; a rate has noise, and of it ACF_k tells the share of its variance that is the rhythm. So:

- THRESHOLD: more than half of it. Noise without memory gives a normal value with deviation 1/sqrt(L-k), 0.09: half is
  5.6 of these, one chance in a hundred million a lag. What has memory and no rhythm (a random walk, transfers that come
  as they like) is what the other rules are for; how often all of them fail is measured: docs/fail-slow-counters.md.
- It is a local peak, with a valley before it; two and three periods later, as far as two of them are in the window,
  there are peaks too.
- The smallest such lag that is about as high as the highest: a multiple of a period is one too. Micro-batches are a
  shorter rhythm in an iteration: where the iterations agree no better than their micro-batches, these are taken, and a
  slowness of them is the job's. With `near`, the period that was found before, that one stays if it still may.
- At least LEAST samples: what is quicker is not measured well enough to see 10 %, and is no rhythm here.

Where these do not hold, there is no rhythm: None, never a guess.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from operator import mul
from typing import NamedTuple

WINDOW = 160  # samples
LEAST, MOST = 20, 44  # samples of a period: the window has three of them, or more
THRESHOLD = 0.5
ABOUT_AS_HIGH = 0.12  # below the highest peak: what two lags of one rhythm differ by, by chance
STAYS = 0.25  # the same, for the period that was found before
VALLEY = 0.35  # by so much, of the peak's height, it lies below it
LEAST_VARIATION = 0.1  # of the mean: what varies less is constant, or a quick rhythm that the samples beat with
MULTIPLE = 0.6  # of the first peak's height, those of its multiples are high


class Rhythm(NamedTuple):
    """period: samples. strength: the share of the variance that is the rhythm, 0 to 1."""

    period: float
    strength: float


def rhythm(rates: Sequence[float], near: float | None = None) -> Rhythm | None:
    """The period of the last WINDOW rates, equally far apart; `near`: that of the window before. None: they have none
    that is between LEAST and MOST samples, or they are fewer."""
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
    """The unbiased autocorrelation at lags 0 to `most`; None of rates that do not vary, or are no numbers."""
    count, unit = len(rates), max(map(abs, rates))
    if not 0 < unit < math.inf or not all(map(math.isfinite, rates)):
        return None
    parts = [one / unit for one in rates]  # no square of these overflows
    mean = math.fsum(parts) / count
    off = [one - mean for one in parts]
    variance = sum(map(mul, off, off)) / count
    if variance <= (LEAST_VARIATION * mean) ** 2:
        return None
    return [sum(map(mul, off, off[lag:])) / ((count - lag) * variance) for lag in range(most + 1)]


def clipped(rates: Sequence[float]) -> list[float]:
    """Without what towers above all else: a checkpoint is one burst in a window, not the rhythm."""
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
    """Of the highest lag about here. Iterations differ a little, and the more of them lie between the more."""
    reach = max(1, period // 8)
    return max(found[max(1, lag - reach) : lag + reach + 1])


def _fine(found: Sequence[float], lag: int) -> float:
    """The period, to a part of a sample: from the farthest multiple that two periods of the window still tell of."""
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
    """Where the parabola through a peak and its neighbours has its top."""
    if not 0 < lag < len(found) - 1:
        return float(lag)
    before, here, after = found[lag - 1 : lag + 2]
    bend = before - 2 * here + after
    if bend >= 0:
        return float(lag)
    return lag + max(-0.5, min(0.5, (before - after) / (2 * bend)))
