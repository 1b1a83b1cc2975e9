"""Uses conditions on the nodes as evidence, in addition to the ranks' times. All functions are pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence

from healthd.failslow import windows
from healthd.failslow.model import Cause, Confidence, Evidence, Suspect
from healthd.failslow.steps import MIN_LENGTH, SLOWER_RATIO, Observed, Step
from healthd.failslow.windows import Change

MAX_NAMED = 12

# Cause for each prefix of a condition's code (a check's name). The first match counts.
_CAUSES = (
    (("gpu_nvlink", "nvlink", "gpu_fabric", "sxid", "gpu_pcie", "pcie", "iommu"), Cause.COMMUNICATION_INTRA_NODE),
    (("ib_", "mlx5", "nic", "eth_link"), Cause.COMMUNICATION_INTER_NODE),
    (("gpu",), Cause.COMPUTE_GPU),
    (("cpu", "memory", "processes", "kernel", "clock"), Cause.COMPUTE_CPU),
)
_FAMILIES = {
    Cause.COMPUTE: "compute",
    Cause.COMPUTE_GPU: "compute",
    Cause.COMPUTE_CPU: "compute",
    Cause.COMMUNICATION: "communication",
    Cause.COMMUNICATION_INTRA_NODE: "communication",
    Cause.COMMUNICATION_INTER_NODE: "communication",
}


def suspect_by_evidence(
    observed: Observed, step: Step, members: Sequence[int], changes: Mapping[int, Change]
) -> Suspect | None:
    """Return the node as a suspect if it is the job's only node with a condition that can slow a job.

    Return None if the times of the node's ranks contradict this.
    """
    nodes = {observed.series[item].node for item in members} - {""}
    members_by_node: dict[str, list[int]] = defaultdict(list)
    for item in members:
        if _evidence_at(observed, step, item):
            members_by_node[observed.series[item].node].append(item)
    if len(members_by_node) != 1 or (len(nodes) > 1 and 2 * len(members_by_node) > len(nodes)):
        return None
    ((node, node_members),) = members_by_node.items()
    node_changes = [changes[item] for item in node_members if item in changes]
    if node_changes and all(change.ratio < SLOWER_RATIO for change in node_changes):
        return None
    evidence = _evidence_at(observed, step, node_members[0])
    begin, _ = observed.window(step, node_members[0])
    series = observed.series[node_members[0]]
    since = series.index[max(0, begin - windows.MAX_BASELINE)]
    is_new = any(item.begin > since for item in evidence) or begin == 0
    return Suspect(
        node,
        "node",
        common_cause({_cause_by_code(item.code) for item in evidence}),
        Confidence.MEDIUM if is_new else Confidence.LOW,
        (
            *agreeing_evidence(observed, step, node_members),
            "the job became slower at that time, but the ranks' times do not show the cause",
        ),
        tuple(sorted(observed.series[item].name for item in node_members)),
        observed.suspect_point(step, node_members),
    )


def agreeing_evidence(observed: Observed, step: Step, members: Iterable[int]) -> tuple[str, ...]:
    """Return sentences about the conditions that the members' nodes reported at that time."""
    records = {
        (item.begin, item.code, item.text, item.node)
        for member in members
        for item in _evidence_at(observed, step, member)
    }
    return tuple(f"node {node} reported {text} ({code})" for _, code, text, node in sorted(records)[:MAX_NAMED])


def _evidence_at(observed: Observed, step: Step, member: int) -> list[Evidence]:
    """Return the conditions on the node that were open at the onset or that began between the onset and the alarm.

    A condition that began after the onset also counts, because checks detect conditions late.
    """
    series = observed.series[member]
    begin, _ = observed.window(step, member)
    if not series.node or begin >= len(series.value):
        return []
    first = step.points.get(member, step.points[step.leader])
    alarm = min(begin + max(first.alarm_index - first.onset_index, MIN_LENGTH), len(series.value) - 1)
    return [
        record
        for record in observed.evidence
        if record.node == series.node
        and record.begin <= series.index[alarm]
        and (record.end is None or record.end >= series.index[begin])
    ]


def _cause_by_code(code: str) -> Cause:
    for begins, cause in _CAUSES:
        if code.startswith(begins):
            return cause
    return Cause.UNKNOWN


def common_cause(causes: set[Cause]) -> Cause:
    """Return the cause that these causes have in common: compute, communication, or unknown."""
    if len(causes) == 1:
        return next(iter(causes))
    kinds = {_FAMILIES.get(cause, "") for cause in causes}
    return {frozenset({"compute"}): Cause.COMPUTE, frozenset({"communication"}): Cause.COMMUNICATION}.get(
        frozenset(kinds), Cause.UNKNOWN
    )
