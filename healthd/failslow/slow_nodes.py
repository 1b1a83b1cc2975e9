"""Nodes whose ranks all became slow while no rank of another node did. Pure.

Ranks are compared with peers of one role. That names nobody where a node runs a whole pipeline stage (tensor times data
parallel ranks = GPUs of a node) or half of one: no role has a healthy majority. The other nodes are peers then, each
rank against its own time before. More work for the job (a larger batch, longer sequences) would have slowed the other
stages too, and work that moved between stages would have made another stage faster; both rule out the node. A change
of one stage's work alone cannot be told from a slow node, so that a node with a whole stage is a suspect of low
confidence. Only the busy time counts there: the first stage alone loads the data.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Collection, Mapping
from typing import NamedTuple

from healthd.failslow import windows
from healthd.failslow.model import Cause, Confidence, Suspect
from healthd.failslow.node_evidence import agreeing_evidence
from healthd.failslow.outliers import CLEAR, COMMUNICATION_LIMIT, EXPLAINS, FEWEST, LIMIT, duration, link
from healthd.failslow.steps import STEPS, Observed, Step
from healthd.failslow.windows import Change

FASTER = 0.97  # a stage whose median change is below this gave work away


class SlowNode(NamedTuple):
    """A node that is slow alone.

    members: its ranks. others: the other nodes' ranks. roles: those with a member on the node. whole: it runs all
    members of these roles. nodes: how many nodes the job has. more: the median added time of its ranks. excess: the
    change of its least slowed rank over the other nodes' median. clear: that in standard errors.
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
    """Return the one node whose ranks account for the slowdown, or None.

    busy, transfer, host, values: the change of each rank's time. lost: by how much an iteration became longer.
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
    """Return why a node of so few is not named: a sentence without its end."""
    return (
        f"{_NAMES[found.what]} rose in all {len(found.members)} ranks of node {found.node}, {_part(seen, found)}, and "
        f"in no other rank: {found.nodes} nodes are too few to name one"
    )


_NAMES = {
    "busy": "busy time",
    "host": "the time that is neither busy, wait nor transfer",
    "transfer": "transfer time",
}


def _of_iteration(host: Mapping[int, Change], values: Mapping[int, Change]) -> dict[int, Change]:
    """Return the iteration's time with only the host's part changed: the host's own time may be near zero."""
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
    """Return the median change of each role, of its ranks that are on other nodes."""
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
    """A whole stage: low, medium with the node's own evidence. Part of a stage, clearly: one grade more."""
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
    """Return "all of group g1", "8 of 16 of group g1"."""
    words = []
    for role in found.roles:
        here, group = sum(one in found.members for one in role), seen.series[role[0]].group
        share = "all" if here == len(role) else f"{here} of {len(role)}"
        words.append(f"{share} of group {group}" if group else f"{share} of one role")
    return ", ".join(words[:4]) + (f" and {len(words) - 4} more" if len(words) > 4 else "")
