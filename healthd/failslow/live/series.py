"""One series of times while it runs: since when it is slow, and what that has cost so far."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field

from healthd.failslow.detect import KEPT, Detector, Limits
from healthd.failslow.model import Kind, Point

POINTS = 4  # of a job that becomes slow again and again only the last are kept
STRICTER = 0.7  # of slow_percent: what must be exceeded for certain (detect.LIMITS: 7 % of 10 %)


def limits_of(percent: float) -> Limits:
    """slow_percent as the detector knows it."""
    return Limits(math.log1p(percent / 100), math.log1p(STRICTER * percent / 100))


@dataclass(slots=True)
class Series:
    """since: when the slowness that lasts began (epoch seconds), None if there is none. lost_seconds: of all iterations
    that were slow, what each took longer than a healthy one."""

    kind: Kind
    percent: float
    lost_seconds: float = 0.0
    since: float | None = None
    detector: Detector = field(init=False)
    _times: deque[float] = field(default_factory=lambda: deque(maxlen=2 * KEPT))

    def __post_init__(self) -> None:
        self.detector = Detector(self.kind)
        self.detector.hold_against(limits_of(self.percent))

    def change_percent(self, percent: float) -> None:
        self.percent = percent
        self.detector.hold_against(limits_of(percent))

    @property
    def slow(self) -> Point | None:
        return self.detector.slow

    def add(self, value: float, time: float, steps: float = 1.0) -> bool:
        """value: seconds of one step, in the mean of so many. True: it became slow, or recovered."""
        detector = self.detector
        before = detector.slow
        detector.add(value)
        self._times.append(time)
        now = detector.slow
        if now is None:
            self.since = None
            return before is not None
        healthy = detector.baseline()
        if before is None:
            slow_so_far = now.alarm_index - now.onset_index + 1
            self.since = self._times[-min(slow_so_far, len(self._times))]
            self.lost_seconds += slow_so_far * steps * healthy * max(now.slowdown, 0.0)
            del detector.points[:-POINTS]
            return True
        self.lost_seconds += steps * max(value - healthy, 0.0)
        return False
