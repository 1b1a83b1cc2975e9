"""Selects the suspects for a step: outlying ranks or their node, groups, and a single slow node.

All functions are pure.

peers.py determines when each rule applies. It describes the limits and the confidence.

A single slow node: ranks are compared with peers of the same role. This comparison cannot name a node that runs a whole
pipeline stage (tensor-parallel times data-parallel ranks = GPUs per node) or half of one, because the role then has no
healthy majority. In this case, the other nodes are the peers, and each rank is compared with its own earlier time. If
the job had more work (a larger batch, longer sequences), the other stages would also have become slower. If work had
moved between stages, another stage would have become faster. In both cases, the node is not the cause. But if only the
work of one stage changed, this looks the same as a slow node. A node with a whole stage is therefore a suspect with low
confidence. Only its busy time counts, because only the first stage loads the data.
"""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import NamedTuple

from healthd.failslow import windows
from healthd.failslow.groups import sort_key
from healthd.failslow.model import Cause, Confidence, Suspect
from healthd.failslow.node_evidence import MAX_NAMED, agreeing_evidence, common_cause
from healthd.failslow.outliers import (
    COMMUNICATION_LIMIT,
    LIMIT,
    MAX_FAST_SHARE,
    MIN_EXPLAINED_SHARE,
    MIN_PEERS,
    MIN_STANDARD_ERRORS,
    Outlier,
    format_duration,
    link_cause,
    with_final_change,
    with_pause_note,
)
from healthd.failslow.steps import SLOWER_RATIO, Observed, Step
from healthd.failslow.windows import Change

FASTER = 0.97  # if a stage's median change is below this, the stage has less work than before


def name_suspects(
    observed: Observed, step: Step, members: Sequence[int], found: Sequence[Outlier], slack: bool = False
) -> list[Suspect]:
    """Return one suspect, the node, if all outliers are on one node of several. Otherwise, return each outlier."""
    found = [with_pause_note(with_final_change(observed, step, item)) for item in found]
    nodes = {observed.series[item.member].node for item in found}
    all_nodes = {observed.series[item].node for item in members}
    slow_count = len({item.member for item in found})
    is_several = slow_count > 2
    (node,) = nodes if len(nodes) == 1 else ("",)
    if slow_count > 1 and node and len(all_nodes) > 1:
        slow_members = sorted({item.member for item in found}, key=lambda item: sort_key(observed.series[item]))
        causes = {item.cause for item in found}
        agreeing = agreeing_evidence(observed, step, slow_members)
        kind = observed.series[slow_members[0]].label or "series"
        sentences = tuple(f"{kind} {observed.series[item.member].name}: {item.sentence}" for item in found[:MAX_NAMED])
        omitted = len(found) - len(sentences)
        return [
            Suspect(
                node,
                "node",
                common_cause(causes),
                _outlier_confidence(observed, step, found, bool(agreeing), slack),
                (*sentences, *((f"and {omitted} more ranks",) if omitted > 0 else ()), *agreeing),
                tuple(observed.series[item].name for item in slow_members),
                observed.suspect_point(step, slow_members),
            )
        ]
    suspects = []
    for item in found:
        series = observed.series[item.member]
        agreeing = agreeing_evidence(observed, step, [item.member])
        sentences = (item.sentence,)
        if is_several:
            sentences += (f"{slow_count} became slow at about the same time, possibly from a common cause",)
        if slack:
            sentences += ("no iteration became slower, so the rank has slack",)
        confidence = _outlier_confidence(observed, step, [item], bool(agreeing), slack)
        if is_several and confidence is Confidence.HIGH and not agreeing:
            confidence = Confidence.MEDIUM
        suspects.append(
            Suspect(
                series.name,
                series.label or "series",
                item.cause,
                confidence,
                (*sentences, *agreeing),
                (series.name,),
                observed.suspect_point(step, [item.member]),
            )
        )
    return suspects


def _outlier_confidence(
    observed: Observed, step: Step, found: Sequence[Outlier], agreeing: bool, slack: bool
) -> Confidence:
    if slack or (not agreeing and any(outlier.fast_share > MAX_FAST_SHARE for outlier in found)):
        return Confidence.LOW
    return grade_confidence(
        all(outlier.excess - 1 >= 2 * (outlier.limit - 1) for outlier in found),
        all(outlier.standard_errors > 2 * MIN_STANDARD_ERRORS for outlier in found),
        all(outlier.peers >= 7 for outlier in found),
        agreeing,
    )


def grade_confidence(*counts: bool) -> Confidence:
    """Return the confidence from the facts in the description of peers.py: high for three facts, medium for two, else
    low."""
    count = sum(counts)
    return Confidence.HIGH if count >= 3 else Confidence.MEDIUM if count == 2 else Confidence.LOW


# --- groups


def find_slow_groups(
    observed: Observed, step: Step, members: Sequence[int], transfer: Mapping[int, Change], lost: float
) -> list[Suspect]:
    """Return suspects for groups whose transfer time rose, while that of other groups with the same role did not.

    Groups with the same role have the same number of ranks and about the same healthy time (the same volume). If the
    slow groups have exactly one member or node in common, it is the suspect. Otherwise, each slow group is a suspect.
    """
    groups: dict[str, list[int]] = defaultdict(list)
    for member in members:
        if observed.series[member].group and member in transfer:
            groups[observed.series[member].group].append(member)
    alike: list[list[str]] = []
    before = {
        name: statistics.median(transfer[member].before for member in group_members)
        for name, group_members in groups.items()
    }
    for name in sorted(groups, key=lambda name: (len(groups[name]), before[name], name)):
        last = alike[-1][-1] if alike else ""
        if last and len(groups[last]) == len(groups[name]) and before[name] <= 1.5 * before[last]:
            alike[-1].append(name)
        else:
            alike.append([name])
    suspects = []
    for names in alike:
        if len(names) < MIN_PEERS:
            continue
        ratio_by_group = {name: statistics.median(transfer[member].ratio for member in groups[name]) for name in names}
        middle = statistics.median_high(ratio_by_group.values())
        scatter = windows.robust_deviation([math.log(ratio) for ratio in ratio_by_group.values()])
        slow = {
            name: math.log(ratio / middle) / math.hypot(scatter, 0.02)
            for name, ratio in ratio_by_group.items()
            if min(transfer[member].ratio for member in groups[name]) > COMMUNICATION_LIMIT
            and ratio > COMMUNICATION_LIMIT * middle
            and math.log(ratio / middle) > MIN_STANDARD_ERRORS * math.hypot(scatter, 0.02)
            and statistics.median(transfer[member].increase for member in groups[name]) >= MIN_EXPLAINED_SHARE * lost
        }
        if slow:
            suspects += _group_suspects(observed, step, groups, slow, ratio_by_group, middle, transfer)
    return suspects


def _group_suspects(
    observed: Observed,
    step: Step,
    groups: Mapping[str, Sequence[int]],
    slow: Mapping[str, float],
    ratio_by_group: Mapping[str, float],
    middle: float,
    transfer: Mapping[int, Change],
) -> list[Suspect]:
    def sentence(name: str) -> str:
        current = statistics.median(transfer[member].after for member in groups[name])
        before = statistics.median(transfer[member].before for member in groups[name])
        return (
            f"group {name} transfers for {format_duration(current)}, up from {format_duration(before)}; "
            f"{len(ratio_by_group) - len(slow)} other groups of its kind {middle - 1:+.0%}"
        )

    def confidence(names: Iterable[str], supported: bool) -> Confidence:
        group_names = list(names)
        excess = min(ratio_by_group[name] for name in group_names) / middle
        standard_errors = min(slow[name] for name in group_names)
        return grade_confidence(
            excess >= 1.4, standard_errors > 2 * MIN_STANDARD_ERRORS, len(ratio_by_group) > 7, supported
        )

    sentences = tuple(sentence(name) for name in sorted(slow))
    if len(slow) > 1:
        ranks = set.intersection(*({observed.series[member].name for member in groups[name]} for name in slow))
        nodes = set.intersection(*({observed.series[member].node for member in groups[name]} for name in slow)) - {""}
        for common, kind in ((ranks, ""), (nodes, "node")):
            if len(common) == 1:
                (subject,) = common
                members = [
                    member
                    for name in sorted(slow)
                    for member in groups[name]
                    if subject == (observed.series[member].node if kind else observed.series[member].name)
                ]
                agreeing = agreeing_evidence(observed, step, members)
                found = Suspect(
                    subject,
                    kind or observed.series[members[0]].label or "series",
                    link_cause(observed, [member for name in slow for member in groups[name]]),
                    confidence(slow, bool(agreeing)),
                    (*sentences, f"it belongs to each of the {len(slow)} slow groups", *agreeing),
                    tuple(sorted({observed.series[member].name for member in members})),
                    observed.suspect_point(step, members),
                )
                return [found]
    suspects = []
    for name in sorted(slow):
        members = list(groups[name])
        agreeing = agreeing_evidence(observed, step, members)
        suspects.append(
            Suspect(
                name,
                "group",
                link_cause(observed, members),
                confidence([name], bool(agreeing)),
                (sentence(name), *agreeing),
                tuple(sorted(observed.series[member].name for member in members)),
                observed.suspect_point(step, members),
            )
        )
    return suspects


# --- a single slow node


class SlowNode(NamedTuple):
    """The only slow node in a job.

    Attributes:
        members: its ranks.
        others: ranks on other nodes.
        roles: roles with a member on the node.
        whole: the node runs all members of these roles.
        node_count: number of nodes in the job.
        added_time: median added time of its ranks.
        excess: change of its least slowed rank divided by the median change on the other nodes.
        standard_errors: the difference between these two changes, in standard errors.
    """

    node: str
    measure: str
    members: tuple[int, ...]
    others: tuple[int, ...]
    roles: tuple[tuple[int, ...], ...]
    whole: bool
    node_count: int
    added_time: float
    excess: float
    standard_errors: float
    limit: float


def find_slow_node(
    observed: Observed,
    role_by_member: Mapping[int, tuple[int, ...]],
    busy: Mapping[int, Change],
    transfer: Mapping[int, Change],
    host: Mapping[int, Change],
    values: Mapping[int, Change],
    lost: float,
) -> SlowNode | None:
    """Return the only node whose ranks account for the slowdown, or None.

    Args:
        busy, transfer, host, values: the change in each rank's time.
        lost: increase in the iteration time.
    """
    for measure, changes, limit in (
        ("busy", busy, LIMIT),
        ("host", _host_changes(host, values), LIMIT),
        ("transfer", transfer, COMMUNICATION_LIMIT),
    ):
        found = _find_by_measure(observed, role_by_member, measure, changes, limit, lost)
        if found is not None and (measure == "busy" or not found.whole):
            return found
    return None


def node_suspect(observed: Observed, step: Step, found: SlowNode) -> Suspect:
    """Return the node as a suspect."""
    agreeing = agreeing_evidence(observed, step, found.members)
    return Suspect(
        found.node,
        "node",
        slow_node_cause(observed, found),
        _confidence(found, bool(agreeing)),
        (_sentence(found), _caution(observed, found), *agreeing),
        tuple(sorted(observed.series[member].name for member in found.members)),
        observed.suspect_point(step, found.members),
        found.whole,
    )


def too_few_nodes_text(observed: Observed, found: SlowNode) -> str:
    """Return a sentence, without a full stop, that explains why no node is named in a job with so few nodes."""
    return (
        f"{_MEASURE_NAMES[found.measure]} rose in all {len(found.members)} ranks of node {found.node}, "
        f"{_role_share_text(observed, found)}, and in no other rank, but {found.node_count} nodes are too few to name "
        "one"
    )


_MEASURE_NAMES = {
    "busy": "busy time",
    "host": "the time that is neither busy, wait nor transfer",
    "transfer": "transfer time",
}


def _host_changes(host: Mapping[int, Change], values: Mapping[int, Change]) -> dict[int, Change]:
    """Return the iteration time with only the host's part changed.

    The host's own time is not used: it may be near zero.
    """
    return {
        member: Change(values[member].before, values[member].before + change.increase, change.noise, change.fast_share)
        for member, change in host.items()
        if member in values and values[member].before + change.increase > 0
    }


def _find_by_measure(
    observed: Observed,
    role_by_member: Mapping[int, tuple[int, ...]],
    measure: str,
    changes: Mapping[int, Change],
    limit: float,
    lost: float,
) -> SlowNode | None:
    if set(changes) != set(role_by_member) or any(not observed.series[member].node for member in changes):
        return None
    risen = [
        member
        for member, change in changes.items()
        if change.ratio > limit and change.increase >= MIN_EXPLAINED_SHARE * lost
    ]
    nodes = {observed.series[member].node for member in risen}
    if len(nodes) != 1:
        return None
    (node,) = nodes
    members = tuple(sorted(member for member in changes if observed.series[member].node == node))
    others = tuple(sorted(set(changes) - set(members)))
    if len(risen) < len(members) or len(members) < MIN_PEERS or len(others) < MIN_PEERS:
        return None
    roles = tuple(sorted({role_by_member[member] for member in members}))
    if any(not FASTER < middle < SLOWER_RATIO for middle in _role_medians(changes, role_by_member, set(others))):
        return None
    ratios = [math.log(changes[member].ratio) for member in others]
    middle = statistics.median(ratios)
    least_slowed = min(members, key=lambda member: changes[member].ratio)
    above = math.log(changes[least_slowed].ratio) - middle
    standard_errors = above / math.hypot(
        changes[least_slowed].noise / changes[least_slowed].before, windows.robust_deviation(ratios), 0.005
    )
    if math.exp(above) <= limit or standard_errors <= MIN_STANDARD_ERRORS:
        return None
    whole = all(set(role) <= set(members) for role in roles)
    count = len({observed.series[member].node for member in changes})
    added_time = statistics.median(changes[member].increase for member in members)
    return SlowNode(
        node, measure, members, others, roles, whole, count, added_time, math.exp(above), standard_errors, limit
    )


def _role_medians(
    changes: Mapping[int, Change], role_by_member: Mapping[int, tuple[int, ...]], others: Collection[int]
) -> list[float]:
    """Return, for each role, the median change of its ranks on other nodes."""
    roles = {role_by_member[member] for member in others}
    return [statistics.median(changes[member].ratio for member in role if member in others) for role in roles]


def slow_node_cause(observed: Observed, found: SlowNode) -> Cause:
    if found.measure == "transfer":
        return link_cause(observed, [member for role in found.roles for member in role])
    if found.measure == "host":
        return Cause.COMPUTE_CPU
    has_busy = all(observed.series[member].busy is not None for member in found.members)
    return Cause.COMPUTE_GPU if has_busy else Cause.COMPUTE


def _confidence(found: SlowNode, agreeing: bool) -> Confidence:
    """Return the confidence.

    If the node runs a whole stage, the confidence is low, or medium if there are conditions on the node. If the node
    runs clearly only a part of a stage, the confidence is one grade higher.
    """
    clearly = (
        not found.whole
        and found.excess - 1 >= 2 * (found.limit - 1)
        and found.standard_errors > 2 * MIN_STANDARD_ERRORS
    )
    grades = (Confidence.LOW, Confidence.MEDIUM, Confidence.HIGH)
    return grades[clearly + agreeing]


def _sentence(found: SlowNode) -> str:
    return (
        f"{_MEASURE_NAMES[found.measure]} rose in all {len(found.members)} ranks of the node, by "
        f"{format_duration(found.added_time)} in the median and {found.excess - 1:.0%} or more relative to the other "
        f"nodes, and in none of the {len(found.others)} ranks on the {found.node_count - 1} other nodes"
    )


def _caution(observed: Observed, found: SlowNode) -> str:
    part = _role_share_text(observed, found)
    if found.whole:
        return f"its ranks are {part}, so a change in the work of this part would look the same"
    return f"its ranks are {part}, and the other ranks with the same work did not become slower"


def _role_share_text(observed: Observed, found: SlowNode) -> str:
    """Return text like "all of group g1" or "8 of 16 of group g1"."""
    shares = []
    for role in found.roles:
        on_node, group = sum(member in found.members for member in role), observed.series[role[0]].group
        share = "all" if on_node == len(role) else f"{on_node} of {len(role)}"
        shares.append(f"{share} of group {group}" if group else f"{share} of one role")
    return ", ".join(shares[:4]) + (f" and {len(shares) - 4} more" if len(shares) > 4 else "")
