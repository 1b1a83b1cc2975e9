"""Detector for the onset and the relief of slowness in a series of times. Constant memory, one sample at a time.

FALCON (arXiv 2410.12588, section 4) finds a change point (healthd/failslow/bocd.py) and keeps it if the means before
and after differ by 10 %. In a job that fluctuates, this reports most fluctuations, and it misses slowness that develops
in steps below 10 %. This detector therefore compares samples with the level of their regime (level.py), which is
learned once. A sample is the logarithm of a time minus that level: 0.095 is 10 % slower.

- It tests the samples since a change point, for fast changes, and the last 20 to 160 samples, for slow ones.
- The samples are slow if their mean is above 10 %, and above 7 % by more than chance explains. The chance covers the
  noise of the samples, the uncertainty of the level, and the drift of blocks of samples. Two thirds of the samples and
  the last ones must also be slow: a few long pauses are not slowness. For fewer than 20 samples, three quarters must be
  at least half as slow as their mean: two disturbances close together are not slowness either.
- The slowness must have lasted for ten samples.
- The onset is where the samples, fitted by an ascending sequence (isotonic regression), cross 10 %. The relief is where
  a descending fit falls below it.

Only samples up to the alarm decide: a later sample never moves an onset. docs/fail-slow.md, "How good it is", gives the
rates of false alarms and misses.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice, pairwise, repeat
from statistics import median

from healthd.failslow.bocd import RunLengths
from healthd.failslow.level import FARTHEST, LEAST_NOISE, Level, clipped, deviation
from healthd.failslow.model import Kind, Point

LASTS = 10  # samples
STILL = 3  # the last samples must also be slow
AROUND = 3  # samples on each side, to locate the onset
QUICK = 40  # samples for which a change point is followed
KEPT = 160  # samples
WINDOWS = (20, 28, 40, 56, 80, 112, KEPT)
SIGMAS = 3.0  # standard errors by which a mean must exceed the tolerated limit
RARE_SIGMAS = 6.0  # and the level: each sample of each series can cause a false alarm
NEARLY = 0.95  # the level at an onset is as often measured below the limit as above
WARM_UP = 60  # maximum number of samples after a start in which times may still fall
FALLING = 0.02
BLOCK, BLOCKS = 20, 24  # samples per block; blocks from which the drift is estimated
PAUSES = 2  # longest and shortest samples of a block that do not count as drift
LEAST_DRIFT, MOST_DRIFT = 0.006, 0.04  # for FOLLOWED_SAMPLES or fewer; a longer mean drifts less
DRIFT_A_BLOCK = 0.002  # maximum, because few blocks give a poor estimate
MOST_SLOW = 50.0  # logarithm; higher values are clipped so that no sum overflows
LIVED = 200  # samples after which a level counts as established
SHORT = 60  # maximum length of a slowness that may be normal for the job
MORE = 1.5  # factor by which a slowness must exceed earlier ones in length or height
MOST_REGIMES = 64  # with more, nearly every sample has its own name, and nothing can be learned


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of the logarithm. slow: for the mean. tolerated: must be exceeded with certainty."""

    slow: float
    tolerated: float


# FALCON 2.2, step 4: less than 10 % is jitter. Communication varies more than compute (FALCON, table 2: CoV 0.29 for
# RDMA latency, 0.01 for a copy within a GPU), and Greyhound's detector calls a group degraded from 1.2 x on.
LIMITS = {
    Kind.ITERATION: Limits(math.log(1.10), math.log(1.07)),
    Kind.BUSY: Limits(math.log(1.10), math.log(1.07)),
    Kind.TRANSFER: Limits(math.log(1.20), math.log(1.14)),
}


def detect(
    value: Sequence[float],
    regimes: Sequence[str] | None = None,
    starts: Sequence[int] = (0,),
    kind: Kind = Kind.ITERATION,
) -> tuple[Point, ...]:
    """Return all points of one series, oldest first.

    The result is that of a Detector that gets the samples one by one.
    """
    return run(value, None, regimes, starts, kind)


def run(
    value: Sequence[float],
    newest: Sequence[int] | None,
    regimes: Sequence[str] | None,
    starts: Sequence[int],
    kind: Kind,
) -> tuple[Point, ...]:
    """Return all points of one series.

    Args:
        run_lengths: the result of RunLengths.add for each sample, if already computed (detect_numpy.py).
    """
    detector = Detector(kind)
    begins = frozenset(starts)
    regime = repeat("") if regimes is None else regimes
    told = repeat(None) if newest is None else newest
    for at, (one, its_regime, its_newest) in enumerate(zip(value, regime, told, strict=False)):
        detector.add(one, its_regime, at in begins, its_newest)
    return tuple(detector.points)


@dataclass(slots=True)
class Detector:
    """Detector for one series. points: all points found so far; the last one may be ongoing."""

    kind: Kind = Kind.ITERATION
    points: list[Point] = field(default_factory=list)
    _limits: Limits = field(init=False)
    _position: int = -1
    _levels: dict[str, Level] = field(default_factory=dict)
    _left: list[Level] = field(default_factory=list)  # established, slower levels that the job had before
    _run_lengths: RunLengths = field(default_factory=RunLengths)
    _last_two: tuple[float, float] | None = None
    _starting: list[float] | None = None  # samples since a start, until times no longer fall
    # The last samples minus their level; the same, clipped at MAX_DISTANCE; their positions.
    _off: deque[float] = field(default_factory=lambda: deque(maxlen=KEPT))
    _near: deque[float] = field(default_factory=lambda: deque(maxlen=KEPT))
    _positions: deque[int] = field(default_factory=lambda: deque(maxlen=KEPT))
    _changed_at: int = -1  # first sample after the followed change point
    # Healthy samples in blocks: mean without BLOCK_TRIM, and variance.
    _block: list[float] = field(default_factory=list)
    _blocks: deque[tuple[float, float]] = field(default_factory=lambda: deque(maxlen=BLOCKS))
    _noise: float = LEAST_NOISE
    _drift: float = LEAST_DRIFT
    _slowness: Slowness | None = None
    _short: list[tuple[int, float]] = field(default_factory=list)  # the last short slownesses: samples, mean

    def __post_init__(self) -> None:
        self._limits = LIMITS[self.kind]

    def add(self, value: float, regime: str = "", begins: bool = False, newest: int | None = None) -> None:
        """Add one time.

        A value that is not a time (0, NaN) takes a position and is otherwise ignored.

        Args:
            restarted: the job restarted before this sample.
        """
        self._position += 1
        if begins:
            self._restart()
        if not 0 < value < math.inf:
            return
        level = self._levels.get(regime)
        if level is None:
            if len(self._levels) >= MOST_REGIMES:
                return
            level = self._levels[regime] = Level()
        sample = math.log(value)
        if newest is None:
            newest = self._run_lengths.add(self._smoothed(sample) - (level.at if regime else 0.0))
        if self._starting is not None and not self._lies_still(sample):
            return
        if not level.count:
            level.learn(sample)
            self._noise = max(self._noise, level.noise)
            return
        if not level.fixed and self._slowness is None:
            moved = level.learn(sample)
            if moved:
                self._off = deque([off - moved for off in self._off], KEPT)
                self._near = deque(map(clipped, self._off), KEPT)
                self._noise = max(level.noise, self._noise if self._blocks else 0.0)
        level.seen += 1
        off = sample - level.at
        near = clipped(off)
        self._off.append(off)
        self._near.append(near)
        self._positions.append(self._position)
        if self._slowness is not None:
            self._slowness.add(off)
            self._look_for_relief(self._slowness)
            return
        self._block.append(near)
        if len(self._block) == BLOCK:
            self._end_block()
            self._measure(level)
        if newest:
            self._follow(self._position, near, newest)
        # Nearly all samples return here.
        if near >= self._limits.slow / 2:
            self._look_for_slowness(regime, level)
        elif near <= -self._limits.slow / 2:
            self._look_for_quickness(regime, level)

    def hold_against(self, limits: Limits) -> None:
        """Apply these limits from the next sample on. Points found before do not change."""
        self._limits = limits

    @property
    def slow(self) -> Point | None:
        """The ongoing slowness, or None."""
        return None if self._slowness is None else self.points[-1]

    def baseline(self, regime: str = "") -> float:
        """Return the healthy time in this regime, in the unit of the samples. 0 while it is not known."""
        level = self._levels.get(regime)
        return math.exp(level.at) if level is not None and level.known else 0.0

    def lately(self) -> float | None:
        """Return the mean of the last MIN_SLOW_SAMPLES samples over the healthy time (1.3: 30 % slower), or None for
        fewer.
        """
        if len(self._off) < LASTS:
            return None
        last = islice(self._off, len(self._off) - LASTS, None)
        return math.exp(min(sum(last) / LASTS, MOST_SLOW))

    def _smoothed(self, sample: float) -> float:
        """Return the median of this sample and the two before it: a single outlier is not a change."""
        before, last = self._last_two or (sample, sample)
        self._last_two = (last, sample)
        return sorted((before, last, sample))[1]

    # --- after a start

    def _restart(self) -> None:
        self._off.clear()
        self._near.clear()
        self._positions.clear()
        self._starting = []
        self._changed_at = -1

    def _lies_still(self, sample: float) -> bool:
        """Return True once times no longer fall after a start. Nothing is learned or tested before that."""
        assert self._starting is not None
        self._starting.append(sample)
        if len(self._starting) < LASTS:
            return False
        before, last = self._starting[-LASTS : -LASTS // 2], self._starting[-LASTS // 2 :]
        if len(self._starting) < WARM_UP and median(last) < median(before) - FALLING:
            return False
        self._starting = None
        return True

    # --- while it is healthy

    def _follow(self, position: int, near: float, newest: int) -> None:
        if near > 0 and (self._changed_at < 0 or position - self._changed_at > LASTS):
            self._changed_at = position - newest

    def _end_block(self) -> None:
        middle = sum(sorted(self._block)[PAUSES:-PAUSES]) / (BLOCK - 2 * PAUSES)
        self._blocks.append((middle, deviation(self._block) ** 2))
        self._block.clear()

    def _measure(self, level: Level) -> None:
        """Update the noise of samples and the drift of blocks.

        The newest two blocks are excluded, because they may belong to a slowness that is not detected yet. Older blocks
        may belong to a ramp or to small steps, which must not count as drift. The drift is therefore the median step
        from one block to the next, converted to the deviation of a normal distribution (its median is 0.6745
        deviations).
        """
        if len(self._blocks) < 5:
            return
        old = list(self._blocks)[:-2]
        noise = math.sqrt(median([variance for _, variance in old]))
        self._noise = max(LEAST_NOISE, noise, level.noise if len(old) < 5 else 0.0)
        step = median([abs(middle - before) for (before, _), (middle, _) in pairwise(old)]) / 0.6745
        between = max(0.0, step**2 / 2 - self._noise**2 / BLOCK)
        self._drift = max(LEAST_DRIFT, min(MOST_DRIFT, DRIFT_A_BLOCK * len(old), math.sqrt(between)))

    def _look_for_slowness(self, regime: str, level: Level) -> None:
        last, count = self._mean_of_last(), len(self._near)
        if last < self._limits.slow:
            return
        samples = list(self._near)
        since = self._position - self._changed_at + 1
        followed = self._changed_at >= 0 and LASTS <= since <= min(QUICK, count)
        for window in (since, *WINDOWS) if followed else WINDOWS:
            if window <= count and self._is_slow(samples[-window:], level):
                self._report(samples, window, last, regime, level)
                return

    def _look_for_quickness(self, regime: str, level: Level) -> None:
        if self._mean_of_last() <= -self._limits.slow and len(self._near) >= QUICK:
            samples = list(self._near)
            if sum(samples[-QUICK:]) / QUICK < -self._limits.slow:
                self._became_faster(samples, regime, level)

    def _mean_of_last(self) -> float:
        """Return the mean of the last MIN_SLOW_SAMPLES samples, or 0 for fewer."""
        count = len(self._near)
        return sum(islice(self._near, count - LASTS, count)) / LASTS if count >= LASTS else 0.0

    def _error(self, count: int, level: Level) -> float:
        """Return the standard error of the mean of `count` samples."""
        drift = min(self._drift, MOST_DRIFT * math.sqrt(QUICK / max(QUICK, count)))
        return math.sqrt(self._noise**2 * (1 / count + 1 / level.count) + drift**2)

    def _is_slow(self, samples: Sequence[float], level: Level) -> bool:
        limits, count = self._limits, len(samples)
        mean, error = sum(samples) / count, self._error(count, level)
        if mean < max(limits.slow, limits.tolerated + SIGMAS * error, RARE_SIGMAS * error):
            return False
        if sum(samples[-STILL:]) / STILL < 0.6 * mean:
            return False
        ordered = sorted(samples)
        if ordered[(count - 1) // 2] < limits.slow or ordered[count * 35 // 100] < 0.85 * limits.slow:
            return False
        return count >= WINDOWS[0] or ordered[count // 4] >= mean / 2

    def _report(self, samples: list[float], window: int, last: float, regime: str, level: Level) -> None:
        limits = self._limits
        known = next((one for one in self._left if abs(level.at + last - one.at) < limits.slow / 2), None)
        if known is not None:  # the job was as slow for a long time before it became faster
            self._left.remove(known)
            self._change_level(regime, known)
            return
        fit = ascending(smooth(samples))
        first = next((at for at, one in enumerate(fit) if one >= NEARLY * limits.slow), len(fit) - 1)
        mean = sum(samples[-window:]) / window
        if len(samples) - first < max(LASTS, self._usual(mean)):
            return
        chance = 0.5 * (1 + math.erf((mean - limits.slow) / self._error(window, level) / math.sqrt(2)))
        before = samples[max(0, first - QUICK) : first]
        self._slowness = Slowness(min(0.0, sum(before) / len(before)) if before else 0.0)
        for sample in islice(self._off, first, None):
            self._slowness.add(sample)
        self.points.append(Point(self._positions[first], self._position, self._slowness.slowdown(), chance))
        self._changed_at = -1
        self._block.clear()

    def _usual(self, mean: float) -> float:
        """Return how many samples may be as slow as `mean` without a report, because that has happened repeatedly.

        Examples are an evaluation every hundred iterations, or a job that fluctuates. The first two are reported.
        """
        those = [length for length, height in self._short if mean < MORE * height]
        return MORE * max(those) if len(those) >= 2 else 0.0

    def _became_faster(self, samples: list[float], regime: str, level: Level) -> None:
        """Start a new level. A faster job is a regime of its own."""
        if level.seen >= LIVED:
            self._left = [level, *self._left][:3]
        fresh = Level()
        for near in samples[-QUICK // 2 :]:
            fresh.learn(near + level.at)
        self._change_level(regime, fresh)
        self._blocks.clear()
        self._noise, self._drift = fresh.noise, LEAST_DRIFT

    def _change_level(self, regime: str, level: Level) -> None:
        self._levels[regime] = level
        self._off.clear()
        self._near.clear()
        self._positions.clear()
        self._block.clear()
        self._changed_at = -1

    # --- while it is slow

    def _look_for_relief(self, slowness: Slowness) -> None:
        limits, count, point = self._limits, len(self._near), self.points[-1]
        point = self.points[-1] = replace(point, slowdown=slowness.slowdown())
        if count < LASTS or self._mean_of_last() >= limits.slow:
            return
        samples = list(self._near)
        height = min(slowness.mean(), FARTHEST)
        for window in (LASTS, 2 * LASTS, 4 * LASTS):
            if window > count or self._position - point.alarm_index < window // 2:
                return
            now = sum(samples[-window:]) / window
            if now < limits.slow and now < height - 4 * self._noise / math.sqrt(window):
                break
        else:
            return
        begin = next(at for at, position in enumerate(self._positions) if position > point.alarm_index - STILL)
        fit = ascending([-one for one in smooth(samples[begin:])])
        first = begin + next((at for at, one in enumerate(fit) if -one < limits.slow), len(fit) - 1)
        slowdown = slowness.slowdown(without=count - first)
        self.points[-1] = replace(point, slowdown=slowdown, relief_index=self._positions[first])
        length = self._positions[first] - point.onset_index
        if length <= SHORT:
            self._short = [*self._short[-3:], (length, min(math.log1p(slowdown), FARTHEST))]
        self._slowness = None
        for _ in range(first):
            self._off.popleft()
            self._near.popleft()
            self._positions.popleft()


@dataclass(slots=True)
class Slowness:
    """Height of a slowness since its onset. rest_level: mean of the samples before the onset, if below their level."""

    rest: float
    _total: float = 0.0
    _ratios: float = 0.0
    _count: int = 0
    _last: deque[tuple[float, float]] = field(default_factory=lambda: deque(maxlen=KEPT))

    def add(self, sample: float) -> None:
        """Add a sample. A pause within the slowness counts no more than other samples."""
        if self._count >= LASTS:
            sample = min(sample, self._total / self._count + FARTHEST)
        ratio = math.exp(min(sample - self.rest, MOST_SLOW))
        self._total += sample
        self._ratios += ratio
        self._count += 1
        self._last.append((sample, ratio))

    def mean(self) -> float:
        return self._total / self._count

    def slowdown(self, without: int = 0) -> float:
        """Return the slowdown: 0.65 is 65 % slower.

        Args:
            without: number of last samples to exclude, at most HISTORY_SAMPLES. Ignored if these are all samples.
        """
        count = self._count - without
        if count <= 0 or without > len(self._last):
            return self._ratios / self._count - 1
        return (self._ratios - sum(ratio for _, ratio in islice(reversed(self._last), without))) / count - 1


def smooth(samples: Sequence[float]) -> list[float]:
    """Return the median of each sample and its SMOOTHING_RADIUS neighbours on each side.

    This removes pauses shorter than the radius and does not move steps.
    """
    return [median(samples[max(0, at - AROUND) : at + AROUND + 1]) for at in range(len(samples))]


def ascending(samples: Iterable[float]) -> list[float]:
    """Return the nearest sequence by least squares that never falls: pool adjacent violators (Ayer et al. 1955)."""
    pools: list[tuple[float, int]] = []
    for sample in samples:
        total, count = sample, 1
        while pools and pools[-1][0] * count >= total * pools[-1][1]:
            before, many = pools.pop()
            total, count = total + before, count + many
        pools.append((total, count))
    return [total / count for total, count in pools for _ in range(count)]
