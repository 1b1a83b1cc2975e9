"""Measures a series's times before and after an onset, for each kind of time. All functions are pure.

The time before an onset is measured over the last MAX_BASELINE samples that are in the same regime and outside slow
spans, in blocks of BLOCK. It is the lower quartile of the blocks, so that a ramp or another slow span does not become
the baseline. Peers are measured in the same way, so the bias cancels in a comparison. The time after an onset is
measured over the samples until the relief, at most AFTER_SAMPLES. Means are trimmed by a tenth at each end: checkpoints
and pauses then do not count as a step, but a step that comes and goes does.
"""

from __future__ import annotations

import math
import statistics
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Callable, Sequence
from typing import NamedTuple

from healthd.failslow.model import Point, Series

MAX_BASELINE = 400
AFTER_SAMPLES = (50, 200)  # numbers of samples; the longer window is used if the shorter one shows no component
MIN_SAMPLES = 5  # number of samples
BLOCK = 20
MAX_LOOKBACK = 5000  # number of samples searched for the same regime
GUARD = 3  # number of samples before an onset that may already be slow

Channel = Callable[[Series, int], float]  # time of a sample; NaN if missing


class Change(NamedTuple):
    """The change of a time, in the series's unit.

    Attributes:
        noise: standard error of after - before, from the scatter before the onset.
        fast_share: share of the samples after the onset that are nearly as fast as before (within a quarter of the
            change).
    """

    before: float
    after: float
    noise: float
    fast_share: float = 0.0

    @property
    def ratio(self) -> float:
        return self.after / self.before

    @property
    def increase(self) -> float:
        return self.after - self.before


def value(series: Series, at: int) -> float:
    return series.value[at]


def busy(series: Series, at: int) -> float:
    """Return the rank's own compute time. If it is not reported, return the time without waiting and transfer."""
    if series.busy is not None:
        return series.busy[at]
    if series.wait is None:
        return math.nan
    return series.value[at] - series.wait[at] - (series.transfer[at] if series.transfer is not None else 0.0)


def wait(series: Series, at: int) -> float:
    return series.wait[at] if series.wait is not None else math.nan


def transfer(series: Series, at: int) -> float:
    return series.transfer[at] if series.transfer is not None else math.nan


def residual(series: Series, at: int) -> float:
    """Return the time that remains after busy, wait and transfer.

    This is host time, for example for CPUs and data loading.
    """
    if series.busy is None or series.wait is None:
        return math.nan
    accounted = series.busy[at] + series.wait[at] + (series.transfer[at] if series.transfer is not None else 0.0)
    return series.value[at] - accounted


def position(source: Series, at: int, target: Series) -> int:
    """Return the position in `target` that corresponds to sample `at` of `source`, by index within the same attempt.

    If it is after the last sample of `target`, the result is len(target.value).
    """
    attempt = bisect_right(source.starts, at) - 1
    if attempt >= len(target.starts):
        return len(target.value)
    begin = target.starts[attempt]
    end = target.starts[attempt + 1] if attempt + 1 < len(target.starts) else len(target.value)
    return bisect_left(target.index, source.index[at], begin, end)


def measure_change(
    series: Series, points: Sequence[Point], onset: int, end: int, channel: Channel, since: int | None = None
) -> Change | None:
    """Return the change of `channel` at `onset`, or None if there are fewer than MIN_SAMPLES samples before or after
    it.

    Args:
        end: end of the samples after the onset.
        since: position from which samples after the onset are used.
    """
    after = range(onset if since is None else since, min(end, len(series.value)))
    regimes = series.regimes
    regime = Counter(regimes[at] for at in after).most_common(1)[0][0] if regimes is not None and len(after) else None
    later = [
        found
        for at in after
        if (regimes is None or regimes[at] == regime) and not math.isnan(found := channel(series, at))
    ]
    if len(later) < MIN_SAMPLES:
        return None
    earlier = _baseline_samples(series, points, onset, regime, channel)
    if len(earlier) < 2 * MIN_SAMPLES:
        return None
    before, after_mean = _baseline(earlier), trimmed_mean(later)
    if channel is not residual and not (before > 0 and after_mean > 0):
        return None
    # The standard error uses the scatter before the onset, because slow samples have their own scatter. Samples are not
    # independent, so at most three blocks count.
    noise = 1.25 * robust_deviation(earlier) * math.sqrt(1 / min(len(earlier), 3 * BLOCK) + 1 / len(later))
    fast = before + (after_mean - before) / 4
    return Change(before, after_mean, noise, sum(sample < fast for sample in later) / len(later))


def rest_level(series: Series, channel: Channel) -> float | None:
    """Return the healthy time: the lower quartile of up to 400 evenly chosen samples."""
    step = max(1, len(series.value) // 400)
    found = sorted(
        sample
        for at in range(0, len(series.value), step)
        if not math.isnan(sample := channel(series, at)) and sample > 0
    )
    return found[len(found) // 4] if found else None


def trimmed_mean(values: Sequence[float]) -> float:
    """Return the mean, trimmed by a tenth at each end.

    With few values, a quarter is trimmed instead, because two of ten values may be pauses.
    """
    cut = len(values) // (10 if len(values) >= BLOCK else 4)
    return statistics.fmean(sorted(values)[cut : len(values) - cut])


def robust_deviation(values: Sequence[float]) -> float:
    """Estimate the standard deviation from the median absolute deviation."""
    middle = statistics.median(values)
    return 1.4826 * statistics.median(abs(sample - middle) for sample in values)


def _baseline_samples(
    series: Series, points: Sequence[Point], onset: int, regime: str | None, channel: Channel
) -> list[float]:
    """Return the baseline samples, oldest first."""
    found: list[float] = []
    slow_spans = [(item.onset_index, item.relief_index) for item in points if item.onset_index < onset]
    for at in range(onset - 1 - GUARD, max(-1, onset - MAX_LOOKBACK), -1):
        if len(found) == MAX_BASELINE:
            break
        if series.regimes is not None and series.regimes[at] != regime:
            continue
        if slow_spans and any(begin <= at and (end is None or at < end) for begin, end in slow_spans):
            continue
        item = channel(series, at)
        if not math.isnan(item):
            found.append(item)
    return found[::-1]


def _baseline(earlier: Sequence[float]) -> float:
    blocks = [earlier[at : at + BLOCK] for at in range(0, len(earlier) - BLOCK + 1, BLOCK)]
    if len(blocks) < 4:
        return trimmed_mean(earlier)
    return sorted(trimmed_mean(block) for block in blocks)[len(blocks) // 4]
