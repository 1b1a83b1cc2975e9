"""Compares series with their peers, to find the component that causes slowness. All functions are pure.

A collective makes every rank of a gang equally slow. A step in all iteration times therefore shows only that the job is
slow. In only 1.7 % of straggling jobs, slow workers explain more than half of the slowdown (Lin et al., OSDI 2025,
arXiv 2505.05713). A suspect is therefore a component whose own time rose

  against its own baseline   and   against its peers, by more than a limit times the median of the peers' changes.

The limit is 1.1 for compute and for whole iterations (FALCON, arXiv 2410.12588, step 5). It is 1.2 for communication,
as in FALCON's released detector, because communication varies more (FALCON's table 2: a CoV of 0.29 between nodes, and
0.01 for a copy within a GPU). The rise must also exceed MIN_STANDARD_ERRORS standard errors, which include the series's
own scatter and the spread of the peers. In a gang, the time that rose must also make up MIN_EXPLAINED_SHARE of the time
that an iteration lost. The median is the upper median of all peers, including the suspect. If half of a role or more is
slow, the slow members are not a minority, so no member is named. There is one exception: if the slow members are one of
at least four nodes, the other nodes are the peers (suspects.py).

An iteration consists of busy (compute), transfer, wait, and the rest, which is host time. A rank that only waits is a
victim. groups.py defines the peers with the same role. No member is named in a role with fewer than MIN_PEERS members,
and no group is named if there are fewer than MIN_PEERS groups. A node can be named without peers if conditions on the
node cover the onset and the times of the node's ranks do not contradict this.

No component is named for slowness shorter than MIN_LENGTH samples. The confidence depends on four facts: an excess of
1.2 (for communication 1.4); twice the required number of standard errors; seven or more other peers; agreeing
conditions on the node. Three of these facts give high confidence, two give medium confidence. Exceptions:

- If three or more ranks become slow at once and there are no conditions on the node, the confidence is not high,
  because the common cause is not in the data.
- If busy time rises but no iteration becomes slower (the rank has slack), the confidence is low. In this case, the rise
  must be at least 1.25 and last three times as long.
- If the rise is PAUSE_EXCESS or more, but more than MAX_FAST_SHARE of the samples are as fast as before, the confidence
  is low.
- Conditions on a node alone give medium confidence, or low if they were open during the whole baseline.

Points: if most peers of a role become slow together and do not wait for each other, one slow job replaces the points of
their series. But if a share of WHOLE_SHARE of all series becomes slow together, the points are kept. This depends only
on samples up to the alarm, so later samples never remove a point. A verdict uses the first 50 samples after the onset,
or the first 200 if the first 50 show no component.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise

from healthd.failslow import windows
from healthd.failslow.detect import detect
from healthd.failslow.groups import Pool, find_pools, find_roles, sort_key
from healthd.failslow.model import Cause, Diagnosis, Evidence, Kind, Point, Series, SlowJob, Suspect
from healthd.failslow.node_evidence import suspect_by_evidence
from healthd.failslow.outliers import (
    COMMUNICATION_LIMIT,
    LIMIT,
    MIN_EXPLAINED_SHARE,
    MIN_PEERS,
    Outlier,
    find_host_outliers,
    find_outliers,
    link_cause,
)
from healthd.failslow.steps import MAX_ONSET_DISTANCE, MIN_LENGTH, SLOWER_RATIO, Observed, Step
from healthd.failslow.suspects import (
    find_slow_groups,
    find_slow_node,
    name_suspects,
    node_suspect,
    slow_node_cause,
    too_few_nodes_text,
)
from healthd.failslow.windows import Change, measure_change, position

SLACK_LIMIT = 1.25  # for busy time only
WHOLE_SHARE = 0.9
MAX_COMPARED = 64  # maximum number of peers to compare; from a larger role, an even selection is used


def compare_peers(
    series: Sequence[Series], points: Sequence[Sequence[Point]], evidence: Sequence[Evidence] = ()
) -> Diagnosis:
    """Compare series with their peers. The order of the series affects only the order of Diagnosis.points.

    Args:
        points: the points in each series.
    """
    comparison = _PeerComparison(Observed(series, points, evidence))
    if not any(points) and not any(item.busy is not None for item in series):
        return Diagnosis(tuple(tuple(series_points) for series_points in points))
    for pool in find_pools(series):
        comparison.compare_pool(pool)
    key = {id(item): (item.point.onset_index if item.point else 0, item.subject) for item in comparison.suspects}
    return Diagnosis(
        points=tuple(
            tuple(point for point in series_points if (at, point) not in comparison.shared)
            for at, series_points in enumerate(points)
        ),
        suspects=tuple(sorted(comparison.suspects, key=lambda item: (*key[id(item)], item.cause.value))),
        slow_jobs=tuple(sorted(comparison.job_slow, key=lambda item: (item.onset, item.group, item.series))),
    )


class _PeerComparison:
    def __init__(self, observed: Observed) -> None:
        self.observed = observed
        self.suspects: list[Suspect] = []
        self.job_slow: list[SlowJob] = []
        self.shared: set[tuple[int, Point]] = set()  # points replaced by one slow job

    # --- steps and their kinds

    def compare_pool(self, pool: Pool) -> None:
        members = sorted(pool.members, key=lambda member: sort_key(self.observed.series[member]))
        timed = [member for member in members if self.observed.has_own_times(member)]
        role_by_member = self._find_roles(members)
        steps = list(self.observed.steps(members))
        for step in steps:
            ratios = self.observed.value_ratios(step, _sample_role(members))
            is_common = _is_share_slower(ratios.values(), 0.5)
            if timed and is_common:
                suspect_count = len(self.suspects)
                self._compare_gang(step, members, role_by_member)
                self._find_later(step, members, role_by_member, suspect_count)
            elif pool.synchronous and is_common:
                self._add_slow_job(
                    step,
                    members,
                    "all of its peers became slow together, because a collective makes every rank equally slow",
                )
            else:
                is_whole = _is_share_slower(ratios.values(), WHOLE_SHARE)
                for role in sorted({role_by_member[member] for member in step.points}):
                    self._compare_role(step, role, is_whole)
        if timed:
            self._find_slack(members, role_by_member, steps)

    def _find_roles(self, members: Sequence[int]) -> dict[int, tuple[int, ...]]:
        def level(member: int) -> float | None:
            series = self.observed.series[member]
            for channel in (windows.busy, windows.transfer) if self.observed.has_own_times(member) else ():
                found = windows.rest_level(series, channel)
                if found is not None:
                    return found
            return windows.rest_level(series, windows.value)

        return {member: role for role in find_roles(self.observed.series, members, level) for member in role}

    def _compare_gang(self, step: Step, members: Sequence[int], role_by_member: Mapping[int, tuple[int, ...]]) -> None:
        if not self.observed.is_long_enough(step, step.leader):
            self._add_slow_job(step, members, f"it lasted less than {MIN_LENGTH} samples, too short to find the cause")
            return
        for max_samples in windows.AFTER_SAMPLES:
            limited_step = replace(step, max_samples=max_samples)
            values = self.observed.changes(limited_step, members, windows.value)
            lost = statistics.median(change.increase for change in values.values())
            busy = self.observed.changes(limited_step, members, windows.busy)
            transfer = self.observed.changes(limited_step, members, windows.transfer)
            host = self.observed.changes(limited_step, members, windows.residual)
            found: list[Outlier] = []
            for role in sorted(set(role_by_member.values())):
                if len(role) < MIN_PEERS:
                    continue
                found += find_outliers(self.observed, role, busy, LIMIT, lost, Kind.BUSY)
                found += find_outliers(self.observed, role, transfer, COMMUNICATION_LIMIT, lost, Kind.TRANSFER)
                named_members = {outlier.member for outlier in found}
                found += [
                    outlier
                    for outlier in find_host_outliers(role, host, values, lost)
                    if outlier.member not in named_members
                ]
            if found:
                self.suspects += name_suspects(self.observed, step, members, found)
                return
            groups = find_slow_groups(self.observed, step, members, transfer, lost)
            if groups:
                self.suspects += groups
                return
            node = find_slow_node(self.observed, role_by_member, busy, transfer, host, values, lost)
            if node is not None and node.node_count >= MIN_PEERS:
                self.suspects.append(node_suspect(self.observed, step, node))
                return
        cause, reason = self._job_cause(role_by_member, busy, transfer, host, lost)
        is_whole = node is not None and node.whole
        if node is not None and is_whole:
            cause, reason = slow_node_cause(self.observed, node), too_few_nodes_text(self.observed, node)
        largest_role = max(len(role) for role in role_by_member.values())
        if largest_role < MIN_PEERS:
            reason = _too_few_text(largest_role)
        self._add_slow_job(step, members, reason, cause, {**busy, **transfer}, is_whole)

    def _find_later(
        self, step: Step, members: Sequence[int], role_by_member: Mapping[int, tuple[int, ...]], suspects_before: int
    ) -> None:
        """Find ranks that became slow or recovered during the step, using each rank's own time.

        The iteration time does not show such changes, because it follows the slowest rank.

        Args:
            suspects_before: number of suspects before this step.
        """
        begin, end = self.observed.window(step, step.leader)
        if min(end, len(self.observed.series[step.leader].value)) - begin < MAX_ONSET_DISTANCE + MIN_LENGTH:
            return
        named_series = {name for item in self.suspects[suspects_before:] for name in item.series}
        for role in sorted(set(role_by_member.values())):
            if len(role) < MIN_PEERS:
                continue
            own_times = {
                item: values for item in role if (values := _own_times(self.observed.series[item])) is not None
            }
            for item in _risen_members(own_times, LIMIT):
                series = self.observed.series[item]
                begin, end = self.observed.window(step, item)
                is_free = series.name not in named_series
                for point in detect(own_times[item], series.regimes, series.starts, Kind.BUSY):
                    relief = len(series.value) if point.relief_index is None else point.relief_index
                    if abs(point.onset_index - begin) <= MAX_ONSET_DISTANCE:
                        if not is_free and relief + MAX_ONSET_DISTANCE < end:
                            self._set_relief(suspects_before, series.name, relief)
                            is_free = True
                    elif is_free and begin < point.onset_index < end - MIN_LENGTH:
                        self._add_joined(Step(item, {item: point}), members, role)

    def _set_relief(self, suspects_before: int, name: str, relief: int) -> None:
        for at, item in enumerate(self.suspects[suspects_before:], suspects_before):
            if item.series == (name,) and item.point is not None:
                self.suspects[at] = replace(item, point=replace(item.point, relief_index=relief))

    def _add_joined(self, step: Step, members: Sequence[int], role: Sequence[int]) -> None:
        """Add a suspect that became slow while others were already slow."""
        member = step.leader
        if not self.observed.is_long_enough(step, member):
            return
        values = self.observed.changes(step, role, windows.value)
        if member not in values:
            return
        lost = statistics.median(change.increase for change in values.values())
        found = [
            *find_outliers(
                self.observed, role, self.observed.changes(step, role, windows.busy), LIMIT, lost, Kind.BUSY, (member,)
            ),
            *find_outliers(
                self.observed,
                role,
                self.observed.changes(step, role, windows.transfer),
                COMMUNICATION_LIMIT,
                lost,
                Kind.TRANSFER,
                (member,),
            ),
            *find_host_outliers(role, self.observed.changes(step, role, windows.residual), values, lost, (member,)),
        ]
        if found:
            slower = replace(step.points[member], slowdown=max(values[member].ratio - 1, 0.0))
            self.suspects += name_suspects(self.observed, replace(step, points={member: slower}), members, found[:1])

    def _job_cause(
        self,
        role_by_member: Mapping[int, tuple[int, ...]],
        busy: Mapping[int, Change],
        transfer: Mapping[int, Change],
        host: Mapping[int, Change],
        lost: float,
    ) -> tuple[Cause, str]:
        """Return the cause if there is no outlier but one kind of time rose in at least half of a role."""
        largest_increase, cause, reason = (
            MIN_EXPLAINED_SHARE * lost,
            Cause.UNKNOWN,
            "no rank's busy or transfer time rose more than its peers'",
        )
        all_roles = sorted(set(role_by_member.values()))
        for changes, whole_cause, part_cause, texts in (
            (busy, Cause.IMBALANCE, Cause.COMPUTE, ("busy time rose", ", so all have more work")),
            (
                host,
                Cause.IMBALANCE,
                Cause.COMPUTE_CPU,
                ("the time that is neither busy, wait nor transfer rose", ", possibly from data loading"),
            ),
            (transfer, Cause.COMMUNICATION, Cause.COMMUNICATION, ("transfer time rose", "")),
        ):
            for role in all_roles:
                measured = [member for member in role if member in changes]
                risen = [member for member in measured if changes[member].increase >= MIN_EXPLAINED_SHARE * lost]
                if len(measured) * 2 <= len(role) or len(risen) * 2 < len(measured):
                    continue
                increase = statistics.median(changes[member].increase for member in risen)
                if increase > largest_increase and (len(role) >= MIN_PEERS or len(all_roles) == 1):
                    is_part = len(risen) < WHOLE_SHARE * len(measured)
                    role_cause = (
                        link_cause(self.observed, role)
                        if whole_cause is Cause.COMMUNICATION
                        else part_cause
                        if is_part
                        else whole_cause
                    )
                    location = (
                        self._part_text(risen, measured) if is_part else f"in {self._role_text(role, len(all_roles))}"
                    )
                    largest_increase, cause = increase, role_cause
                    reason = f"{texts[0]} {location}{_majority_text(risen, measured) if is_part else texts[1]}"
        return cause, reason

    def _role_text(self, role: Sequence[int], role_count: int) -> str:
        name = self.observed.series[role[0]].group
        return "all peers" if role_count == 1 else f"group {name}" if name else f"{len(role)} peers of one role"

    def _part_text(self, risen: Sequence[int], members: Sequence[int]) -> str:
        """Return "on node gpu-0 (4 of 8 ranks)" if these are all ranks on one node, otherwise "in 4 of 8 ranks"."""
        kind = self.observed.series[risen[0]].label
        count = f"{len(risen)} of {len(members)} {f'{kind}s' if kind and '/' not in kind else 'series'}"
        nodes = {self.observed.series[member].node for member in risen}
        other_nodes = {self.observed.series[member].node for member in set(members) - set(risen)}
        if len(nodes) == 1 and "" not in nodes and not nodes & other_nodes:
            return f"on node {nodes.pop()} ({count})"
        return f"in {count}"

    def _compare_role(self, step: Step, role: Sequence[int], is_whole: bool) -> None:
        role_points = {member: point for member, point in step.points.items() if member in role}
        if len(role) < MIN_PEERS:
            self._add_slow_job(
                Step(self.observed.first_member(role_points), role_points), role, _too_few_text(len(role))
            )
            return
        compared = _sample_role(sorted(role, key=lambda member: sort_key(self.observed.series[member])))
        common: dict[int, Point] = {}
        slower_count = 0
        for member, point in role_points.items():
            if count := self._count_common(member, point, compared):
                common[member] = point
                slower_count = max(slower_count, count)
        own = {member: point for member, point in role_points.items() if member not in common}
        if own:
            # These members became slow before their peers and are no longer outliers.
            count, joined = self._name_outliers(step, own, role, compared)
            slower_count = max(slower_count, count)
        else:
            joined = {}
        if common or joined:
            together = {**common, **joined}
            reason = f"{slower_count} of {len(compared)} peers became at least 5 % slower at about the same time"
            self._add_slow_job(Step(self.observed.first_member(together), together), role, reason)
            if not is_whole:
                self.shared |= set(common.items())

    def _count_common(self, member: int, point: Point, compared: Sequence[int]) -> int:
        """Return the number of peers that became slow together with this member. The result is 0 if fewer than half of
        them did, or if the member is an outlier. Only samples up to the alarm are used.
        """
        own_step = Step(member, {member: point})
        changes = {}
        for peer in {member, *compared}:
            onset, _ = self.observed.window(own_step, peer)
            end = position(self.observed.series[member], point.alarm_index, self.observed.series[peer]) + 1
            end = max(end, onset + windows.MIN_SAMPLES)
            change = measure_change(self.observed.series[peer], self.observed.points[peer], onset, end, windows.value)
            if change is not None:
                changes[peer] = change
        if member not in changes or sum(peer in changes for peer in compared) < MIN_PEERS:
            return 0
        # A peer became slow too if its change is half of the member's change, or would count as slow by itself.
        middle = statistics.median_high(changes[peer].ratio for peer in compared if peer in changes)
        if middle <= max(SLOWER_RATIO, min(LIMIT, 1 + (changes[member].ratio - 1) / 2)):
            return 0
        if find_outliers(self.observed, compared, changes, LIMIT, 0.0, Kind.ITERATION, (member,)):
            return 0
        return _count_slower(changes[peer].ratio for peer in compared if peer in changes)

    def _name_outliers(
        self, step: Step, own: Mapping[int, Point], role: Sequence[int], compared: Sequence[int]
    ) -> tuple[int, dict[int, Point]]:
        """Name the outliers.

        If half of the role became slow together, return the number of these members and the points in the role.
        """
        found: list[Outlier] = []
        waiting: set[int] = set()
        for max_samples in windows.AFTER_SAMPLES:
            remaining = [
                member
                for member in own
                if member not in {outlier.member for outlier in found} and self.observed.is_long_enough(step, member)
            ]
            limited_step = replace(step, max_samples=max_samples)
            measured = sorted({*remaining, *compared})
            values = self.observed.changes(limited_step, measured, windows.value)
            busy = self.observed.changes(limited_step, measured, windows.busy)
            transfer = self.observed.changes(limited_step, measured, windows.transfer)
            host = self.observed.changes(limited_step, measured, windows.residual)
            ranks = len(role)
            for slow in (
                find_outliers(self.observed, compared, values, LIMIT, 0.0, Kind.ITERATION, remaining, ranks)
                if remaining
                else ()
            ):
                member, lost = (slow.member,), values[slow.member].increase
                parts = [
                    *find_outliers(self.observed, compared, busy, LIMIT, lost, Kind.BUSY, member, ranks),
                    *find_outliers(
                        self.observed, compared, transfer, COMMUNICATION_LIMIT, lost, Kind.TRANSFER, member, ranks
                    ),
                    *find_host_outliers(compared, host, values, lost, member, ranks),
                ]
                if parts or not self.observed.has_own_times(slow.member):
                    found.append((parts or [slow])[0])
                    waiting.discard(slow.member)
                else:
                    waiting.add(slow.member)
        for victim in sorted(waiting, key=lambda member: sort_key(self.observed.series[member])):
            own_step = Step(victim, {victim: own[victim]})
            self._add_slow_job(
                own_step, role, "neither its busy nor its transfer time rose, so it waits for other ranks"
            )
        if found:
            self.suspects += name_suspects(self.observed, step, role, found)
        count = _count_slower(values[member].ratio for member in compared if member in values)
        if 2 * count < len(compared):
            return 0, {}
        named_members = waiting | {member.member for member in found}
        return count, {
            member: point
            for member, point in own.items()
            if member not in named_members and self.observed.is_long_enough(step, member)
        }

    def _find_slack(
        self, members: Sequence[int], role_by_member: Mapping[int, tuple[int, ...]], steps: Sequence[Step]
    ) -> None:
        for role in sorted(set(role_by_member.values())):
            timed = [member for member in role if self.observed.series[member].busy is not None]
            if len(timed) < MIN_PEERS:
                continue
            for member in _risen_members(
                {member: self.observed.series[member].busy or () for member in timed}, SLACK_LIMIT
            ):
                series = self.observed.series[member]
                busy = series.busy or ()
                if any(math.isnan(value) or value <= 0 for value in busy):
                    continue
                for point in detect(busy, series.regimes, series.starts, Kind.BUSY):
                    own_step = Step(member, {member: point})
                    if any(self.observed.overlaps(own_step, step, member) for step in steps):
                        continue
                    changes = self.observed.changes(own_step, role, windows.busy)
                    found = find_outliers(self.observed, role, changes, SLACK_LIMIT, 0.0, Kind.BUSY, (member,))
                    if found and self.observed.is_long_enough(own_step, member, 3 * MIN_LENGTH):
                        self.suspects += name_suspects(self.observed, own_step, members, found, slack=True)

    def _add_slow_job(
        self,
        step: Step,
        members: Sequence[int],
        reason: str,
        cause: Cause = Cause.UNKNOWN,
        changes: Mapping[int, Change] | None = None,
        whole_stage: bool = False,
    ) -> None:
        """Add a suspect if a node has a matching condition, otherwise a slow job without a suspect."""
        node = suspect_by_evidence(self.observed, step, members, changes or {})
        if node is not None:
            self.suspects.append(replace(node, whole_stage=whole_stage))
            return
        leader = self.observed.series[step.leader]
        point = step.points[step.leader]
        groups = {self.observed.series[member].group for member in step.points}
        self.job_slow.append(
            SlowJob(
                group=groups.pop() if len(groups) == 1 else "",
                onset=leader.index[point.onset_index],
                point=point,
                series=tuple(sorted(self.observed.series[member].name for member in step.points)),
                peers=len(members),
                cause=cause,
                reason=reason,
                whole_stage=whole_stage,
            )
        )


def _majority_text(risen: Sequence[int], members: Sequence[int]) -> str:
    return ", and half is not a minority" if len(risen) * 2 == len(members) else ", which is not a minority"


def _too_few_text(peers: int) -> str:
    if peers == 1:
        return "it has no peers"
    return f"{peers} peers of one role are too few to find an outlier"


def _sample_role(role: Sequence[int]) -> Sequence[int]:
    step = max(1, math.ceil(len(role) / MAX_COMPARED))
    return role[::step]


def _is_share_slower(ratios: Iterable[float], share: float) -> bool:
    """Return True if more than the given share of the ratios show a slowdown."""
    ratios = list(ratios)
    return bool(ratios) and _count_slower(ratios) > share * len(ratios)


def _count_slower(ratios: Iterable[float]) -> int:
    return sum(ratio > SLOWER_RATIO for ratio in ratios)


def _block_medians(values: Sequence[float]) -> list[float]:
    """Return the median of each block of 25 samples, or NaN for a block with a missing sample."""
    found = []
    for at in range(0, len(values) - 24, 25):
        block = values[at : at + 25]
        found.append(math.nan if any(math.isnan(value) for value in block) else statistics.median(block))
    return found


def _risen_members(own: Mapping[int, Sequence[float]], limit: float) -> list[int]:
    """Return the members to test.

    In these, two consecutive blocks rose above the first block, by more than the blocks of the peers.
    """
    ratios: dict[int, list[float]] = {}
    for member, values in own.items():
        blocks = _block_medians(values)
        first_blocks = [block for block in blocks[:4] if block > 0]
        ratios[member] = [block / min(first_blocks) for block in blocks] if first_blocks else []
    middle = []
    for at in range(max(map(len, ratios.values()), default=0)):
        present = [blocks[at] for blocks in ratios.values() if at < len(blocks) and not math.isnan(blocks[at])]
        middle.append(statistics.median_low(present) if present else math.nan)
    return [
        member
        for member, blocks in ratios.items()
        if any(
            first > limit * first_usual and second > limit * second_usual
            for (first, second), (first_usual, second_usual) in zip(pairwise(blocks), pairwise(middle), strict=False)
        )
    ]


def _own_times(series: Series) -> Sequence[float] | None:
    """Return each sample without waiting time, or None if waiting is not reported for all samples."""
    if series.wait is not None:
        own = [value - wait for value, wait in zip(series.value, series.wait, strict=True)]
    else:
        own = list(series.busy or series.transfer or ())
    return own if own and all(sample > 0 for sample in own) else None
