"""The node's readings of the last hour, so that there is a "before" when a job becomes slow.

Jobs come, go and become slow as their users like: the node is read no more often for that.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from healthd.failslow.live.evidence import Said, evidence
from healthd.failslow.live.node_reading import Reading
from healthd.failslow.model import Cause
from healthd.host.wakeup import FOREVER

EACH_SECONDS = 60.0
KEPT = 60
BEFORE = 10  # readings before the onset that it is compared with
FRESH_SECONDS = 10.0  # one that is no older is "now"


@dataclass(slots=True)
class Readings:
    """read: the node as it is now. deadline: when it is read next (monotonic), FOREVER while no job is watched."""

    read: Callable[[], Reading]
    deadline: float = FOREVER
    _next: float = 0.0
    _fresh_until: float = 0.0
    _kept: deque[Reading] = field(default_factory=lambda: deque(maxlen=KEPT))

    def step(self, now: float, wanted: bool) -> None:
        """wanted: a job is watched. Where none is nothing is read, and what was read is forgotten."""
        if not wanted:
            self._kept.clear()
            self.deadline = FOREVER
            return
        if now >= self._next:
            self._next = now + EACH_SECONDS
            self._take(now)
        self.deadline = self._next

    def _take(self, now: float) -> None:
        self._fresh_until = now + FRESH_SECONDS
        self._kept.append(self.read())

    def evidence(self, onset: float | None, cause: Cause, gpu: str, now: float) -> tuple[Said, ...]:
        """What changed since the onset (epoch seconds). A clock that was set back since gives nothing wrong, for only
        what was read in order counts."""
        if now >= self._fresh_until:
            self._take(now)
        if not self._kept:
            return ()
        newest = self._kept[-1].time
        ordered = [one for one in self._kept if one.time <= newest]
        began = newest if onset is None else onset
        before = [one for one in ordered if one.time < began][-BEFORE:]
        since = [one for one in ordered if one.time >= began] or ordered[-1:]
        return evidence(before, since, cause, gpu)
