"""A running job's iteration times as a series: the samples, the start of the slowness, and the lost time."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field
from typing import NamedTuple

from healthd.failslow.detect import HISTORY_SAMPLES, Detector, Limits
from healthd.failslow.model import Kind, Point


class Sample(NamedTuple):
    """The duration of one of a job's iterations, as measured by one source.

    Attributes:
        job: the job's number in Slurm ("4711").
        series: the series within the job and the source: a rank's connection or a kind of counter ("ib").
        time: time at which the iteration ended, epoch seconds.
        value: seconds, more than 0.
        kind: ITERATION, or BUSY for a rank's own work in an iteration.
        steps: number of iterations of which `value` is the mean.
    """

    job: str
    series: str
    time: float
    value: float
    kind: Kind = Kind.ITERATION
    steps: int = 1


MAX_POINTS = 4  # if a job becomes slow repeatedly, only its last points are kept
# share of slow_percent that must be exceeded beyond chance (7 % for a limit of 10 %, as in detect.LIMITS)
CERTAIN_SHARE = 0.7


def detector_limits(percent: float) -> Limits:
    """Return the detector's limits for a given slow_percent."""
    return Limits(math.log1p(percent / 100), math.log1p(CERTAIN_SHARE * percent / 100))


@dataclass(slots=True)
class Series:
    """One series and its detector.

    Attributes:
        since: time at which the current slowness began (epoch seconds), or None.
        lost_seconds: time lost in all slow iterations.
    """

    kind: Kind
    percent: float
    lost_seconds: float = 0.0
    since: float | None = None
    detector: Detector = field(init=False)
    _times: deque[float] = field(default_factory=lambda: deque(maxlen=2 * HISTORY_SAMPLES))

    def __post_init__(self) -> None:
        self.detector = Detector(self.kind)
        self.detector.set_limits(detector_limits(self.percent))

    def set_percent(self, percent: float) -> None:
        self.percent = percent
        self.detector.set_limits(detector_limits(percent))

    @property
    def slow(self) -> Point | None:
        return self.detector.slow

    @property
    def healthy(self) -> float:
        """The healthy time in seconds, or 0 if it is not known yet."""
        return self.detector.baseline()

    @property
    def ratio(self) -> float | None:
        """The mean of the last samples divided by the healthy time, or None if there are too few samples."""
        return self.detector.recent_ratio()

    def add(self, value: float, time: float, steps: float = 1.0) -> bool:
        """Add the mean duration of `steps` steps, in seconds. Return True if the series became slow or recovered."""
        detector = self.detector
        before = detector.slow
        detector.add(value)
        self._times.append(time)
        now = detector.slow
        if now is None:
            self.since = None
            return before is not None
        healthy = self.healthy
        if before is None:
            slow_so_far = now.alarm_index - now.onset_index + 1
            self.since = self._times[-min(slow_so_far, len(self._times))]
            self.lost_seconds += slow_so_far * steps * healthy * max(now.slowdown, 0.0)
            del detector.points[:-MAX_POINTS]
            return True
        self.lost_seconds += steps * max(value - healthy, 0.0)
        return False
