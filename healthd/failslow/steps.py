"""Steps: simultaneous changes in several series, and the values of each series before and after. Pure functions."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from healthd.failslow import windows
from healthd.failslow.groups import identity
from healthd.failslow.model import Evidence, Point, Series
from healthd.failslow.windows import Change, Channel, changed, position

TOGETHER = 20  # samples between two onsets of one step; each onset is accurate to 10
LASTING = 10  # samples; a shorter step names no suspect
STEPS = 1.05  # a member that is slower by this factor takes part in a step


@dataclass(slots=True)
class Step:
    """A simultaneous change. points: by index of the series. max_samples: number of samples to evaluate after the
    onset.
    """

    leader: int
    points: dict[int, Point] = field(default_factory=dict)
    longest: int = windows.AFTER[0]


@dataclass(frozen=True, slots=True)
class Observed:
    """Input of the comparison. points: of each series. In this module, a member is the index of a series."""

    series: Sequence[Series]
    points: Sequence[Sequence[Point]]
    evidence: Sequence[Evidence]

    def tells(self, one: int) -> bool:
        series = self.series[one]
        return series.busy is not None or series.wait is not None or series.transfer is not None

    def steps(self, members: Sequence[int]) -> Iterator[Step]:
        """Yield the steps. Points whose onsets are at most MAX_ONSET_DISTANCE samples after the first one form one
        step.
        """
        left = sorted(
            ((self.series[one].index[point.onset_index], identity(self.series[one]), one, point))
            for one in members
            for point in self.points[one]
        )
        while left:
            _, _, leader, first = left[0]
            step, rest = Step(leader, {leader: first}), []
            index = self.series[leader].index
            after = first.onset_index + 4 * TOGETHER
            farthest = index[after] if after < len(index) else math.inf
            for nth, entry in enumerate(left[1:], 1):
                when, _, one, point = entry
                if when > farthest:
                    rest += left[nth:]
                    break
                there = position(self.series[leader], first.onset_index, self.series[one])
                if one not in step.points and abs(there - point.onset_index) <= TOGETHER:
                    step.points[one] = point
                else:
                    rest.append(entry)
            yield step
            left = rest

    def window(self, step: Step, one: int) -> tuple[int, int]:
        """Return the begin and the end of the step in this series."""
        point, series = step.points.get(one), self.series[one]
        leader, first = self.series[step.leader], step.points[step.leader]
        onset = point.onset_index if point else position(leader, first.onset_index, series)
        if point:
            return onset, len(series.value) if point.relief_index is None else point.relief_index
        if first.relief_index is None:
            return onset, len(series.value)
        # The same duration as for the leader, limited to the samples of this series.
        return onset, max(position(leader, first.relief_index, series), onset)

    def changes(self, step: Step, members: Iterable[int], channel: Channel) -> dict[int, Change]:
        found = {}
        for one in members:
            onset, end = self.window(step, one)
            change = changed(self.series[one], self.points[one], onset, min(end, onset + step.longest), channel)
            if change is not None:
                found[one] = change
        return found

    def values(self, step: Step, members: Iterable[int]) -> dict[int, float]:
        return {one: change.ratio for one, change in self.changes(step, members, windows.value).items()}

    def lasts(self, step: Step, one: int, samples: int = LASTING) -> bool:
        begin, end = self.window(step, one)
        return min(end, len(self.series[one].value)) - begin >= samples

    def overlap(self, alone: Step, step: Step, one: int) -> bool:
        begin, end = self.window(alone, one)
        other_begin, other_end = self.window(step, one)
        return begin < other_end + TOGETHER and other_begin < end + TOGETHER

    def first(self, points: Mapping[int, Point]) -> int:
        return min(
            points, key=lambda one: (self.series[one].index[points[one].onset_index], identity(self.series[one]))
        )

    def point(self, step: Step, ones: Sequence[int]) -> Point:
        """Return the first point of the members in this step, otherwise that of the leader."""
        own = [one for one in ones if one in step.points]
        if not own:
            return step.points[step.leader]
        return step.points[min(own, key=lambda one: (step.points[one].onset_index, identity(self.series[one])))]
