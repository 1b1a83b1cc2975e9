"""A queue of future events, in order of time."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from typing import Any

from history.draw import Draw, wait
from history.size import DAY


class Clock:
    def __init__(self) -> None:
        self._heap: list[tuple[int, int, Callable[[int, Any], None], Any]] = []
        self._number = 0

    def at(self, when: int, action: Callable[[int, Any], None], about: Any = None) -> None:
        """Schedule the call what(when, about).

        Events of the same second run in the order in which they were scheduled.
        """
        self._number += 1
        heapq.heappush(self._heap, (when, self._number, action, about))

    def run(self, until: int) -> None:
        """Run all events before `until`."""
        heap, pop = self._heap, heapq.heappop
        while heap and heap[0][0] < until:
            when, _, action, about = pop(heap)
            action(when, about)

    def by_chance(self, start: int, until: int, a_day: float, draw: Draw, action: Callable[[int, Any], None]) -> None:
        """Schedule calls of what(when, None) at random times from `start` to `until`, on average `a_day` times a
        day."""

        def happens(now: int, _: None) -> None:
            action(now, None)
            following(now)

        def following(now: int) -> None:
            when = now + max(1, int(wait(draw, DAY / a_day)))
            if when < until:
                self.at(when, happens)

        following(start)
