"""Evidence from the nodes' own conditions, in addition to the times of their ranks. Pure functions."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence

from healthd.failslow import windows
from healthd.failslow.model import Cause, Confidence, Evidence, Suspect
from healthd.failslow.steps import LASTING, STEPS, Observed, Step
from healthd.failslow.windows import Change

MOST_NAMED = 12

# Prefix of a condition's code (a check's name) -> cause. The first match counts.
_CAUSES = (
    (("gpu_nvlink", "nvlink", "gpu_fabric", "sxid", "gpu_pcie", "pcie", "iommu"), Cause.COMMUNICATION_INTRA_NODE),
    (("ib_", "mlx5", "nic", "eth_link"), Cause.COMMUNICATION_INTER_NODE),
    (("gpu",), Cause.COMPUTE_GPU),
    (("cpu", "memory", "processes", "kernel", "clock"), Cause.COMPUTE_CPU),
)
_INTO = {
    Cause.COMPUTE: "compute",
    Cause.COMPUTE_GPU: "compute",
    Cause.COMPUTE_CPU: "compute",
    Cause.COMMUNICATION: "communication",
    Cause.COMMUNICATION_INTRA_NODE: "communication",
    Cause.COMMUNICATION_INTER_NODE: "communication",
}


def named_by_evidence(
    seen: Observed, step: Step, members: Sequence[int], changes: Mapping[int, Change]
) -> Suspect | None:
    """Return the node as a suspect if it alone, of all nodes of the job, reported a condition that can slow a job.

    Return None if the times of its ranks contradict that.
    """
    there = {seen.series[one].node for one in members} - {""}
    telling: dict[str, list[int]] = defaultdict(list)
    for one in members:
        if _covering(seen, step, one):
            telling[seen.series[one].node].append(one)
    if len(telling) != 1 or (len(there) > 1 and 2 * len(telling) > len(there)):
        return None
    ((node, ones),) = telling.items()
    known = [changes[one] for one in ones if one in changes]
    if known and all(change.ratio < STEPS for change in known):
        return None
    said = _covering(seen, step, ones[0])
    begin, _ = seen.window(step, ones[0])
    series = seen.series[ones[0]]
    since = series.index[max(0, begin - windows.LONGEST_BEFORE)]
    fresh = any(one.begin > since for one in said) or begin == 0
    return Suspect(
        node,
        "node",
        one_cause({_of_code(one.code) for one in said}),
        Confidence.MEDIUM if fresh else Confidence.LOW,
        (
            *agreeing_evidence(seen, step, ones),
            "the job became slower at that time; the ranks' times do not show the cause",
        ),
        tuple(sorted(seen.series[one].name for one in ones)),
        seen.point(step, ones),
    )


def agreeing_evidence(seen: Observed, step: Step, ones: Iterable[int]) -> tuple[str, ...]:
    """Return the conditions that the members' nodes reported at that time, as sentences."""
    said = {(one.begin, one.code, one.what, one.node) for each in ones for one in _covering(seen, step, each)}
    return tuple(f"node {node} reported {what} ({code})" for _, code, what, node in sorted(said)[:MOST_NAMED])


def _covering(seen: Observed, step: Step, one: int) -> list[Evidence]:
    """Return the conditions on the node that were open at the onset or began before the alarm.

    Checks detect conditions late.
    """
    series = seen.series[one]
    begin, _ = seen.window(step, one)
    if not series.node or begin >= len(series.value):
        return []
    first = step.points.get(one, step.points[step.leader])
    alarm = min(begin + max(first.alarm_index - first.onset_index, LASTING), len(series.value) - 1)
    return [
        said
        for said in seen.evidence
        if said.node == series.node
        and said.begin <= series.index[alarm]
        and (said.end is None or said.end >= series.index[begin])
    ]


def _of_code(code: str) -> Cause:
    for begins, cause in _CAUSES:
        if code.startswith(begins):
            return cause
    return Cause.UNKNOWN


def one_cause(causes: set[Cause]) -> Cause:
    """Return what the causes have in common: compute, communication, or unknown."""
    if len(causes) == 1:
        return next(iter(causes))
    kinds = {_INTO.get(cause, "") for cause in causes}
    return {frozenset({"compute"}): Cause.COMPUTE, frozenset({"communication"}): Cause.COMMUNICATION}.get(
        frozenset(kinds), Cause.UNKNOWN
    )
