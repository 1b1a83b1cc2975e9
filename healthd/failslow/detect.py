"""Detects the onset and relief of slowness in a series of times, one sample at a time and in constant memory.

FALCON (arXiv 2410.12588, section 4) finds a change point (healthd/failslow/bocd.py) and reports it if the means before
and after differ by 10 %. This rule reports most fluctuations of a job that fluctuates. It also misses slowness that
develops in steps below 10 %. This detector therefore compares samples with the level of their regime, which is learned
once (level.py). A sample is the logarithm of a time minus the level: 0.095 is 10 % slower.

- To find fast changes, the detector tests the samples since a change point. To find slow changes, it tests the last 20
to 160
  samples.
- The tested samples are slow if their mean is above 10 %, and if it exceeds 7 % by more than chance explains. Chance
  means the noise of the samples, the uncertainty of the level, and the drift of blocks of samples. Two thirds of the
  samples and the last samples must also be slow, because a few long pauses are not slowness. If fewer than 20 samples
  are tested, three quarters of them must be at least half as slow as their mean, because two disturbances close
  together are not slowness either.
- The slowness must have lasted for ten samples.
- The samples are fitted by an ascending sequence (isotonic regression). The onset is where this fit crosses 10 %. The
  relief is where a descending fit falls below 10 %.

The onset depends only on samples up to the alarm, so later samples never move it. docs/fail-slow.md, "How good it is",
gives the rates of false alarms and misses.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice, pairwise, repeat
from statistics import median

from healthd.failslow.bocd import RunLengths
from healthd.failslow.level import MAX_DISTANCE, MIN_NOISE, Level, clip, standard_deviation
from healthd.failslow.model import Kind, Point

MIN_SLOW_SAMPLES = 10  # minimum number of samples
LAST_SAMPLES = 3  # number of last samples that must also be slow
SMOOTHING_RADIUS = 3  # number of samples on each side, used to locate the onset
FOLLOWED_SAMPLES = 40  # number of samples for which a change point is tested after it was found
HISTORY_SAMPLES = 160  # samples
WINDOWS = (20, 28, 40, 56, 80, 112, HISTORY_SAMPLES)
SIGMAS = 3.0  # number of standard errors by which a mean must exceed the tolerated limit
RARE_SIGMAS = 6.0  # the same for the level; it is high because each sample of each series can cause a false alarm
# factor for the limit at an onset, because the level measured there is as often below the limit as above
ONSET_SHARE = 0.95
WARM_UP = 60  # maximum number of samples after a start during which times may still fall
WARM_UP_DROP = 0.02
BLOCK, BLOCKS = 20, 24  # samples per block; number of blocks used to estimate the drift
# number of longest samples, and of shortest samples, in a block that are ignored when the drift is measured
BLOCK_TRIM = 2
# for the mean of at most FOLLOWED_SAMPLES samples; the mean of more samples drifts less
MIN_DRIFT, MAX_DRIFT = 0.006, 0.04
DRIFT_PER_BLOCK = 0.002  # maximum drift; needed because an estimate from a few blocks is poor
MAX_LOG_RATIO = 50.0  # maximum logarithm; higher values are clipped so that no sum overflows
ESTABLISHED_SAMPLES = 200  # number of samples after which a level is established
SHORT_SLOWNESS_SAMPLES = 60  # maximum length of a slow period that may be normal for the job
EXCEEDS_USUAL = 1.5  # a slow period is reported if it exceeds earlier ones in length or height by this factor
# maximum number of regimes; with more, nearly every sample has its own regime, and no level can be learned
MAX_REGIMES = 64


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits, as logarithms.

    Attributes:
        slow: limit for the mean.
        tolerated: limit that the mean must exceed by more than chance explains.
    """

    slow: float
    tolerated: float


# FALCON 2.2, step 4: less than 10 % is jitter. Communication varies more than compute (FALCON, table 2: CoV 0.29 for
# RDMA latency, 0.01 for a copy within a GPU). Greyhound's detector therefore uses a factor of 1.2 for a group.
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
    """Return all points in one series, oldest first.

    The result equals that of a Detector that receives the samples one by one.
    """
    return run_detector(value, None, regimes, starts, kind)


def run_detector(
    value: Sequence[float],
    run_lengths: Sequence[int] | None,
    regimes: Sequence[str] | None,
    starts: Sequence[int],
    kind: Kind,
) -> tuple[Point, ...]:
    """Return all points in one series.

    Args:
        run_lengths: the result of RunLengths.add for each sample, if already computed (detect_numpy.py).
    """
    detector = Detector(kind)
    restarts = frozenset(starts)
    sample_regimes = repeat("") if regimes is None else regimes
    sample_run_lengths = repeat(None) if run_lengths is None else run_lengths
    for at, (time, sample_regime, sample_run_length) in enumerate(
        zip(value, sample_regimes, sample_run_lengths, strict=False)
    ):
        detector.add(time, sample_regime, at in restarts, sample_run_length)
    return tuple(detector.points)


@dataclass(slots=True)
class Detector:
    """Detector for one series. `points` are all points found so far; the last may be ongoing."""

    kind: Kind = Kind.ITERATION
    points: list[Point] = field(default_factory=list)
    _limits: Limits = field(init=False)
    _position: int = -1
    _levels: dict[str, Level] = field(default_factory=dict)
    _earlier_levels: list[Level] = field(default_factory=list)  # slower levels that were established earlier in the job
    _run_lengths: RunLengths = field(default_factory=RunLengths)
    _last_two: tuple[float, float] | None = None
    _starting: list[float] | None = None  # samples since the job's start; kept until the times no longer fall
    # The last samples minus their level, the same samples clipped at MAX_DISTANCE, and their positions.
    _off: deque[float] = field(default_factory=lambda: deque(maxlen=HISTORY_SAMPLES))
    _clipped: deque[float] = field(default_factory=lambda: deque(maxlen=HISTORY_SAMPLES))
    _positions: deque[int] = field(default_factory=lambda: deque(maxlen=HISTORY_SAMPLES))
    _changed_at: int = -1  # first sample after the followed change point
    # Blocks of healthy samples: the mean without the BLOCK_TRIM longest and shortest samples, and the variance.
    _block: list[float] = field(default_factory=list)
    _blocks: deque[tuple[float, float]] = field(default_factory=lambda: deque(maxlen=BLOCKS))
    _noise: float = MIN_NOISE
    _drift: float = MIN_DRIFT
    _slowness: Slowness | None = None
    _short_slownesses: list[tuple[int, float]] = field(
        default_factory=list
    )  # the last short slow periods: number of samples, and mean

    def __post_init__(self) -> None:
        self._limits = LIMITS[self.kind]

    def add(self, value: float, regime: str = "", restarted: bool = False, run_length: int | None = None) -> None:
        """Add one time.

        A value that is not a time (0, NaN) counts as a position but is otherwise ignored.

        Args:
            restarted: True if the job restarted before this sample.
        """
        self._position += 1
        if restarted:
            self._restart()
        if not 0 < value < math.inf:
            return
        level = self._levels.get(regime)
        if level is None:
            if len(self._levels) >= MAX_REGIMES:
                return
            level = self._levels[regime] = Level()
        sample = math.log(value)
        if run_length is None:
            run_length = self._run_lengths.add(self._smoothed(sample) - (level.mean if regime else 0.0))
        if self._starting is not None and not self._is_settled(sample):
            return
        if not level.count:
            level.learn(sample)
            self._noise = max(self._noise, level.noise)
            return
        if not level.is_fixed and self._slowness is None:
            moved = level.learn(sample)
            if moved:
                self._off = deque([off - moved for off in self._off], HISTORY_SAMPLES)
                self._clipped = deque(map(clip, self._off), HISTORY_SAMPLES)
                self._noise = max(level.noise, self._noise if self._blocks else 0.0)
        level.samples_since += 1
        off = sample - level.mean
        clipped_off = clip(off)
        self._off.append(off)
        self._clipped.append(clipped_off)
        self._positions.append(self._position)
        if self._slowness is not None:
            self._slowness.add(off)
            self._check_for_relief(self._slowness)
            return
        self._block.append(clipped_off)
        if len(self._block) == BLOCK:
            self._end_block()
            self._measure(level)
        if run_length:
            self._follow_change(self._position, clipped_off, run_length)
        # Nearly all samples are handled here.
        if clipped_off >= self._limits.slow / 2:
            self._check_for_slowness(regime, level)
        elif clipped_off <= -self._limits.slow / 2:
            self._check_for_speedup(regime, level)

    def set_limits(self, limits: Limits) -> None:
        """Apply these limits, starting with the next sample. Points already found do not change."""
        self._limits = limits

    @property
    def slow(self) -> Point | None:
        """The ongoing slow period, or None."""
        return None if self._slowness is None else self.points[-1]

    def baseline(self, regime: str = "") -> float:
        """Return the healthy time in this regime, in the unit of the samples, or 0 if it is not known yet."""
        level = self._levels.get(regime)
        return math.exp(level.mean) if level is not None and level.is_known else 0.0

    def recent_ratio(self) -> float | None:
        """Return the mean of the last MIN_SLOW_SAMPLES samples divided by the healthy time. 1.3 means 30 % slower.

        Return None if there are fewer samples.
        """
        if len(self._off) < MIN_SLOW_SAMPLES:
            return None
        last = islice(self._off, len(self._off) - MIN_SLOW_SAMPLES, None)
        return math.exp(min(sum(last) / MIN_SLOW_SAMPLES, MAX_LOG_RATIO))

    def _smoothed(self, sample: float) -> float:
        """Return the median of this sample and the two before it. A single outlier then does not look like a change."""
        before, last = self._last_two or (sample, sample)
        self._last_two = (last, sample)
        return sorted((before, last, sample))[1]

    # --- after a start

    def _restart(self) -> None:
        self._off.clear()
        self._clipped.clear()
        self._positions.clear()
        self._starting = []
        self._changed_at = -1

    def _is_settled(self, sample: float) -> bool:
        """Return True if the times no longer fall after a start. Before that, nothing is learned or tested."""
        assert self._starting is not None
        self._starting.append(sample)
        if len(self._starting) < MIN_SLOW_SAMPLES:
            return False
        before, last = (
            self._starting[-MIN_SLOW_SAMPLES : -MIN_SLOW_SAMPLES // 2],
            self._starting[-MIN_SLOW_SAMPLES // 2 :],
        )
        if len(self._starting) < WARM_UP and median(last) < median(before) - WARM_UP_DROP:
            return False
        self._starting = None
        return True

    # --- while it is healthy

    def _follow_change(self, position: int, clipped_off: float, run_length: int) -> None:
        if clipped_off > 0 and (self._changed_at < 0 or position - self._changed_at > MIN_SLOW_SAMPLES):
            self._changed_at = position - run_length

    def _end_block(self) -> None:
        middle = sum(sorted(self._block)[BLOCK_TRIM:-BLOCK_TRIM]) / (BLOCK - 2 * BLOCK_TRIM)
        self._blocks.append((middle, standard_deviation(self._block) ** 2))
        self._block.clear()

    def _measure(self, level: Level) -> None:
        """Update the noise of samples and the drift of blocks.

        The newest two blocks are excluded, because they may belong to slowness that is not detected yet. Older blocks
        may belong to a ramp or to small steps, which must not count as drift. The median of the steps from one block to
        the next is therefore used. It is converted to the deviation of a normal distribution (whose median is 0.6745
        deviations).
        """
        if len(self._blocks) < 5:
            return
        old = list(self._blocks)[:-2]
        noise = math.sqrt(median([variance for _, variance in old]))
        self._noise = max(MIN_NOISE, noise, level.noise if len(old) < 5 else 0.0)
        step = median([abs(middle - before) for (before, _), (middle, _) in pairwise(old)]) / 0.6745
        between = max(0.0, step**2 / 2 - self._noise**2 / BLOCK)
        self._drift = max(MIN_DRIFT, min(MAX_DRIFT, DRIFT_PER_BLOCK * len(old), math.sqrt(between)))

    def _check_for_slowness(self, regime: str, level: Level) -> None:
        last, count = self._recent_mean(), len(self._clipped)
        if last < self._limits.slow:
            return
        samples = list(self._clipped)
        since = self._position - self._changed_at + 1
        followed = self._changed_at >= 0 and MIN_SLOW_SAMPLES <= since <= min(FOLLOWED_SAMPLES, count)
        for window in (since, *WINDOWS) if followed else WINDOWS:
            if window <= count and self._is_slow(samples[-window:], level):
                self._report(samples, window, last, regime, level)
                return

    def _check_for_speedup(self, regime: str, level: Level) -> None:
        if self._recent_mean() <= -self._limits.slow and len(self._clipped) >= FOLLOWED_SAMPLES:
            samples = list(self._clipped)
            if sum(samples[-FOLLOWED_SAMPLES:]) / FOLLOWED_SAMPLES < -self._limits.slow:
                self._start_faster_level(samples, regime, level)

    def _recent_mean(self) -> float:
        """Return the mean of the last MIN_SLOW_SAMPLES samples, or 0 if there are fewer."""
        count = len(self._clipped)
        return (
            sum(islice(self._clipped, count - MIN_SLOW_SAMPLES, count)) / MIN_SLOW_SAMPLES
            if count >= MIN_SLOW_SAMPLES
            else 0.0
        )

    def _error(self, count: int, level: Level) -> float:
        """Return the standard error of the mean of `count` samples."""
        drift = min(self._drift, MAX_DRIFT * math.sqrt(FOLLOWED_SAMPLES / max(FOLLOWED_SAMPLES, count)))
        return math.sqrt(self._noise**2 * (1 / count + 1 / level.count) + drift**2)

    def _is_slow(self, samples: Sequence[float], level: Level) -> bool:
        limits, count = self._limits, len(samples)
        mean, error = sum(samples) / count, self._error(count, level)
        if mean < max(limits.slow, limits.tolerated + SIGMAS * error, RARE_SIGMAS * error):
            return False
        if sum(samples[-LAST_SAMPLES:]) / LAST_SAMPLES < 0.6 * mean:
            return False
        ordered = sorted(samples)
        if ordered[(count - 1) // 2] < limits.slow or ordered[count * 35 // 100] < 0.85 * limits.slow:
            return False
        return count >= WINDOWS[0] or ordered[count // 4] >= mean / 2

    def _report(self, samples: list[float], window: int, last: float, regime: str, level: Level) -> None:
        limits = self._limits
        earlier_level = next(
            (
                candidate
                for candidate in self._earlier_levels
                if abs(level.mean + last - candidate.mean) < limits.slow / 2
            ),
            None,
        )
        if earlier_level is not None:  # the job was this slow for a long time before it became faster
            self._earlier_levels.remove(earlier_level)
            self._change_level(regime, earlier_level)
            return
        fit = isotonic_fit(median_filter(samples))
        first = next((at for at, candidate in enumerate(fit) if candidate >= ONSET_SHARE * limits.slow), len(fit) - 1)
        mean = sum(samples[-window:]) / window
        if len(samples) - first < max(MIN_SLOW_SAMPLES, self._usual_length(mean)):
            return
        chance = 0.5 * (1 + math.erf((mean - limits.slow) / self._error(window, level) / math.sqrt(2)))
        before = samples[max(0, first - FOLLOWED_SAMPLES) : first]
        self._slowness = Slowness(min(0.0, sum(before) / len(before)) if before else 0.0)
        for sample in islice(self._off, first, None):
            self._slowness.add(sample)
        self.points.append(Point(self._positions[first], self._position, self._slowness.slowdown(), chance))
        self._changed_at = -1
        self._block.clear()

    def _usual_length(self, mean: float) -> float:
        """Return the length up to which a slow period with this mean is normal for the job and is not reported.

        Such periods have occurred repeatedly, for example an evaluation every hundred iterations, or in a job that
        fluctuates. The first two periods are reported.
        """
        lengths = [length for length, height in self._short_slownesses if mean < EXCEEDS_USUAL * height]
        return EXCEEDS_USUAL * max(lengths) if len(lengths) >= 2 else 0.0

    def _start_faster_level(self, samples: list[float], regime: str, level: Level) -> None:
        """Start a new level: the job became faster, which is a separate regime."""
        if level.samples_since >= ESTABLISHED_SAMPLES:
            self._earlier_levels = [level, *self._earlier_levels][:3]
        fresh = Level()
        for clipped_off in samples[-FOLLOWED_SAMPLES // 2 :]:
            fresh.learn(clipped_off + level.mean)
        self._change_level(regime, fresh)
        self._blocks.clear()
        self._noise, self._drift = fresh.noise, MIN_DRIFT

    def _change_level(self, regime: str, level: Level) -> None:
        self._levels[regime] = level
        self._off.clear()
        self._clipped.clear()
        self._positions.clear()
        self._block.clear()
        self._changed_at = -1

    # --- while it is slow

    def _check_for_relief(self, slowness: Slowness) -> None:
        limits, count, point = self._limits, len(self._clipped), self.points[-1]
        point = self.points[-1] = replace(point, slowdown=slowness.slowdown())
        if count < MIN_SLOW_SAMPLES or self._recent_mean() >= limits.slow:
            return
        samples = list(self._clipped)
        height = min(slowness.mean(), MAX_DISTANCE)
        for window in (MIN_SLOW_SAMPLES, 2 * MIN_SLOW_SAMPLES, 4 * MIN_SLOW_SAMPLES):
            if window > count or self._position - point.alarm_index < window // 2:
                return
            recent_mean = sum(samples[-window:]) / window
            if recent_mean < limits.slow and recent_mean < height - 4 * self._noise / math.sqrt(window):
                break
        else:
            return
        begin = next(at for at, position in enumerate(self._positions) if position > point.alarm_index - LAST_SAMPLES)
        fit = isotonic_fit([-sample for sample in median_filter(samples[begin:])])
        first = begin + next((at for at, sample in enumerate(fit) if -sample < limits.slow), len(fit) - 1)
        slowdown = slowness.slowdown(without=count - first)
        self.points[-1] = replace(point, slowdown=slowdown, relief_index=self._positions[first])
        length = self._positions[first] - point.onset_index
        if length <= SHORT_SLOWNESS_SAMPLES:
            self._short_slownesses = [*self._short_slownesses[-3:], (length, min(math.log1p(slowdown), MAX_DISTANCE))]
        self._slowness = None
        for _ in range(first):
            self._off.popleft()
            self._clipped.popleft()
            self._positions.popleft()


@dataclass(slots=True)
class Slowness:
    """Measures how slow a series has been since the onset of a slow period.

    `rest_level` is the mean of the samples before the onset, if it is below the level.
    """

    rest_level: float
    _total: float = 0.0
    _ratios: float = 0.0
    _count: int = 0
    _last: deque[tuple[float, float]] = field(default_factory=lambda: deque(maxlen=HISTORY_SAMPLES))

    def add(self, sample: float) -> None:
        """Add a sample. A pause is clipped, so that it has no more weight than any other sample."""
        if self._count >= MIN_SLOW_SAMPLES:
            sample = min(sample, self._total / self._count + MAX_DISTANCE)
        ratio = math.exp(min(sample - self.rest_level, MAX_LOG_RATIO))
        self._total += sample
        self._ratios += ratio
        self._count += 1
        self._last.append((sample, ratio))

    def mean(self) -> float:
        return self._total / self._count

    def slowdown(self, without: int = 0) -> float:
        """Return the slowdown. 0.65 is 65 % slower.

        Args:
            without: number of last samples to exclude, at most HISTORY_SAMPLES. If this would exclude all samples,
                none is excluded.
        """
        count = self._count - without
        if count <= 0 or without > len(self._last):
            return self._ratios / self._count - 1
        return (self._ratios - sum(ratio for _, ratio in islice(reversed(self._last), without))) / count - 1


def median_filter(samples: Sequence[float]) -> list[float]:
    """Replace each sample by the median of the sample and its SMOOTHING_RADIUS neighbours on each side.

    This removes pauses shorter than the radius without moving steps.
    """
    return [median(samples[max(0, at - SMOOTHING_RADIUS) : at + SMOOTHING_RADIUS + 1]) for at in range(len(samples))]


def isotonic_fit(samples: Iterable[float]) -> list[float]:
    """Return the best ascending fit to the samples (least squares).

    The method is pooling adjacent violators (Ayer et al. 1955).
    """
    pools: list[tuple[float, int]] = []
    for sample in samples:
        total, count = sample, 1
        while pools and pools[-1][0] * count >= total * pools[-1][1]:
            before, before_count = pools.pop()
            total, count = total + before, count + before_count
        pools.append((total, count))
    return [total / count for total, count in pools for _ in range(count)]
