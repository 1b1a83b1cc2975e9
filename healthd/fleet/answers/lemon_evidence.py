"""Collects the evidence against each node: failed jobs, conditions, outages and tickets.

If a job ran on many nodes, its failure is attributed only to the culprits. For NODE_FAIL, the culprit is the node that
went DOWN at that time. Otherwise, the culprits are the nodes with a condition in [end - 10 min, end + 5 min], the
window used by Kokolis, Kuchnik et al. (HPCA 2025, arXiv 2410.21680). Several culprits share the failure. If no culprit
is known, all the job's nodes share the failure, and shares below MIN_SHARE are dropped. To exclude users' mistakes, a
FAILED job is attributed only to a node that had a condition that drains (degraded or critical).

A fault of an NVLink domain's switch side (statistics/domain_faults.py) is no evidence against the domain's nodes.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple, TypeVar

from healthd.fleet.answers.study import Study
from healthd.fleet.statistics.domain_faults import (
    FaultsByNode,
    LinkFault,
    domain_fault,
    explains_outage,
    faults_by_node,
    find_domain_faults,
)
from healthd.fleet.statistics.lemon_score import Observation, Spell

BEFORE_SECONDS, AFTER_SECONDS = 600, 300
MIN_SHARE = 0.1
# If the same job ends with NODE_FAIL on this many nodes, the job kills its nodes (a crash loop). All these failures
# count as one.
LOOP_MIN_NODES = 3

Key = tuple[str, str]  # cluster, node
R = TypeVar("R", "ConditionMoment", "OutageRow", "Maintenance", "ExternalRecord")


@dataclass(frozen=True, slots=True)
class Evidence:
    """One piece of evidence against a node.

    Attributes:
        kind: failed (a job), out (of service), condition, ticket, failure (recorded by another tool).
        code: code of a condition; for `out`, the reason (a healthd code, "down", "person", "unknown").
        weight: probability that this node caused the failure, 0 to 1.
        text: text from other sources.
        gpus, nodes: GPUs and nodes of the job.
    """

    kind: str
    start_time: int
    end_time: int
    code: str
    weight: float
    text: str = ""
    job_id: int | None = None
    db_index: int | None = None
    state: str = ""
    gpus: int | None = None
    nodes: int | None = None

    @property
    def sign(self) -> Observation:
        return Observation(self.start_time, self.end_time, self.weight)


@dataclass(frozen=True, slots=True)
class Outage:
    """A period out of service.

    Attributes:
        end_time: None if it is not over yet.
        by_whom: healthd, slurm, person or unknown.
    """

    start_time: int
    end_time: int | None
    code: str
    by_whom: str
    reason: str


# --- rows of the store


class FailedJobSighting(NamedTuple):
    """A row returned by lemons_failed_jobs.sql or lemons_node_fails.sql: a failed job, and a sighting on one of its
    nodes.
    """

    cluster: str
    db_index: int
    job_id: int
    state: str
    end_time: int
    gpus: int | None
    nodes: int | None
    node: str
    time: int
    code: str
    severity: str
    kind: str


class ConditionMoment(NamedTuple):
    """A row returned by lemons_moments.sql. `busy` is True if a job was on the node."""

    cluster: str
    node: str
    time: int
    code: str
    severity: str
    kind: str
    busy: bool


class OutageRow(NamedTuple):
    """A row returned by lemons_outages.sql."""

    cluster: str
    node: str
    start_time: int
    end_time: int | None
    state: str
    reason: str
    by_whom: str


class Maintenance(NamedTuple):
    """A row returned by lemons_maintenance.sql."""

    cluster: str
    node: str
    start_time: int
    end_time: int | None


class ExternalRecord(NamedTuple):
    """A row returned by lemons_external_records.sql: a ticket, or a failure recorded by another tool."""

    cluster: str
    node: str
    kind: str
    time: int
    code: str
    text: str


class FirstSeen(NamedTuple):
    """A row returned by lemons_first_seen.sql."""

    cluster: str
    node: str
    first_time: int


class ClusterStart(NamedTuple):
    """A row returned by lemons_cluster_starts.sql."""

    cluster: str
    first_time: int


@dataclass(frozen=True, slots=True)
class FleetEvidence:
    """Evidence against each node, and the node's outages.

    Attributes:
        first_seen: time at which each node first occurs in the store.
        begins: time at which each cluster first occurs, used for nodes that occur only in failures.
        shares: for each code, the share of its sightings at which a job failed (`failure_shares`).
        domain_faults: faults of the switch sides of NVLink domains.
    """

    evidence: dict[Key, list[Evidence]]
    outages: dict[Key, list[Outage]]
    first_seen: dict[Key, int]
    begins: dict[str, int]
    shares: dict[str, float]
    domain_faults: FaultsByNode


def load_evidence(study: Study, begin: int, end: int) -> FleetEvidence:
    """Load the evidence in [begin, end), epoch seconds."""
    window = {"window_from": begin, "window_to": end}
    window_parameters = {**window, "after_seconds": AFTER_SECONDS}
    domain_faults = faults_by_node(find_domain_faults(study.query("link_faults", LinkFault)))
    condition_moments = [
        row
        for row in study.query("lemons_moments", ConditionMoment, **window_parameters)
        if not _is_of_domain(row, domain_faults)
    ]
    sightings, node_fails = without_domain_faults(
        study.query("lemons_failed_jobs", FailedJobSighting, **window_parameters, before_seconds=BEFORE_SECONDS),
        study.query("lemons_node_fails", FailedJobSighting, **window),
        domain_faults,
    )
    failed_jobs = failed_job_evidence(sightings, node_fails)
    outages = merge_outages(
        study.query("lemons_outages", OutageRow, **window), study.query("lemons_maintenance", Maintenance, **window)
    )
    records_by_node = _by_node(study.query("lemons_external_records", ExternalRecord, **window))
    shares = failure_shares(condition_moments, sightings)
    found: dict[Key, list[Evidence]] = defaultdict(list)
    for key, node_evidence in (
        *failed_jobs.items(),
        *((key, condition_evidence(rows, shares)) for key, rows in _by_node(condition_moments).items()),
        *(
            (key, outage_evidence(_own_outages(key, spells, domain_faults), failed_jobs.get(key, []), shares, end))
            for key, spells in outages.items()
        ),
        *((key, [_external_evidence(row) for row in rows]) for key, rows in records_by_node.items()),
    ):
        found[key] += node_evidence
    return FleetEvidence(
        dict(found),
        outages,
        {(row.cluster, row.node): row.first_time for row in study.query("lemons_first_seen", FirstSeen)},
        {row.cluster: row.first_time for row in study.query("lemons_cluster_starts", ClusterStart)},
        shares,
        domain_faults,
    )


# --- pure


def without_domain_faults(
    sightings: Iterable[FailedJobSighting], node_fails: Iterable[FailedJobSighting], domain_faults: FaultsByNode
) -> tuple[list[FailedJobSighting], list[FailedJobSighting]]:
    """Return the rows without sightings of domain faults, and without the jobs that these ended."""
    own_sightings = []
    ended: set[tuple[str, int]] = set()
    for row in sightings:
        if _is_of_domain(row, domain_faults):
            ended.add((row.cluster, row.db_index))
        else:
            own_sightings.append(row)
    return own_sightings, [row for row in node_fails if (row.cluster, row.db_index) not in ended]


def _is_of_domain(row: ConditionMoment | FailedJobSighting, domain_faults: FaultsByNode) -> bool:
    """Return True if this is a condition, or a drain for it, that belongs to a domain fault."""
    if row.kind == "condition":
        return domain_fault(domain_faults, row.cluster, row.node, row.code, row.time) is not None
    return explains_outage(domain_faults, row.cluster, row.node, _code(row), row.time)


def _own_outages(key: Key, outages: Iterable[Outage], domain_faults: FaultsByNode) -> list[Outage]:
    return [outage for outage in outages if not explains_outage(domain_faults, *key, outage.code, outage.start_time)]


def _by_node(rows: Iterable[R]) -> dict[Key, list[R]]:
    found: dict[Key, list[R]] = defaultdict(list)
    for row in rows:
        found[row.cluster, row.node].append(row)
    return found


def outage_code(state: str, reason: str, by_whom: str) -> str:
    """Return the reason for an outage: a healthd code ("gpu_xid/79"), "down", or the actor."""
    if "DOWN" in state:
        return "down"
    if by_whom == "healthd":
        first = reason.removeprefix("healthd: ").split(" ", 1)[0].rstrip(":")
        return first if "/" in first else "healthd"
    return by_whom


def merge_outages(states: Iterable[OutageRow], maintenance: Iterable[Maintenance]) -> dict[Key, list[Outage]]:
    """Merge records that overlap or touch into outages.

    An outage has the kind "down" if the node went DOWN, otherwise the kind of its first record.

    Records within a maintenance reservation are skipped.
    """
    planned = _by_node(maintenance)
    found: dict[Key, list[Outage]] = {}
    for key, rows in _by_node(states).items():
        spells: list[Outage] = []
        for row in sorted(rows, key=lambda row: (row.start_time, row.by_whom, row.state, row.reason)):
            start, end = row.start_time, row.end_time
            if any(_is_within(start, end, reservation) for reservation in planned.get(key, ())):
                continue
            code = outage_code(row.state, row.reason, row.by_whom)
            last = spells[-1] if spells else None
            if last is not None and (last.end_time is None or start <= last.end_time):
                merged_end = None if None in (last.end_time, end) else max(last.end_time or 0, end or 0)
                code = "down" if "down" in (code, last.code) and last.by_whom != "person" else last.code
                spells[-1] = replace(last, end_time=merged_end, code=code)
            else:
                spells.append(Outage(start, end, code, row.by_whom, row.reason))
        if spells:
            found[key] = spells
    return found


def _is_within(start: int, end: int | None, planned: Maintenance) -> bool:
    planned_end = planned.end_time
    return planned.start_time <= start and (
        planned_end is None or (start < planned_end and (end is None or end <= planned_end))
    )


def failure_shares(moments: Iterable[ConditionMoment], sightings: Iterable[FailedJobSighting]) -> dict[str, float]:
    """Return, for each code, the share of its sightings and drains at which a job on the node failed.

    If a code never coincides with a failure (a slow link, a drain by a person to inspect a fan), it is weak evidence of
    a failing node. Sightings without a job on the node are ignored: a fault on an idle node fails no job, so an idle
    fleet would give every code a low share. Drains by people are always included, because people prefer to work on idle
    nodes. The share follows Laplace's rule, (k + 1) / (n + 2), which is 1/2 without data.
    """
    days_seen: dict[str, set[tuple[str, str, int]]] = defaultdict(set)
    failed: dict[str, set[tuple[str, str, int]]] = defaultdict(set)
    for moment in moments:
        code = _code(moment)
        days_seen.setdefault(code, set())
        if moment.busy or code == "person":
            # Count each code once per node and day, because a condition may be seen every minute.
            days_seen[code].add((moment.cluster, moment.node, moment.time // 86400))
    for row in sightings:
        code = _code(row)
        days_seen.setdefault(code, set())
        failed[code].add((row.cluster, row.node, row.time // 86400))
    return {
        code: (len(failed[code]) + 1) / (len(seen_days | failed[code]) + 2) for code, seen_days in days_seen.items()
    }


def _code(row: ConditionMoment | FailedJobSighting) -> str:
    if row.kind == "condition":
        return str(row.code)
    return outage_code("DOWN" if row.severity == "down" else "", row.code, row.kind)


def failed_job_evidence(
    sightings: Iterable[FailedJobSighting], node_fails: Iterable[FailedJobSighting]
) -> dict[Key, list[Evidence]]:
    """Return the failed jobs as evidence. A failure is divided equally among the nodes to blame."""
    blamed: dict[tuple[str, int], dict[str, FailedJobSighting]] = defaultdict(dict)
    for row in sightings:
        if _is_to_blame(row):
            job_culprits = blamed[row.cluster, row.db_index]
            if row.node not in job_culprits or _strength(row) < _strength(job_culprits[row.node]):
                job_culprits[row.node] = row
    for row in node_fails:
        job_culprits = blamed[row.cluster, row.db_index]
        if all(culprit.kind == "unknown" for culprit in job_culprits.values()):
            job_culprits[row.node] = row
    for job, job_culprits in blamed.items():
        if any(row.severity == "down" for row in job_culprits.values()):
            blamed[job] = {node: row for node, row in job_culprits.items() if row.severity == "down"}
    loops: dict[tuple[str, int], set[str]] = defaultdict(set)
    for (cluster, _), job_culprits in blamed.items():
        for node, row in job_culprits.items():
            if row.severity == "down" and (row.nodes or 0) > 1:
                loops[cluster, row.job_id].add(node)
    found: dict[Key, list[Evidence]] = defaultdict(list)
    for (cluster, _), job_culprits in sorted(blamed.items()):
        for node, row in sorted(job_culprits.items()):
            killed_nodes = len(loops[cluster, row.job_id])
            share = 1 / len(job_culprits) / (killed_nodes if killed_nodes >= LOOP_MIN_NODES else 1)
            if share >= MIN_SHARE:
                found[cluster, node].append(_failed_job(row, share))
            elif killed_nodes >= LOOP_MIN_NODES:
                found[cluster, node].append(_failed_job(row, 0.0))
    return dict(found)


def _is_to_blame(row: FailedJobSighting) -> bool:
    """Return True if this sighting may have ended the job. A drain by a person cannot have done so."""
    if row.kind != "condition":
        return bool(row.severity == "down" and row.state in ("NODE_FAIL", "REQUEUED"))
    return bool(row.state != "REQUEUED" or row.severity == "critical")


def _strength(row: FailedJobSighting) -> tuple[int, int, str]:
    return {"down": 0, "critical": 1, "degraded": 2}[row.severity], row.time, row.code


def _failed_job(row: FailedJobSighting, share: float) -> Evidence:
    return Evidence(
        "failed",
        row.end_time,
        row.end_time,
        "down" if row.severity == "down" else row.code,
        share,
        job_id=row.job_id,
        db_index=row.db_index,
        state=row.state,
        gpus=row.gpus,
        nodes=row.nodes,
    )


def condition_evidence(moments: Iterable[ConditionMoment], shares: Mapping[str, float]) -> list[Evidence]:
    return [
        Evidence("condition", row.time, row.time, row.code, shares[row.code])
        for row in moments
        if row.kind == "condition"
    ]


def outage_evidence(
    outages: Iterable[Outage], failed: Iterable[Evidence], shares: Mapping[str, float], end: int
) -> list[Evidence]:
    """Return the outages as evidence.

    A node that went down counts as failed even if no job ran on it. In a crash loop, an outage has at most the weight
    of the job's failure on the node.
    """
    loops = [loop_evidence for loop_evidence in failed if loop_evidence.code == "down"]
    found = []
    for outage in outages:
        weight = 1.0 if outage.code == "down" else shares.get(outage.code, 0.5)
        coinciding_weights = [
            loop_evidence.weight
            for loop_evidence in loops
            if -BEFORE_SECONDS <= loop_evidence.start_time - outage.start_time <= BEFORE_SECONDS
        ]
        if outage.code == "down" and coinciding_weights:
            weight = max(coinciding_weights)
        until = outage.end_time if outage.end_time is not None else end
        found.append(Evidence("out", outage.start_time, until, outage.code, weight, outage.reason))
    return found


def _external_evidence(row: ExternalRecord) -> Evidence:
    # The store does not show which tickets are about node failures. Tickets about node failures coincide with a failure
    # or an outage.
    return Evidence(row.kind, row.time, row.time, row.code, 0.0 if row.kind == "ticket" else 1.0, row.text)


def service_spells(first_seen: int, end: int, outages: Iterable[Outage]) -> list[Spell]:
    """Return the times when the node was in service and could fail: [first_seen, end) without its outages."""
    spells, position = [], first_seen
    for outage in sorted(outages, key=lambda item: item.start_time):
        if outage.start_time > position:
            spells.append((position, min(outage.start_time, end)))
        position = max(position, end if outage.end_time is None else outage.end_time)
        if position >= end:
            break
    if position < end:
        spells.append((position, end))
    return [(start, until) for start, until in spells if start < until]
