"""Comparison with peers: which component causes the slowness, and when no component can be named. Pure functions.

A collective makes every rank of a gang equally slow. A step of all iteration times therefore only shows that the job is
slow; workers explain over half of the slowdown in 1.7 % of the straggling jobs (Lin et al., OSDI 2025, arXiv
2505.05713). A suspect is therefore a component with a time of its own that rose

  against its own baseline   and   against its peers: by more than a limit times the median of their own changes.

The limit is 1.1 for compute and for whole iterations (FALCON, arXiv 2410.12588, step 5). It is 1.2 for communication,
which varies more (FALCON's table 2: a CoV of 0.29 between nodes against 0.01 for a copy within a GPU; its released
detector uses 1.2). The rise must also exceed MIN_STANDARD_ERRORS standard errors, which include the series' own scatter
and the spread of the peers. In a gang the time that rose must also make up MIN_EXPLAINED_SHARE of what an iteration
lost. The median is the upper one of all peers, including the suspect. Half of a role or more is not a minority, and no
member is named, except if it is one of at least four nodes: the other nodes are then the peers (suspects.py).

An iteration consists of busy (compute), transfer, wait, and the rest, which belongs to the host. A rank that only waits
is a victim. groups.py defines the peers of one role. In a role of fewer than MIN_PEERS no member is named, and no group
among fewer groups. Conditions on a node can name a node without peers, if they cover the onset and the times of its
ranks do not contradict them.

A slowness shorter than MIN_LENGTH samples names no component. The confidence counts four facts: an excess of 1.2
(communication: 1.4); twice the required number of standard errors; seven or more other peers; agreeing conditions on
the node. Three are high, two medium, with these exceptions:

- Three or more ranks at once are not high without conditions on the node, because their common cause is not in the
  data.
- A busy time that rises while no iteration becomes slower (the rank has slack) is low, and needs 1.25 and three times
  the length.
- A rise by PAUSE_EXCESS or more in which more than MAX_FAST_SHARE of the samples are as fast as before is also low.
- Conditions on a node alone are medium, and low if they were open during the whole baseline.

Points: a step of most peers of a role that do not wait for each other becomes one slow job, in place of a point in each
of its series. If WHOLE_SHARE of all series step, they keep their points. Only samples up to the alarm decide this, so
no later sample removes a point. A verdict uses the first 50 samples of a step, and 200 if these name no component.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise

from healthd.failslow import windows
from healthd.failslow.detect import detect
from healthd.failslow.groups import Pool, identity, pools, roles
from healthd.failslow.model import Cause, Evidence, JobSlow, Judgement, Kind, Point, Series, Suspect
from healthd.failslow.node_evidence import named_by_evidence
from healthd.failslow.outliers import (
    COMMUNICATION_LIMIT,
    EXPLAINS,
    FEWEST,
    LIMIT,
    Found,
    hosts,
    link,
    outliers,
)
from healthd.failslow.steps import LASTING, STEPS, TOGETHER, Observed, Step
from healthd.failslow.suspects import cause_of, named, slow_groups, slow_node, suspect, too_few_nodes
from healthd.failslow.windows import Change, changed, position

SLACK_LIMIT = 1.25  # busy alone
WHOLE = 0.9
MOST_COMPARED = 64  # maximum number of peers from a large role, evenly chosen


def judge(series: Sequence[Series], points: Sequence[Sequence[Point]], evidence: Sequence[Evidence] = ()) -> Judgement:
    """Compare series with their peers. The order of the series affects only the order of Diagnosis.points.

    Args:
        points: of each series.
    """
    world = _World(Observed(series, points, evidence))
    if not any(points) and not any(one.busy is not None for one in series):
        return Judgement(tuple(tuple(some) for some in points))
    for pool in pools(series):
        world.judge(pool)
    key = {id(one): (one.point.onset_index if one.point else 0, one.subject) for one in world.suspects}
    return Judgement(
        points=tuple(
            tuple(point for point in some if (at, point) not in world.shared) for at, some in enumerate(points)
        ),
        suspects=tuple(sorted(world.suspects, key=lambda one: (*key[id(one)], one.cause.value))),
        job_slow=tuple(sorted(world.job_slow, key=lambda one: (one.onset, one.group, one.series))),
    )


class _World:
    def __init__(self, seen: Observed) -> None:
        self.seen = seen
        self.suspects: list[Suspect] = []
        self.job_slow: list[JobSlow] = []
        self.shared: set[tuple[int, Point]] = set()  # points replaced by one slow job

    # --- steps and their kinds

    def judge(self, pool: Pool) -> None:
        members = sorted(pool.members, key=lambda one: identity(self.seen.series[one]))
        told = [one for one in members if self.seen.tells(one)]
        role_of = self._roles(members)
        steps = list(self.seen.steps(members))
        for step in steps:
            ratios = self.seen.values(step, _some(members))
            most = _steps(ratios.values(), 0.5)
            if told and most:
                known = len(self.suspects)
                self._gang(step, members, role_of)
                self._later(step, members, role_of, known)
            elif pool.synchronous and most:
                self._nobody(
                    step, members, "all of its peers step together: a collective makes every rank equally slow"
                )
            else:
                whole = _steps(ratios.values(), WHOLE)
                for role in sorted({role_of[one] for one in step.points}):
                    self._role(step, role, whole)
        if told:
            self._slack(members, role_of, steps)

    def _roles(self, members: Sequence[int]) -> dict[int, tuple[int, ...]]:
        def level(one: int) -> float | None:
            series = self.seen.series[one]
            for channel in (windows.busy, windows.transfer) if self.seen.tells(one) else ():
                found = windows.level(series, channel)
                if found is not None:
                    return found
            return windows.level(series, windows.value)

        return {one: role for role in roles(self.seen.series, members, level) for one in role}

    def _gang(self, step: Step, members: Sequence[int], role_of: Mapping[int, tuple[int, ...]]) -> None:
        if not self.seen.lasts(step, step.leader):
            self._nobody(step, members, f"it lasted less than {LASTING} samples, too short to find the cause")
            return
        for longest in windows.AFTER:
            look = replace(step, longest=longest)
            values = self.seen.changes(look, members, windows.value)
            lost = statistics.median(change.more for change in values.values())
            busy = self.seen.changes(look, members, windows.busy)
            transfer = self.seen.changes(look, members, windows.transfer)
            host = self.seen.changes(look, members, windows.residual)
            found: list[Found] = []
            for role in sorted(set(role_of.values())):
                if len(role) < FEWEST:
                    continue
                found += outliers(self.seen, role, busy, LIMIT, lost, Kind.BUSY)
                found += outliers(self.seen, role, transfer, COMMUNICATION_LIMIT, lost, Kind.TRANSFER)
                known = {one.member for one in found}
                found += [one for one in hosts(role, host, values, lost) if one.member not in known]
            if found:
                self.suspects += named(self.seen, step, members, found)
                return
            groups = slow_groups(self.seen, step, members, transfer, lost)
            if groups:
                self.suspects += groups
                return
            node = slow_node(self.seen, role_of, busy, transfer, host, values, lost)
            if node is not None and node.nodes >= FEWEST:
                self.suspects.append(suspect(self.seen, step, node))
                return
        cause, why = self._of_the_job(role_of, busy, transfer, host, lost)
        whole = node is not None and node.whole
        if node is not None and whole:
            cause, why = cause_of(self.seen, node), too_few_nodes(self.seen, node)
        largest = max(len(role) for role in role_of.values())
        if largest < FEWEST:
            why = _too_few(largest)
        self._nobody(step, members, why, cause, {**busy, **transfer}, whole)

    def _later(self, step: Step, members: Sequence[int], role_of: Mapping[int, tuple[int, ...]], known: int) -> None:
        """Find ranks that became slow or recovered while the step lasted, by each rank's own time.

        The iteration time does not show this, because it follows the slowest rank.

        Args:
            suspects_before: number of suspects before this step.
        """
        begin, end = self.seen.window(step, step.leader)
        if min(end, len(self.seen.series[step.leader].value)) - begin < TOGETHER + LASTING:
            return
        already = {name for one in self.suspects[known:] for name in one.series}
        for role in sorted(set(role_of.values())):
            if len(role) < FEWEST:
                continue
            own = {one: values for one in role if (values := _own_time(self.seen.series[one])) is not None}
            for one in _rising(own, LIMIT):
                series = self.seen.series[one]
                begin, end = self.seen.window(step, one)
                free = series.name not in already
                for point in detect(own[one], series.regimes, series.starts, Kind.BUSY):
                    relief = len(series.value) if point.relief_index is None else point.relief_index
                    if abs(point.onset_index - begin) <= TOGETHER:
                        if not free and relief + TOGETHER < end:
                            self._recovered(known, series.name, relief)
                            free = True
                    elif free and begin < point.onset_index < end - LASTING:
                        self._joins(Step(one, {one: point}), members, role)

    def _recovered(self, known: int, name: str, relief: int) -> None:
        for at, one in enumerate(self.suspects[known:], known):
            if one.series == (name,) and one.point is not None:
                self.suspects[at] = replace(one, point=replace(one.point, relief_index=relief))

    def _joins(self, step: Step, members: Sequence[int], role: Sequence[int]) -> None:
        """Add a suspect that became slow while others were slow."""
        one = step.leader
        if not self.seen.lasts(step, one):
            return
        values = self.seen.changes(step, role, windows.value)
        if one not in values:
            return
        lost = statistics.median(change.more for change in values.values())
        found = [
            *outliers(self.seen, role, self.seen.changes(step, role, windows.busy), LIMIT, lost, Kind.BUSY, (one,)),
            *outliers(
                self.seen,
                role,
                self.seen.changes(step, role, windows.transfer),
                COMMUNICATION_LIMIT,
                lost,
                Kind.TRANSFER,
                (one,),
            ),
            *hosts(role, self.seen.changes(step, role, windows.residual), values, lost, (one,)),
        ]
        if found:
            slower = replace(step.points[one], slowdown=max(values[one].ratio - 1, 0.0))
            self.suspects += named(self.seen, replace(step, points={one: slower}), members, found[:1])

    def _of_the_job(
        self,
        role_of: Mapping[int, tuple[int, ...]],
        busy: Mapping[int, Change],
        transfer: Mapping[int, Change],
        host: Mapping[int, Change],
        lost: float,
    ) -> tuple[Cause, str]:
        """Return the cause if a time rose in a whole role or in half of it, and there is no outlier."""
        best, cause, why = EXPLAINS * lost, Cause.UNKNOWN, "no rank's busy or transfer time rose more than its peers'"
        whole = sorted(set(role_of.values()))
        for changes, of, ours, words in (
            (busy, Cause.IMBALANCE, Cause.COMPUTE, ("busy time rose", ": more work for all")),
            (
                host,
                Cause.IMBALANCE,
                Cause.COMPUTE_CPU,
                ("the time that is neither busy, wait nor transfer rose", ": possibly data loading"),
            ),
            (transfer, Cause.COMMUNICATION, Cause.COMMUNICATION, ("transfer time rose", "")),
        ):
            for role in whole:
                there = [one for one in role if one in changes]
                rose = [one for one in there if changes[one].more >= EXPLAINS * lost]
                if len(there) * 2 <= len(role) or len(rose) * 2 < len(there):
                    continue
                more = statistics.median(changes[one].more for one in rose)
                if more > best and (len(role) >= FEWEST or len(whole) == 1):
                    part = len(rose) < WHOLE * len(there)
                    links = link(self.seen, role) if of is Cause.COMMUNICATION else ours if part else of
                    who = self._part(rose, there) if part else f"in {self._whom(role, len(whole))}"
                    best, cause = more, links
                    why = f"{words[0]} {who}{_no_minority(rose, there) if part else words[1]}"
        return cause, why

    def _whom(self, role: Sequence[int], roles: int) -> str:
        name = self.seen.series[role[0]].group
        return "all peers" if roles == 1 else f"group {name}" if name else f"{len(role)} peers of one role"

    def _part(self, rose: Sequence[int], of: Sequence[int]) -> str:
        """Return "on node gpu-0 (4 of 8 ranks)" if these are all ranks of that node, otherwise "in 4 of 8 ranks"."""
        kind = self.seen.series[rose[0]].kind_of
        count = f"{len(rose)} of {len(of)} {f'{kind}s' if kind and '/' not in kind else 'series'}"
        nodes = {self.seen.series[one].node for one in rose}
        rest = {self.seen.series[one].node for one in set(of) - set(rose)}
        if len(nodes) == 1 and "" not in nodes and not nodes & rest:
            return f"on node {nodes.pop()} ({count})"
        return f"in {count}"

    def _role(self, step: Step, role: Sequence[int], whole: bool) -> None:
        mine = {one: point for one, point in step.points.items() if one in role}
        if len(role) < FEWEST:
            self._nobody(Step(self.seen.first(mine), mine), role, _too_few(len(role)))
            return
        compared = _some(sorted(role, key=lambda one: identity(self.seen.series[one])))
        common: dict[int, Point] = {}
        stepping = 0
        for one, point in mine.items():
            if count := self._in_common(one, point, compared):
                common[one] = point
                stepping = max(stepping, count)
        own = {one: point for one, point in mine.items() if one not in common}
        if own:
            # Members that were slow before their peers and are not outliers now.
            count, joined = self._own(step, own, role, compared)
            stepping = max(stepping, count)
        else:
            joined = {}
        if common or joined:
            together = {**common, **joined}
            why = f"{stepping} of {len(compared)} peers became slower by 5 % or more at about the same time"
            self._nobody(Step(self.seen.first(together), together), role, why)
            if not whole:
                self.shared |= set(common.items())

    def _in_common(self, one: int, point: Point, compared: Sequence[int]) -> int:
        """Return how many peers step, if at least half of them step with this member and it is not an outlier.

        Only samples up to the alarm are used. Otherwise return 0.
        """
        alone = Step(one, {one: point})
        changes = {}
        for peer in {one, *compared}:
            onset, _ = self.seen.window(alone, peer)
            end = position(self.seen.series[one], point.alarm_index, self.seen.series[peer]) + 1
            end = max(end, onset + windows.LEAST)
            change = changed(self.seen.series[peer], self.seen.points[peer], onset, end, windows.value)
            if change is not None:
                changes[peer] = change
        if one not in changes or sum(peer in changes for peer in compared) < FEWEST:
            return 0
        # Half of the member's own step counts as a step with it, and so does a change that would be slow by itself.
        middle = statistics.median_high(changes[peer].ratio for peer in compared if peer in changes)
        if middle <= max(STEPS, min(LIMIT, 1 + (changes[one].ratio - 1) / 2)):
            return 0
        if outliers(self.seen, compared, changes, LIMIT, 0.0, Kind.ITERATION, (one,)):
            return 0
        return _stepping(changes[peer].ratio for peer in compared if peer in changes)

    def _own(
        self, step: Step, own: Mapping[int, Point], role: Sequence[int], compared: Sequence[int]
    ) -> tuple[int, dict[int, Point]]:
        """Name the outliers. If half of the role steps, return how many do, and the points that belong to the role."""
        found: list[Found] = []
        waiting: set[int] = set()
        for longest in windows.AFTER:
            left = [one for one in own if one not in {each.member for each in found} and self.seen.lasts(step, one)]
            look = replace(step, longest=longest)
            measured = sorted({*left, *compared})
            values = self.seen.changes(look, measured, windows.value)
            busy = self.seen.changes(look, measured, windows.busy)
            transfer = self.seen.changes(look, measured, windows.transfer)
            host = self.seen.changes(look, measured, windows.residual)
            ranks = len(role)
            for slow in outliers(self.seen, compared, values, LIMIT, 0.0, Kind.ITERATION, left, ranks) if left else ():
                one, lost = (slow.member,), values[slow.member].more
                parts = [
                    *outliers(self.seen, compared, busy, LIMIT, lost, Kind.BUSY, one, ranks),
                    *outliers(self.seen, compared, transfer, COMMUNICATION_LIMIT, lost, Kind.TRANSFER, one, ranks),
                    *hosts(compared, host, values, lost, one, ranks),
                ]
                if parts or not self.seen.tells(slow.member):
                    found.append((parts or [slow])[0])
                    waiting.discard(slow.member)
                else:
                    waiting.add(slow.member)
        for victim in sorted(waiting, key=lambda one: identity(self.seen.series[one])):
            alone = Step(victim, {victim: own[victim]})
            self._nobody(alone, role, "neither its busy nor its transfer time rose: it waits for other ranks")
        if found:
            self.suspects += named(self.seen, step, role, found)
        count = _stepping(values[one].ratio for one in compared if one in values)
        if 2 * count < len(compared):
            return 0, {}
        told = waiting | {one.member for one in found}
        return count, {one: point for one, point in own.items() if one not in told and self.seen.lasts(step, one)}

    def _slack(self, members: Sequence[int], role_of: Mapping[int, tuple[int, ...]], steps: Sequence[Step]) -> None:
        for role in sorted(set(role_of.values())):
            there = [one for one in role if self.seen.series[one].busy is not None]
            if len(there) < FEWEST:
                continue
            for one in _rising({one: self.seen.series[one].busy or () for one in there}, SLACK_LIMIT):
                series = self.seen.series[one]
                busy = series.busy or ()
                if any(math.isnan(value) or value <= 0 for value in busy):
                    continue
                for point in detect(busy, series.regimes, series.starts, Kind.BUSY):
                    alone = Step(one, {one: point})
                    if any(self.seen.overlap(alone, step, one) for step in steps):
                        continue
                    changes = self.seen.changes(alone, role, windows.busy)
                    found = outliers(self.seen, role, changes, SLACK_LIMIT, 0.0, Kind.BUSY, (one,))
                    if found and self.seen.lasts(alone, one, 3 * LASTING):
                        self.suspects += named(self.seen, alone, members, found, slack=True)

    def _nobody(
        self,
        step: Step,
        members: Sequence[int],
        why: str,
        cause: Cause = Cause.UNKNOWN,
        changes: Mapping[int, Change] | None = None,
        whole_stage: bool = False,
    ) -> None:
        """Add the node with a matching condition as a suspect, or a slow job without a suspect."""
        node = named_by_evidence(self.seen, step, members, changes or {})
        if node is not None:
            self.suspects.append(replace(node, whole_stage=whole_stage))
            return
        leader = self.seen.series[step.leader]
        point = step.points[step.leader]
        groups = {self.seen.series[one].group for one in step.points}
        self.job_slow.append(
            JobSlow(
                group=groups.pop() if len(groups) == 1 else "",
                onset=leader.index[point.onset_index],
                point=point,
                series=tuple(sorted(self.seen.series[one].name for one in step.points)),
                peers=len(members),
                cause=cause,
                why=why,
                whole_stage=whole_stage,
            )
        )


def _no_minority(some: Sequence[int], of: Sequence[int]) -> str:
    return ": half is not a minority" if len(some) * 2 == len(of) else ": that is not a minority"


def _too_few(peers: int) -> str:
    if peers == 1:
        return "it has no peers"
    return f"{peers} peers of one role are too few to find an outlier"


def _some(role: Sequence[int]) -> Sequence[int]:
    step = max(1, math.ceil(len(role) / MOST_COMPARED))
    return role[::step]


def _steps(ratios: Iterable[float], share: float) -> bool:
    """Return True if more than this share became slower."""
    ratios = list(ratios)
    return bool(ratios) and _stepping(ratios) > share * len(ratios)


def _stepping(ratios: Iterable[float]) -> int:
    return sum(ratio > STEPS for ratio in ratios)


def _blocks(values: Sequence[float]) -> list[float]:
    """Return the median of each 25 samples, or NaN for a block with a missing sample."""
    found = []
    for at in range(0, len(values) - 24, 25):
        block = values[at : at + 25]
        found.append(math.nan if any(math.isnan(one) for one in block) else statistics.median(block))
    return found


def _rising(own: Mapping[int, Sequence[float]], limit: float) -> list[int]:
    """Return the members to test: two consecutive blocks rose above the first ones by more than those of the peers."""
    high: dict[int, list[float]] = {}
    for one, values in own.items():
        blocks = _blocks(values)
        rest = [block for block in blocks[:4] if block > 0]
        high[one] = [block / min(rest) for block in blocks] if rest else []
    middle = []
    for at in range(max(map(len, high.values()), default=0)):
        there = [blocks[at] for blocks in high.values() if at < len(blocks) and not math.isnan(blocks[at])]
        middle.append(statistics.median_low(there) if there else math.nan)
    return [
        one
        for one, blocks in high.items()
        if any(
            first > limit * usual and second > limit * then
            for (first, second), (usual, then) in zip(pairwise(blocks), pairwise(middle), strict=False)
        )
    ]


def _own_time(series: Series) -> Sequence[float] | None:
    """Return each sample without waiting, or None if this is not reported for all samples."""
    if series.wait is not None:
        own = [value - wait for value, wait in zip(series.value, series.wait, strict=True)]
    else:
        own = list(series.busy or series.transfer or ())
    return own if own and all(one > 0 for one in own) else None
