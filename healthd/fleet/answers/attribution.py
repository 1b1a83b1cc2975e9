"""Most likely causes of failed jobs, how often each cause occurred, and what it cost.

Source: the section about attribution in arXiv 2410.21680 (Kokolis, Kuchnik et al., HPCA 2025). causes.py defines the
causes, their order and the rule for one job. weeks.py counts the causes per week.
"""

from __future__ import annotations

import sys
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import count, groupby, islice
from typing import NamedTuple

from healthd.common.page import plural
from healthd.common.slurm.drain_reason import domain_id
from healthd.common.text import regex
from healthd.fleet.answers import document
from healthd.fleet.answers.causes import (
    CAUSES,
    CONFIDENCES,
    HARDWARE,
    SWITCH_CAUSE,
    SYSTEM_SOFTWARE,
    USER_PROGRAM,
    Attribution,
    Failure,
    Sighting,
    attribute_failure,
    meaning,
)
from healthd.fleet.answers.document import Document, share
from healthd.fleet.answers.states import ClusterGpus
from healthd.fleet.answers.study import R, Row, Study
from healthd.fleet.statistics import weeks
from healthd.fleet.statistics.domain_faults import (
    FaultsByNode,
    LinkFault,
    domain_fault,
    faults_by_node,
    find_domain_faults,
)

MAX_UNATTRIBUTED_JOBS = 20  # maximum number of jobs without a cause to list
FAILED_JOBS_PER_PAGE = 200  # number of failed jobs to fetch at once when looking for those without a cause
CONDITIONS_PER_PAGE = 5000  # number of conditions to fetch at once

_NAMES_GPU = regex(r"(?i).*\bgpus?\b.*")
_NAMES_SWAP = regex(r"(?i).*\b(?:swap|replac|exchang|rma)\w*.*")

OBSERVATION_STATES = ("observed", "not_observed", "no_node_list")
_PAPER_CLUSTERS = ("RSC-1", "RSC-2")  # the paper's clusters
GPU_CAUSES = frozenset({"pcie", "gpu_lost", SWITCH_CAUSE, "nvlink", "gpu_memory", "gsp", "gpu"})

has_findings = document.no_findings


class ConditionRow(NamedTuple):
    """A row returned by attribution_page.sql: a condition on a node of a failed job, and the job.

    `jobs` are the jobs that the condition's source names. A condition has one row for each distinct list of jobs.
    """

    place: int
    cluster: str
    db_index: int
    job_id: int
    array_job_id: int | None
    array_task_id: int | None
    state: str
    start_time: int | None
    end_time: int
    nodes: int
    node: str
    code: str
    subject: str
    check_name: str
    severity: str
    kind: str
    first_seen: int
    last_seen: int
    from_events: int
    jobs: str
    gpus: int
    looked: str
    gpu_seconds: int
    lost_gpu_seconds: int


class FailureTotal(NamedTuple):
    """A row returned by attribution_totals.sql."""

    state: str
    looked: str
    jobs: int
    lost_gpu_seconds: int


class FailedJob(NamedTuple):
    """A row returned by attribution_largest.sql. Its fields are keys of the document."""

    cluster: str
    job: int
    db_index: int
    state: str
    end_time: int
    gpus: int
    lost_gpu_seconds: int
    because: str


class Week(NamedTuple):
    """A row returned by attribution_weeks.sql."""

    week: int
    gpu_seconds: int


class CheckDate(NamedTuple):
    """A row returned by attribution_check_dates.sql. Its fields are keys of the document."""

    cluster: str
    check: str
    event: str
    version: str
    time: int
    first_time: int
    last_time: int
    nodes: int


class ClearedFlag(NamedTuple):
    """A row returned by attribution_cleared_flags.sql."""

    cluster: str
    node: str
    subject: str
    code: str
    time: int


class ReplacedGpu(NamedTuple):
    """A row returned by attribution_replaced_gpus.sql. `code` is the GPU's last fault."""

    cluster: str
    node: str
    subject: str
    time: int
    serial: str | None
    uuid: str | None
    next_gpu: str
    next_serial: str | None
    code: str


class ListedNode(NamedTuple):
    """A row returned by attribution_listed_nodes.sql."""

    cluster: str
    node: str
    first_time: int


class Ticket(NamedTuple):
    """A row returned by attribution_tickets.sql."""

    cluster: str
    node: str
    opened_time: int
    closed_time: int | None
    text: str


def attribution(study: Study) -> Document:
    """Return the document for `healthd fleet attribution` (docs/json.md).

    Raises Unanswerable if there are no jobs, or neither events nor scraped conditions.
    """
    study.require("jobs")
    if not study.has_rows("scraped_conditions"):
        study.require("events")
    domain_faults = find_domain_faults(study.query("link_faults", LinkFault))
    by_node = faults_by_node(domain_faults)

    def attributed(chance: int) -> Iterator[tuple[Job, Attribution]]:
        return attribute_jobs(
            _pages(study, "attribution_page", ConditionRow, CONDITIONS_PER_PAGE, chance=chance), by_node
        )

    by_chance = Counter(result.cause for _, result in attributed(chance=1))
    jobs = list(attributed(chance=0))
    gpu_hours = {row.week: row.gpu_seconds / 3600 for row in study.query("attribution_weeks", Week)}
    totals = study.query("attribution_totals", FailureTotal)
    attributed_keys = {(job.cluster, job.db_index) for job, _ in jobs}
    largest = _pages(study, "attribution_largest", FailedJob, FAILED_JOBS_PER_PAGE)
    unattributed_rows = (row for row in largest if (row.cluster, row.db_index) not in attributed_keys)
    listed_since = {
        (row.cluster, row.node): row.first_time for row in study.query("attribution_listed_nodes", ListedNode)
    }
    swaps = gpu_swaps(
        study.query("attribution_cleared_flags", ClearedFlag),
        study.query("attribution_tickets", Ticket),
        study.query("attribution_replaced_gpus", ReplacedGpu),
        listed_since,
    )
    gpus = sum(row.gpus for row in study.query("states_nodes", ClusterGpus))
    years = (study.to_time - study.from_time) / (365.25 * 86400)
    answer = {
        **unattributed(jobs, totals),
        **by_cause(jobs, by_chance, sum(gpu_hours.values())),
        **by_week(jobs, gpu_hours, study.from_time, study.to_time),
        "co_occurrence": co_occurrence([result for _, result in jobs]),
    }
    return {
        **study.head(
            "attribution",
            *study.coverage_notes("jobs", "events"),
            *study.unchosen_node_notes(((job.cluster, result.sighting.node) for job, result in jobs), "causes"),
            *_notes(answer, study.has_rows("tickets"), len(listed_since)),
        ),
        **answer,
        "unattributed_jobs": [row._asdict() for row in islice(unattributed_rows, MAX_UNATTRIBUTED_JOBS)],
        "check_dates": [row._asdict() for row in study.query("attribution_check_dates", CheckDate)],
        "gpu_swaps": {
            "known": len(swaps),
            "listed_nodes": len(listed_since),
            "per_1000_gpus_and_year": share(1000 * len(swaps), gpus * years),
            "swaps": swaps,
        },
        "domain_faults": [
            {
                "cluster": fault.cluster,
                "domain": fault.domain,
                "id": domain_id(fault.domain),
                "time": fault.start_time,
                "suspect": "switch side",
                "nodes": sorted(fault.nodes),
                "jobs": sum(
                    job.cluster == fault.cluster
                    and result.sighting.nvlink_domain == fault.domain
                    and fault.start_time <= result.sighting.first_seen <= fault.end_time
                    for job, result in jobs
                ),
            }
            for fault in domain_faults
            if study.from_time <= fault.start_time < study.to_time
        ],
        "jobs": [_job_row(job, result) for job, result in jobs],
    }


def _pages(study: Study, name: str, row: type[R], rows: int, **parameters: int) -> Iterator[R]:
    """Run a query page by page, with `rows` rows on each page, and yield each row."""
    for page in count():
        found = study.query(name, row, after_place=page * rows, page_rows=rows, **parameters)
        yield from found
        if not found:
            return


# --- one job


class Job(NamedTuple):
    """A failed job. Its fields are keys of the document, plus `looked`, which is one of `OBSERVATION_STATES`."""

    job: int
    db_index: int
    cluster: str
    state: str
    end_time: int
    gpus: int
    gpu_seconds: int
    lost_gpu_seconds: int
    looked: str


def attribute_jobs(
    rows: Iterable[ConditionRow], domain_faults: FaultsByNode | None = None
) -> Iterator[tuple[Job, Attribution]]:
    """Yield each job for which a cause was found, with its attribution.

    Args:
        domain_faults: faults of the switch sides of NVLink domains.
        rows: all rows for a job must follow each other. Within a job, all rows for a condition must follow each other.
    """
    for _, job_rows in groupby(rows, key=lambda row: (row.cluster, row.db_index)):
        condition_groups = [list(condition_rows) for _, condition_rows in groupby(job_rows, key=lambda row: row.place)]
        first = condition_groups[0][0]
        result = attribute_failure(
            _failure(first), [_sighting(condition_rows, domain_faults or {}) for condition_rows in condition_groups]
        )
        if result is not None:
            yield _job(first), result


def _job(row: ConditionRow) -> Job:
    return Job(
        row.job_id,
        row.db_index,
        sys.intern(row.cluster),
        sys.intern(row.state),
        row.end_time,
        row.gpus,
        row.gpu_seconds,
        row.lost_gpu_seconds,
        sys.intern(row.looked),
    )


def _failure(row: ConditionRow) -> Failure:
    ids = {str(row.job_id)}
    if row.array_task_id is not None:
        ids.add(f"{row.array_job_id}_{row.array_task_id}")
    return Failure(frozenset(ids), row.state, row.start_time, row.nodes)


def _sighting(rows: Sequence[ConditionRow], domain_faults: FaultsByNode) -> Sighting:
    """Build one condition from its rows. The rows differ only in the jobs that they name."""
    intern = sys.intern  # many rows, but few distinct texts
    row = rows[0]
    fault = domain_fault(domain_faults, row.cluster, row.node, row.code, row.first_seen)
    return Sighting(
        node=intern(row.node),
        code=intern(row.code),
        subject=intern(row.subject),
        check=intern(row.check_name),
        severity=intern(row.severity),
        kind=intern(row.kind),
        first_seen=row.first_seen,
        last_seen=row.last_seen,
        from_stream=row.from_events > 0,
        jobs=frozenset(name for condition_row in rows for name in condition_row.jobs.split()),
        nvlink_domain=fault.domain if fault else "",
    )


def _job_row(job: Job, result: Attribution) -> Row:
    means = meaning(result.sighting.code)
    return {
        **{key: value for key, value in job._asdict().items() if key != "looked"},
        "cause": result.cause,
        "domain": CAUSES[result.cause].domain,
        "transient": means.transient,
        "check": result.sighting.check,
        "code": result.sighting.code,
        "subject": result.sighting.subject,
        "node": result.sighting.node,
        "nvlink_domain": result.sighting.nvlink_domain or None,
        "confidence": result.confidence,
        "also": [
            {
                "cause": cause,
                "check": sighting.check,
                "code": sighting.code,
                "subject": sighting.subject,
                "node": sighting.node,
            }
            for cause, sighting in result.other_sightings
        ],
    }


# --- all jobs


def unattributed(jobs: Sequence[tuple[Job, Attribution]], totals: Sequence[FailureTotal]) -> Document:
    """Count the failed jobs with and without a cause.

    The failed jobs without a cause are also counted by how well their nodes were observed.

    Args:
        totals: numbers for all failed jobs.
    """
    attributed_counts = Counter((job.state, job.looked) for job, _ in jobs)
    remaining = {(row.state, row.looked): row.jobs - attributed_counts[row.state, row.looked] for row in totals}
    return {
        "failures": sum(row.jobs for row in totals),
        "attributed": len(jobs),
        "unattributed": sum(remaining.values()),
        "unattributed_because": {
            observation: sum(
                count for (_, row_observation), count in remaining.items() if row_observation == observation
            )
            for observation in OBSERVATION_STATES
        },
        "unattributed_by_state": {
            state: sum(count for (row_state, _), count in remaining.items() if row_state == state)
            for state in ("FAILED", "NODE_FAIL")
        },
        "unattributed_node_fails": sum(
            count for (row_state, _), count in remaining.items() if row_state == "NODE_FAIL"
        ),
        "lost_gpu_seconds": sum(row.lost_gpu_seconds for row in totals),
    }


def by_cause(jobs: Sequence[tuple[Job, Attribution]], by_chance: Mapping[str, int], gpu_hours: float) -> Document:
    """Return the jobs, incidents and lost time for each cause.

    Args:
        by_chance: for each cause, the number of jobs that the rule attributes to the cause when its window is moved to
            one hour before the failure. These matches are due to chance.
    """
    jobs_by_cause: dict[str, list[tuple[Job, Attribution]]] = defaultdict(list)
    for job, result in jobs:
        jobs_by_cause[result.cause].append((job, result))
    causes = []
    for name, cause in CAUSES.items():
        cause_jobs = jobs_by_cause.get(name, [])
        if not cause_jobs and not by_chance.get(name):
            continue
        by_transience = Counter(meaning(result.sighting.code).transient for _, result in cause_jobs)
        causes.append(
            {
                "cause": name,
                "domain": cause.domain,
                "jobs": len(cause_jobs),
                "by_chance": by_chance.get(name, 0),
                "incidents": len(_incidents(cause_jobs)),
                "nodes": len({(job.cluster, _place(result)) for job, result in cause_jobs}),
                "transient": by_transience[True],
                "permanent": by_transience[False],
                "confidence": {
                    confidence: sum(result.confidence == confidence for _, result in cause_jobs)
                    for confidence in CONFIDENCES
                },
                "gpu_seconds": sum(job.gpu_seconds for job, _ in cause_jobs),
                "lost_gpu_seconds": sum(job.lost_gpu_seconds for job, _ in cause_jobs),
                "jobs_per_million_gpu_hours": share(1e6 * len(cause_jobs), gpu_hours),
            }
        )
    domains = Counter(CAUSES[result.cause].domain for _, result in jobs)
    return {
        "by_cause": {cause["cause"]: cause["jobs"] for cause in causes if cause["jobs"]},
        "by_domain": {name: domains[name] for name in (USER_PROGRAM, SYSTEM_SOFTWARE, HARDWARE)}
        | {"unknown": domains[None]},
        "expected_by_chance": sum(by_chance.values()),
        "causes": causes,
    }


def _incidents(jobs: Iterable[tuple[Job, Attribution]]) -> list[weeks.Incident]:
    return weeks.group_incidents((job.cluster, _place(result), result.cause, job.end_time) for job, result in jobs)


def _place(result: Attribution) -> str:
    """Return where the fault is: a node, or the switch side of an NVLink domain."""
    domain = result.sighting.nvlink_domain if result.cause == SWITCH_CAUSE else ""
    return f"NVLink domain {domain_id(domain)}" if domain else result.sighting.node


def by_week(
    jobs: Sequence[tuple[Job, Attribution]], gpu_hours: Mapping[int, float], from_time: int, to_time: int
) -> Document:
    """Count the failures for each cause in each week of [from, to), and find the spikes.

    Weeks without failures are included. The first and last week may be partial: `days` is the number of the week's days
    in [from, to).
    """
    counts: dict[tuple[int, str], int] = Counter((weeks.week_start(job.end_time), result.cause) for job, result in jobs)
    incidents = _incidents(jobs)
    incident_counts = Counter((weeks.week_start(entry.time), entry.cause) for entry in incidents)
    active_causes = [name for name in CAUSES if any(cause == name for _, cause in counts)]
    every = range(weeks.week_start(from_time), to_time, weeks.WEEK) if active_causes else ()
    return {
        "weeks": [
            {
                "week": week,
                "cause": cause,
                "days": (min(week + weeks.WEEK, to_time) - max(week, from_time)) / 86400,
                "gpu_hours": gpu_hours.get(week, 0.0),
                "jobs": counts.get((week, cause), 0),
                "incidents": incident_counts[week, cause],
                "jobs_per_million_gpu_hours": share(1e6 * counts.get((week, cause), 0), gpu_hours.get(week, 0.0)),
            }
            for week in every
            for cause in active_causes
        ],
        "spikes": [
            {
                "cause": entry.cause,
                "week": entry.week,
                "incidents": entry.incidents,
                "expected": entry.expected,
                "nodes": [
                    {"cluster": cluster, "node": node, "incidents": count} for cluster, node, count in entry.nodes
                ],
                "share_of_nodes": share(sum(count for *_, count in entry.nodes), entry.incidents)
                if entry.nodes
                else None,
            }
            for entry in weeks.spikes(incidents, gpu_hours)
        ],
    }


def co_occurrence(jobs: Sequence[Attribution]) -> list[Row]:
    """Return the faults that occurred together, with the paper's figures for its clusters "RSC-1" and "RSC-2".

    Source: the paper's section about co-occurrence. The result is [{what, of, together, share, paper}]. `of` is the
    number of attributed jobs, and `together` is how many of these jobs had both faults.
    """
    hardware = [result for result in jobs if CAUSES[result.cause].domain == HARDWARE]
    pcie = [result for result in jobs if result.cause == "pcie"]
    links = [result for result in jobs if "ib_link" in result.possible_causes]
    lost_gpu, logged_interrupt = "gpu_xid/79", "ipmi_sel/critical_interrupt"
    rows = (
        (
            "hardware failure and another hardware failure",
            hardware,
            lambda result: result.has_competing_cause,
            (0.03, 0.05),
        ),
        ("PCIe error and Xid 79", pcie, lambda result: lost_gpu in result.codes, (0.43, 0.63)),
        (
            "PCIe error, Xid 79, critical interrupt",
            pcie,
            lambda result: {lost_gpu, logged_interrupt} <= result.codes,
            (0.21, 0.49),
        ),
        (
            "PCIe error without any Xid",
            pcie,
            lambda result: not any(code.startswith("gpu_xid/") for code in result.codes),
            (0.57, 0.37),
        ),
        (
            "InfiniBand failure and GPU failure",
            links,
            lambda result: bool(result.possible_causes & GPU_CAUSES),
            (0.02, 0.06),
        ),
    )
    return [
        {
            "what": title,
            "of": len(candidates),
            "together": sum(map(matches, candidates)),
            "share": share(sum(map(matches, candidates)), len(candidates)),
            "paper": dict(zip(_PAPER_CLUSTERS, paper, strict=True)),
        }
        for title, candidates, matches, paper in rows
    ]


def gpu_swaps(
    flags: Iterable[ClearedFlag],
    tickets: Iterable[Ticket],
    replaced: Iterable[ReplacedGpu] = (),
    listed_since: Mapping[tuple[str, str], int] | None = None,
) -> list[Row]:
    """Return the GPU replacements found in the store, sorted by time, as
    [{cluster, node, time, subject, why, serial, uuid, next_gpu, next_serial}].

    Replacements are inferred from flags and tickets only for times at which the node did not list its GPUs. A flag
    belongs to a ticket for its node if it was cleared while the ticket was open or within a day after it was closed.

    Args:
        flags: flags that were cleared although a GPU keeps them for life.
        tickets: tickets; their text may mention a GPU and its replacement.
        replaced: GPUs that were replaced after a fault, from the nodes' lists.
        listed_since: time of the first list of each (cluster, node).
    """

    def is_inferred(row: ClearedFlag | Ticket, time: int) -> bool:
        first_time = (listed_since or {}).get((row.cluster, row.node))
        return first_time is None or time < first_time

    flags = [flag for flag in flags if is_inferred(flag, flag.time)]
    tickets = [ticket for ticket in tickets if is_inferred(ticket, ticket.opened_time)]
    swap_tickets = [row for row in tickets if _NAMES_GPU.fullmatch(row.text) and _NAMES_SWAP.fullmatch(row.text)]
    found = [_swap(row.cluster, row.node, row.opened_time, "", "ticket") for row in swap_tickets]
    swap_keys = set()
    for flag in flags:
        has_ticket = any(
            (row.cluster, row.node) == (flag.cluster, flag.node)
            and row.opened_time <= flag.time
            and (row.closed_time is None or flag.time <= row.closed_time + 86400)
            for row in swap_tickets
        )
        swap_key = (flag.cluster, flag.node, flag.subject, flag.time)
        if not has_ticket and swap_key not in swap_keys:
            swap_keys.add(swap_key)
            found.append(_swap(flag.cluster, flag.node, flag.time, flag.subject, flag.code))
    found += [
        {
            **_swap(row.cluster, row.node, row.time, row.subject, row.code),
            "serial": row.serial,
            "uuid": row.uuid,
            "next_gpu": row.next_gpu,
            "next_serial": row.next_serial,
        }
        for row in replaced
    ]
    return sorted(
        found,
        key=lambda swap_row: (
            swap_row["time"],
            swap_row["cluster"],
            swap_row["node"],
            swap_row["subject"],
            swap_row["why"],
        ),
    )


def _swap(cluster: str, node: str, time: int, subject: str, why: str) -> Row:
    """Return a replacement of GPUs with unknown numbers."""
    return {
        "cluster": cluster,
        "node": node,
        "time": time,
        "subject": subject,
        "why": why,
        "serial": None,
        "uuid": None,
        "next_gpu": None,
        "next_serial": None,
    }


def _notes(answer: Document, has_tickets: bool, listed_nodes: int) -> Iterator[str]:
    because = answer["unattributed_because"]
    if because["no_node_list"]:
        yield f"{because['no_node_list']:,} failed jobs have no node list, so no condition can be matched to them."
    if because["not_observed"]:
        yield (
            f"{because['not_observed']:,} failed jobs without a cause had a node that healthd observed for only part "
            "of the attribution window; faults on this node may have been missed."
        )
    sources = (
        "tickets that mention a replacement, and flags that were cleared although a GPU keeps them for life"
        if has_tickets
        else ("flags that were cleared although a GPU keeps them for life (the store has no tickets)")
    )
    if listed_nodes:
        yield (
            f"{plural(listed_nodes, 'node')} {'lists its' if listed_nodes == 1 else 'list their'} GPUs. There, "
            "replacements are GPUs that were exchanged within 30 days after a fault and not found in another slot "
            f"later. Otherwise, replacements are inferred from {sources}."
        )
    else:
        yield f"The store has no GPU serial numbers. Replacements are inferred from {sources}; there may be more."
