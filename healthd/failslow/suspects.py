"""Selection of the suspects of a slow step: outlying ranks or their node, groups, and nodes that are slow alone. Pure
functions.

peers.py decides when each rule applies, and describes the limits and the confidence.

Nodes that are slow alone: ranks are compared with peers of one role. This cannot name a node that runs a whole pipeline
stage (tensor times data parallel ranks = GPUs of a node) or half of one, because the role has no healthy majority. The
other nodes are then the peers, and each rank is compared with its own earlier time. More work for the job (a larger
batch, longer sequences) would also have slowed the other stages. Work that moved between stages would have made another
stage faster. Both rule out the node. A change of the work of one stage alone cannot be distinguished from a slow node.
A node with a whole stage is therefore a suspect of low confidence. Only the busy time counts there, because only the
first stage loads the data.
"""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import NamedTuple

from healthd.failslow import windows
from healthd.failslow.groups import identity
from healthd.failslow.model import Cause, Confidence, Suspect
from healthd.failslow.node_evidence import MOST_NAMED, agreeing_evidence, one_cause
from healthd.failslow.outliers import (
    CLEAR,
    COMMUNICATION_LIMIT,
    EXPLAINS,
    FEWEST,
    LIMIT,
    PAUSING,
    Found,
    duration,
    link,
    pausing,
    until_the_end,
)
from healthd.failslow.steps import STEPS, Observed, Step
from healthd.failslow.windows import Change

FASTER = 0.97  # a stage with a median change below this has less work than before


def named(
    seen: Observed, step: Step, members: Sequence[int], found: Sequence[Found], slack: bool = False
) -> list[Suspect]:
    """Return the node as the suspect if all outliers are on one of several nodes, otherwise each outlier."""
    found = [pausing(until_the_end(seen, step, one)) for one in found]
    nodes = {seen.series[one.member].node for one in found}
    all_nodes = {seen.series[one].node for one in members}
    slow = len({one.member for one in found})
    several = slow > 2
    (node,) = nodes if len(nodes) == 1 else ("",)
    if slow > 1 and node and len(all_nodes) > 1:
        ones = sorted({one.member for one in found}, key=lambda one: identity(seen.series[one]))
        causes = {one.cause for one in found}
        agreeing = agreeing_evidence(seen, step, ones)
        kind = seen.series[ones[0]].kind_of or "series"
        said = tuple(f"{kind} {seen.series[one.member].name}: {one.sentence}" for one in found[:MOST_NAMED])
        left = len(found) - len(said)
        return [
            Suspect(
                node,
                "node",
                one_cause(causes),
                _sure(seen, step, found, bool(agreeing), slack),
                (*said, *((f"and {left} more ranks",) if left > 0 else ()), *agreeing),
                tuple(seen.series[one].name for one in ones),
                seen.point(step, ones),
            )
        ]
    suspects = []
    for one in found:
        series = seen.series[one.member]
        agreeing = agreeing_evidence(seen, step, [one.member])
        said = (one.sentence,)
        if several:
            said += (f"{slow} became slow at about the same time: they may have a common cause",)
        if slack:
            said += ("no iteration became slower: it has slack",)
        sure = _sure(seen, step, [one], bool(agreeing), slack)
        if several and sure is Confidence.HIGH and not agreeing:
            sure = Confidence.MEDIUM
        suspects.append(
            Suspect(
                series.name,
                series.kind_of or "series",
                one.cause,
                sure,
                (*said, *agreeing),
                (series.name,),
                seen.point(step, [one.member]),
            )
        )
    return suspects


def _sure(seen: Observed, step: Step, found: Sequence[Found], agreeing: bool, slack: bool) -> Confidence:
    if slack or (not agreeing and any(one.resting > PAUSING for one in found)):
        return Confidence.LOW
    return confidence_of(
        all(one.excess - 1 >= 2 * (one.limit - 1) for one in found),
        all(one.clear > 2 * CLEAR for one in found),
        all(one.peers >= 7 for one in found),
        agreeing,
    )


def confidence_of(*counts: bool) -> Confidence:
    """Return the confidence for the facts listed in peers.py: three are high, two medium."""
    yes = sum(counts)
    return Confidence.HIGH if yes >= 3 else Confidence.MEDIUM if yes == 2 else Confidence.LOW


# --- groups


def slow_groups(
    seen: Observed, step: Step, members: Sequence[int], transfer: Mapping[int, Change], lost: float
) -> list[Suspect]:
    """Return suspects for groups whose transfer is long while it is not in other groups of the same role.

    Groups of one role have the same number of ranks and about the same time at rest (the same volume). If the slow
    groups have exactly one member or node in common, it is the suspect. Otherwise each group is.
    """
    groups: dict[str, list[int]] = defaultdict(list)
    for one in members:
        if seen.series[one].group and one in transfer:
            groups[seen.series[one].group].append(one)
    alike: list[list[str]] = []
    before = {name: statistics.median(transfer[one].before for one in some) for name, some in groups.items()}
    for name in sorted(groups, key=lambda name: (len(groups[name]), before[name], name)):
        last = alike[-1][-1] if alike else ""
        if last and len(groups[last]) == len(groups[name]) and before[name] <= 1.5 * before[last]:
            alike[-1].append(name)
        else:
            alike.append([name])
    suspects = []
    for names in alike:
        if len(names) < FEWEST:
            continue
        of_group = {name: statistics.median(transfer[one].ratio for one in groups[name]) for name in names}
        middle = statistics.median_high(of_group.values())
        scatter = windows.spread([math.log(ratio) for ratio in of_group.values()])
        slow = {
            name: math.log(ratio / middle) / math.hypot(scatter, 0.02)
            for name, ratio in of_group.items()
            if min(transfer[one].ratio for one in groups[name]) > COMMUNICATION_LIMIT
            and ratio > COMMUNICATION_LIMIT * middle
            and math.log(ratio / middle) > CLEAR * math.hypot(scatter, 0.02)
            and statistics.median(transfer[one].more for one in groups[name]) >= EXPLAINS * lost
        }
        if slow:
            suspects += _named(seen, step, groups, slow, of_group, middle, transfer)
    return suspects


def _named(
    seen: Observed,
    step: Step,
    groups: Mapping[str, Sequence[int]],
    slow: Mapping[str, float],
    of_group: Mapping[str, float],
    middle: float,
    transfer: Mapping[int, Change],
) -> list[Suspect]:
    def sentence(name: str) -> str:
        now = statistics.median(transfer[one].after for one in groups[name])
        before = statistics.median(transfer[one].before for one in groups[name])
        return (
            f"group {name} transfers {duration(now)} against {duration(before)} before; "
            f"{len(of_group) - len(slow)} other groups of its kind {middle - 1:+.0%}"
        )

    def confidence(names: Iterable[str], supported: bool) -> Confidence:
        some = list(names)
        excess = min(of_group[name] for name in some) / middle
        clear = min(slow[name] for name in some)
        return confidence_of(excess >= 1.4, clear > 2 * CLEAR, len(of_group) > 7, supported)

    sentences = tuple(sentence(name) for name in sorted(slow))
    if len(slow) > 1:
        ranks = set.intersection(*({seen.series[one].name for one in groups[name]} for name in slow))
        nodes = set.intersection(*({seen.series[one].node for one in groups[name]} for name in slow)) - {""}
        for common, kind in ((ranks, ""), (nodes, "node")):
            if len(common) == 1:
                (subject,) = common
                ones = [
                    one
                    for name in sorted(slow)
                    for one in groups[name]
                    if subject == (seen.series[one].node if kind else seen.series[one].name)
                ]
                agreeing = agreeing_evidence(seen, step, ones)
                found = Suspect(
                    subject,
                    kind or seen.series[ones[0]].kind_of or "series",
                    link(seen, [one for name in slow for one in groups[name]]),
                    confidence(slow, bool(agreeing)),
                    (*sentences, f"it belongs to each of the {len(slow)} slow groups", *agreeing),
                    tuple(sorted({seen.series[one].name for one in ones})),
                    seen.point(step, ones),
                )
                return [found]
    suspects = []
    for name in sorted(slow):
        ones = list(groups[name])
        agreeing = agreeing_evidence(seen, step, ones)
        suspects.append(
            Suspect(
                name,
                "group",
                link(seen, ones),
                confidence([name], bool(agreeing)),
                (sentence(name), *agreeing),
                tuple(sorted(seen.series[one].name for one in ones)),
                seen.point(step, ones),
            )
        )
    return suspects


# --- nodes that are slow alone


class SlowNode(NamedTuple):
    """A node that is slow alone.

    members: its ranks. others: ranks of the other nodes. roles: roles with a member on the node. whole: it runs all
    members of these roles. node_count: number of nodes of the job. added_time: median added time of its ranks. excess:
    change of its least slowed rank divided by the median of the other nodes. standard_errors: of that difference.
    """

    node: str
    what: str
    members: tuple[int, ...]
    others: tuple[int, ...]
    roles: tuple[tuple[int, ...], ...]
    whole: bool
    nodes: int
    more: float
    excess: float
    clear: float
    limit: float


def slow_node(
    seen: Observed,
    role_of: Mapping[int, tuple[int, ...]],
    busy: Mapping[int, Change],
    transfer: Mapping[int, Change],
    host: Mapping[int, Change],
    values: Mapping[int, Change],
    lost: float,
) -> SlowNode | None:
    """Return the only node whose ranks account for the slowdown, or None.

    Args:
        busy, transfer, host, values: change of each rank's time.
        lost: by how much an iteration became longer.
    """
    for what, changes, limit in (
        ("busy", busy, LIMIT),
        ("host", _of_iteration(host, values), LIMIT),
        ("transfer", transfer, COMMUNICATION_LIMIT),
    ):
        found = _alone(seen, role_of, what, changes, limit, lost)
        if found is not None and (what == "busy" or not found.whole):
            return found
    return None


def suspect(seen: Observed, step: Step, found: SlowNode) -> Suspect:
    """Return the node as a suspect."""
    agreeing = agreeing_evidence(seen, step, found.members)
    return Suspect(
        found.node,
        "node",
        cause_of(seen, found),
        _confidence(found, bool(agreeing)),
        (_sentence(found), _caution(seen, found), *agreeing),
        tuple(sorted(seen.series[one].name for one in found.members)),
        seen.point(step, found.members),
        found.whole,
    )


def too_few_nodes(seen: Observed, found: SlowNode) -> str:
    """Return why the node is not named among so few nodes: a sentence without a full stop."""
    return (
        f"{_NAMES[found.what]} rose in all {len(found.members)} ranks of node {found.node}, {_part(seen, found)}, and "
        f"in no other rank; {found.nodes} nodes are too few to name one"
    )


_NAMES = {
    "busy": "busy time",
    "host": "the time that is neither busy, wait nor transfer",
    "transfer": "transfer time",
}


def _of_iteration(host: Mapping[int, Change], values: Mapping[int, Change]) -> dict[int, Change]:
    """Return the iteration's time with only the host's part changed, because the host's own time may be near zero."""
    return {
        one: Change(values[one].before, values[one].before + change.more, change.noise, change.resting)
        for one, change in host.items()
        if one in values and values[one].before + change.more > 0
    }


def _alone(
    seen: Observed,
    role_of: Mapping[int, tuple[int, ...]],
    what: str,
    changes: Mapping[int, Change],
    limit: float,
    lost: float,
) -> SlowNode | None:
    if set(changes) != set(role_of) or any(not seen.series[one].node for one in changes):
        return None
    rose = [one for one, change in changes.items() if change.ratio > limit and change.more >= EXPLAINS * lost]
    nodes = {seen.series[one].node for one in rose}
    if len(nodes) != 1:
        return None
    (node,) = nodes
    members = tuple(sorted(one for one in changes if seen.series[one].node == node))
    others = tuple(sorted(set(changes) - set(members)))
    if len(rose) < len(members) or len(members) < FEWEST or len(others) < FEWEST:
        return None
    roles = tuple(sorted({role_of[one] for one in members}))
    if any(not FASTER < middle < STEPS for middle in _middles(changes, role_of, set(others))):
        return None
    ratios = [math.log(changes[one].ratio) for one in others]
    middle = statistics.median(ratios)
    least = min(members, key=lambda one: changes[one].ratio)
    above = math.log(changes[least].ratio) - middle
    clear = above / math.hypot(changes[least].noise / changes[least].before, windows.spread(ratios), 0.005)
    if math.exp(above) <= limit or clear <= CLEAR:
        return None
    whole = all(set(role) <= set(members) for role in roles)
    count = len({seen.series[one].node for one in changes})
    more = statistics.median(changes[one].more for one in members)
    return SlowNode(node, what, members, others, roles, whole, count, more, math.exp(above), clear, limit)


def _middles(
    changes: Mapping[int, Change], role_of: Mapping[int, tuple[int, ...]], others: Collection[int]
) -> list[float]:
    """Return the median change of each role, for its ranks on other nodes."""
    roles = {role_of[one] for one in others}
    return [statistics.median(changes[one].ratio for one in role if one in others) for role in roles]


def cause_of(seen: Observed, found: SlowNode) -> Cause:
    if found.what == "transfer":
        return link(seen, [one for role in found.roles for one in role])
    if found.what == "host":
        return Cause.COMPUTE_CPU
    told = all(seen.series[one].busy is not None for one in found.members)
    return Cause.COMPUTE_GPU if told else Cause.COMPUTE


def _confidence(found: SlowNode, agreeing: bool) -> Confidence:
    """Return the confidence.

    A whole stage is low, or medium with conditions on the node. A clear part of a stage is one grade higher.
    """
    clearly = not found.whole and found.excess - 1 >= 2 * (found.limit - 1) and found.clear > 2 * CLEAR
    grades = (Confidence.LOW, Confidence.MEDIUM, Confidence.HIGH)
    return grades[clearly + agreeing]


def _sentence(found: SlowNode) -> str:
    return (
        f"{_NAMES[found.what]} rose in all {len(found.members)} ranks of the node, by {duration(found.more)} in the "
        f"median and {found.excess - 1:.0%} or more against the other nodes, and in none of the {len(found.others)} "
        f"ranks of the {found.nodes - 1} other nodes"
    )


def _caution(seen: Observed, found: SlowNode) -> str:
    part = _part(seen, found)
    if found.whole:
        return f"its ranks are {part}: a change of that work alone would look the same"
    return f"its ranks are {part}, and the others of the same work did not become slower"


def _part(seen: Observed, found: SlowNode) -> str:
    """Return "all of group g1" or "8 of 16 of group g1"."""
    words = []
    for role in found.roles:
        here, group = sum(one in found.members for one in role), seen.series[role[0]].group
        share = "all" if here == len(role) else f"{here} of {len(role)}"
        words.append(f"{share} of group {group}" if group else f"{share} of one role")
    return ", ".join(words[:4]) + (f" and {len(words) - 4} more" if len(words) > 4 else "")
