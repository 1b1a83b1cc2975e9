"""Finds steps (simultaneous changes in several series), and the position of a step in each series.

All functions are pure.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from healthd.failslow import windows
from healthd.failslow.groups import sort_key
from healthd.failslow.model import Evidence, Point, Series
from healthd.failslow.windows import Change, Channel, measure_change, position

# maximum number of samples between two onsets of one step; each onset is accurate to 10 samples
MAX_ONSET_DISTANCE = 20
MIN_LENGTH = 10  # in samples; no suspect is named for a shorter step
SLOWER_RATIO = 1.05  # a member that becomes slower by this factor is part of a step


@dataclass(slots=True)
class Step:
    """A simultaneous change.

    Attributes:
        points: points by series index.
        max_samples: maximum number of samples to evaluate after the onset.
    """

    leader: int
    points: dict[int, Point] = field(default_factory=dict)
    max_samples: int = windows.AFTER_SAMPLES[0]


@dataclass(frozen=True, slots=True)
class Observed:
    """The input for the comparison.

    `points` are the points in each series. In this module, "member" means the index of a series.
    """

    series: Sequence[Series]
    points: Sequence[Sequence[Point]]
    evidence: Sequence[Evidence]

    def has_own_times(self, member: int) -> bool:
        series = self.series[member]
        return series.busy is not None or series.wait is not None or series.transfer is not None

    def steps(self, members: Sequence[int]) -> Iterator[Step]:
        """Yield the steps.

        Points form one step if their onsets are at most MAX_ONSET_DISTANCE samples after the first.
        """
        remaining = sorted(
            ((self.series[member].index[point.onset_index], sort_key(self.series[member]), member, point))
            for member in members
            for point in self.points[member]
        )
        while remaining:
            _, _, leader, first = remaining[0]
            step, later = Step(leader, {leader: first}), []
            index = self.series[leader].index
            after = first.onset_index + 4 * MAX_ONSET_DISTANCE
            farthest = index[after] if after < len(index) else math.inf
            for nth, entry in enumerate(remaining[1:], 1):
                onset_index, _, member, point = entry
                if onset_index > farthest:
                    later += remaining[nth:]
                    break
                expected = position(self.series[leader], first.onset_index, self.series[member])
                if member not in step.points and abs(expected - point.onset_index) <= MAX_ONSET_DISTANCE:
                    step.points[member] = point
                else:
                    later.append(entry)
            yield step
            remaining = later

    def window(self, step: Step, member: int) -> tuple[int, int]:
        """Return the beginning and end of the step in this series."""
        point, series = step.points.get(member), self.series[member]
        leader, leader_point = self.series[step.leader], step.points[step.leader]
        onset = point.onset_index if point else position(leader, leader_point.onset_index, series)
        if point:
            return onset, len(series.value) if point.relief_index is None else point.relief_index
        if leader_point.relief_index is None:
            return onset, len(series.value)
        # Use the duration of the step in the leading series, limited to the samples that this series has.
        return onset, max(position(leader, leader_point.relief_index, series), onset)

    def changes(self, step: Step, members: Iterable[int], channel: Channel) -> dict[int, Change]:
        found = {}
        for member in members:
            onset, end = self.window(step, member)
            change = measure_change(
                self.series[member], self.points[member], onset, min(end, onset + step.max_samples), channel
            )
            if change is not None:
                found[member] = change
        return found

    def value_ratios(self, step: Step, members: Iterable[int]) -> dict[int, float]:
        return {member: change.ratio for member, change in self.changes(step, members, windows.value).items()}

    def is_long_enough(self, step: Step, member: int, samples: int = MIN_LENGTH) -> bool:
        begin, end = self.window(step, member)
        return min(end, len(self.series[member].value)) - begin >= samples

    def overlaps(self, own_step: Step, step: Step, member: int) -> bool:
        begin, end = self.window(own_step, member)
        other_begin, other_end = self.window(step, member)
        return begin < other_end + MAX_ONSET_DISTANCE and other_begin < end + MAX_ONSET_DISTANCE

    def first_member(self, points: Mapping[int, Point]) -> int:
        return min(
            points,
            key=lambda member: (self.series[member].index[points[member].onset_index], sort_key(self.series[member])),
        )

    def suspect_point(self, step: Step, members: Sequence[int]) -> Point:
        """Return the first point of the members in this step.

        If they have none, return the point of the leading series.
        """
        own = [member for member in members if member in step.points]
        if not own:
            return step.points[step.leader]
        return step.points[
            min(own, key=lambda member: (step.points[member].onset_index, sort_key(self.series[member])))
        ]
