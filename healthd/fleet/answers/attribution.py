"""Most likely causes of failed jobs, how often each cause occurred, and what it cost.

Source: the section on attribution of arXiv 2410.21680 (Kokolis, Kuchnik et al., HPCA 2025). causes.py has the causes,
their order and the rule for one job. weeks.py counts the causes by week.
"""

from __future__ import annotations

import sys
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import count, groupby, islice
from typing import NamedTuple

from healthd.common.text import regex
from healthd.fleet.answers import document
from healthd.fleet.answers.causes import (
    CAUSES,
    CONFIDENCES,
    HARDWARE,
    SYSTEM_SOFTWARE,
    USER_PROGRAM,
    Attributed,
    Failure,
    Seen,
    attributed,
    meaning,
)
from healthd.fleet.answers.document import Document, share
from healthd.fleet.answers.states import There
from healthd.fleet.answers.study import R, Row, Study
from healthd.fleet.statistics import weeks

LARGEST = 20  # jobs without a cause to list
AT_ONCE = 200  # failed jobs fetched at once to find them
PAGE = 5000  # conditions fetched at once

_SAYS_GPU = regex(r"(?i).*\bgpus?\b.*")
_SAYS_SWAP = regex(r"(?i).*\b(?:swap|replac|exchang|rma)\w*.*")

LOOKED = ("observed", "not_observed", "no_node_list")
_RSC = ("RSC-1", "RSC-2")  # the paper's clusters
GPU_CAUSES = frozenset({"pcie", "gpu_lost", "nvlink", "gpu_memory", "gsp", "gpu"})

found = document.never


class Condition(NamedTuple):
    """Columns of attribution_page.sql: a condition on a node of a failed job, and the job.

    jobs: names of jobs in the condition's source; a condition has one row for each list of names.
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


class Total(NamedTuple):
    """Columns of attribution_totals.sql."""

    state: str
    looked: str
    jobs: int
    lost_gpu_seconds: int


class Failed(NamedTuple):
    """Columns of attribution_largest.sql, and keys of the document."""

    cluster: str
    job: int
    db_index: int
    state: str
    end_time: int
    gpus: int
    lost_gpu_seconds: int
    because: str


class Week(NamedTuple):
    """Columns of attribution_weeks.sql."""

    week: int
    gpu_seconds: int


class CheckDate(NamedTuple):
    """Columns of attribution_check_dates.sql, and keys of the document."""

    cluster: str
    check: str
    event: str
    version: str
    time: int
    first_time: int
    last_time: int
    nodes: int


class Flag(NamedTuple):
    """Columns of attribution_flags_gone.sql."""

    cluster: str
    node: str
    subject: str
    code: str
    time: int


class Ticket(NamedTuple):
    """Columns of attribution_tickets.sql."""

    cluster: str
    node: str
    opened_time: int
    closed_time: int | None
    text: str


def attribution(study: Study) -> Document:
    """Return the document of `healthd fleet attribution` (docs/json.md).

    Raises Unanswerable without jobs, or with neither events nor scraped conditions.
    """
    study.must_have("jobs")
    if not study.has("scraped_conditions"):
        study.must_have("events")
    by_chance = Counter(it.cause for _, it in of_jobs(_pages(study, "attribution_page", Condition, PAGE, chance=1)))
    jobs = list(of_jobs(_pages(study, "attribution_page", Condition, PAGE, chance=0)))
    gpu_hours = {row.week: row.gpu_seconds / 3600 for row in study.ask("attribution_weeks", Week)}
    totals = study.ask("attribution_totals", Total)
    named = {(job.cluster, job.db_index) for job, _ in jobs}
    largest = _pages(study, "attribution_largest", Failed, AT_ONCE)
    without = (row for row in largest if (row.cluster, row.db_index) not in named)
    swaps = gpu_swaps(study.ask("attribution_flags_gone", Flag), study.ask("attribution_tickets", Ticket))
    gpus = sum(row.gpus for row in study.ask("states_there", There))
    years = (study.to_time - study.from_time) / (365.25 * 86400)
    told = {
        **unattributed(jobs, totals),
        **by_cause(jobs, by_chance, sum(gpu_hours.values())),
        **by_week(jobs, gpu_hours, study.from_time, study.to_time),
        "co_occurrence": co_occurrence([it for _, it in jobs]),
    }
    return {
        **study.head(
            "attribution",
            *study.coverage_notes("jobs", "events"),
            *study.elsewhere_notes(((job.cluster, it.seen.node) for job, it in jobs), "causes"),
            *_notes(told, study.has("tickets")),
        ),
        **told,
        "unattributed_jobs": [row._asdict() for row in islice(without, LARGEST)],
        "check_dates": [row._asdict() for row in study.ask("attribution_check_dates", CheckDate)],
        "gpu_swaps": {
            "known": len(swaps),
            "per_1000_gpus_and_year": share(1000 * len(swaps), gpus * years),
            "swaps": swaps,
        },
        "jobs": [_shown(job, it) for job, it in jobs],
    }


def _pages(study: Study, name: str, row: type[R], rows: int, **parameters: int) -> Iterator[R]:
    """Yield the rows of a query with pages, `rows` places each."""
    for page in count():
        found = study.ask(name, row, after_place=page * rows, page_rows=rows, **parameters)
        yield from found
        if not found:
            return


# --- one job


class Job(NamedTuple):
    """A failed job with the keys of the document, and `looked`, one of `OBSERVATION_STATES`."""

    job: int
    db_index: int
    cluster: str
    state: str
    end_time: int
    gpus: int
    gpu_seconds: int
    lost_gpu_seconds: int
    looked: str


def of_jobs(rows: Iterable[Condition]) -> Iterator[tuple[Job, Attributed]]:
    """Yield each job that has a cause, with its attribution. Pure.

    rows: the rows of a job are adjacent, and so are the rows of a condition.
    """
    for _, of_job in groupby(rows, key=lambda row: (row.cluster, row.db_index)):
        seen = [list(of_place) for _, of_place in groupby(of_job, key=lambda row: row.place)]
        first = seen[0][0]
        it = attributed(_failure(first), [_seen(of_place) for of_place in seen])
        if it is not None:
            yield _job(first), it


def _job(row: Condition) -> Job:
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


def _failure(row: Condition) -> Failure:
    ids = {str(row.job_id)}
    if row.array_task_id is not None:
        ids.add(f"{row.array_job_id}_{row.array_task_id}")
    return Failure(frozenset(ids), row.state, row.start_time, row.nodes)


def _seen(rows: Sequence[Condition]) -> Seen:
    """Build a condition from its rows, which differ in the names of jobs only."""
    known = sys.intern  # few different texts, many rows
    row = rows[0]
    return Seen(
        node=known(row.node),
        code=known(row.code),
        subject=known(row.subject),
        check=known(row.check_name),
        severity=known(row.severity),
        kind=known(row.kind),
        first_seen=row.first_seen,
        last_seen=row.last_seen,
        told=row.from_events > 0,
        jobs=frozenset(name for one in rows for name in one.jobs.split()),
    )


def _shown(job: Job, it: Attributed) -> Row:
    means = meaning(it.seen.code)
    return {
        **{key: value for key, value in job._asdict().items() if key != "looked"},
        "cause": it.cause,
        "domain": CAUSES[it.cause].domain,
        "transient": means.transient,
        "check": it.seen.check,
        "code": it.seen.code,
        "subject": it.seen.subject,
        "node": it.seen.node,
        "confidence": it.confidence,
        "also": [
            {"cause": cause, "check": one.check, "code": one.code, "subject": one.subject, "node": one.node}
            for cause, one in it.also
        ],
    }


# --- all jobs


def unattributed(jobs: Sequence[tuple[Job, Attributed]], totals: Sequence[Total]) -> Document:
    """Count failed jobs with and without a cause, and how well the nodes of those without one were observed. Pure.

    totals: all failed jobs.
    """
    having = Counter((job.state, job.looked) for job, _ in jobs)
    left = {(row.state, row.looked): row.jobs - having[row.state, row.looked] for row in totals}
    return {
        "failures": sum(row.jobs for row in totals),
        "attributed": len(jobs),
        "unattributed": sum(left.values()),
        "unattributed_because": {
            looked: sum(count for (_, how), count in left.items() if how == looked) for looked in LOOKED
        },
        "unattributed_by_state": {
            state: sum(count for (of, _), count in left.items() if of == state) for state in ("FAILED", "NODE_FAIL")
        },
        "unattributed_node_fails": sum(count for (of, _), count in left.items() if of == "NODE_FAIL"),
        "lost_gpu_seconds": sum(row.lost_gpu_seconds for row in totals),
    }


def by_cause(jobs: Sequence[tuple[Job, Attributed]], by_chance: Mapping[str, int], gpu_hours: float) -> Document:
    """Return the jobs, incidents and lost time of each cause. Pure.

    by_chance: jobs per cause that the same rule finds one hour before each failure.
    """
    of_cause: dict[str, list[tuple[Job, Attributed]]] = defaultdict(list)
    for job, it in jobs:
        of_cause[it.cause].append((job, it))
    causes = []
    for name, cause in CAUSES.items():
        some = of_cause.get(name, [])
        if not some and not by_chance.get(name):
            continue
        passing = Counter(meaning(it.seen.code).transient for _, it in some)
        causes.append(
            {
                "cause": name,
                "domain": cause.domain,
                "jobs": len(some),
                "by_chance": by_chance.get(name, 0),
                "incidents": len(_incidents(some)),
                "nodes": len({(job.cluster, it.seen.node) for job, it in some}),
                "transient": passing[True],
                "permanent": passing[False],
                "confidence": {sure: sum(it.confidence == sure for _, it in some) for sure in CONFIDENCES},
                "gpu_seconds": sum(job.gpu_seconds for job, _ in some),
                "lost_gpu_seconds": sum(job.lost_gpu_seconds for job, _ in some),
                "jobs_per_million_gpu_hours": share(1e6 * len(some), gpu_hours),
            }
        )
    domains = Counter(CAUSES[it.cause].domain for _, it in jobs)
    return {
        "by_cause": {cause["cause"]: cause["jobs"] for cause in causes if cause["jobs"]},
        "by_domain": {name: domains[name] for name in (USER_PROGRAM, SYSTEM_SOFTWARE, HARDWARE)}
        | {"unknown": domains[None]},
        "expected_by_chance": sum(by_chance.values()),
        "causes": causes,
    }


def _incidents(jobs: Iterable[tuple[Job, Attributed]]) -> list[weeks.Incident]:
    return weeks.incidents((job.cluster, it.seen.node, it.cause, job.end_time) for job, it in jobs)


def by_week(
    jobs: Sequence[tuple[Job, Attributed]], gpu_hours: Mapping[int, float], from_time: int, to_time: int
) -> Document:
    """Return each cause in each week of [from, to), including weeks without a failure, and the spikes. Pure.

    The first and last week may be cut: `days` counts only their days within the period.
    """
    counts: dict[tuple[int, str], int] = Counter((weeks.week_of(job.end_time), it.cause) for job, it in jobs)
    happened = _incidents(jobs)
    broke = Counter((weeks.week_of(one.time), one.cause) for one in happened)
    there = [name for name in CAUSES if any(cause == name for _, cause in counts)]
    every = range(weeks.week_of(from_time), to_time, weeks.WEEK) if there else ()
    return {
        "weeks": [
            {
                "week": week,
                "cause": cause,
                "days": (min(week + weeks.WEEK, to_time) - max(week, from_time)) / 86400,
                "gpu_hours": gpu_hours.get(week, 0.0),
                "jobs": counts.get((week, cause), 0),
                "incidents": broke[week, cause],
                "jobs_per_million_gpu_hours": share(1e6 * counts.get((week, cause), 0), gpu_hours.get(week, 0.0)),
            }
            for week in every
            for cause in there
        ],
        "spikes": [
            {
                "cause": one.cause,
                "week": one.week,
                "incidents": one.incidents,
                "expected": one.expected,
                "nodes": [{"cluster": cluster, "node": node, "incidents": count} for cluster, node, count in one.nodes],
                "share_of_nodes": share(sum(count for *_, count in one.nodes), one.incidents) if one.nodes else None,
            }
            for one in weeks.spikes(happened, gpu_hours)
        ],
    }


def co_occurrence(jobs: Sequence[Attributed]) -> list[Row]:
    """Return which faults occurred together, beside the paper's figures for its clusters "RSC-1" and "RSC-2". Pure.

    Source: the paper's section on co-occurrence. Result: [{what, of, together, share, paper}]; `together` counts
    matches among `of` attributed jobs.
    """
    hardware = [it for it in jobs if CAUSES[it.cause].domain == HARDWARE]
    pcie = [it for it in jobs if it.cause == "pcie"]
    links = [it for it in jobs if "ib_link" in it.deciding]
    fell, noted = "gpu_xid/79", "ipmi_sel/critical_interrupt"
    rows = (
        ("hardware failure and another like it", hardware, lambda it: it.others, (0.03, 0.05)),
        ("PCIe error and Xid 79", pcie, lambda it: fell in it.codes, (0.43, 0.63)),
        (
            "PCIe error, Xid 79, critical interrupt",
            pcie,
            lambda it: {fell, noted} <= it.codes,
            (0.21, 0.49),
        ),
        (
            "PCIe error without any Xid",
            pcie,
            lambda it: not any(code.startswith("gpu_xid/") for code in it.codes),
            (0.57, 0.37),
        ),
        ("InfiniBand failure and a GPU's", links, lambda it: bool(it.deciding & GPU_CAUSES), (0.02, 0.06)),
    )
    return [
        {
            "what": what,
            "of": len(some),
            "together": sum(map(together, some)),
            "share": share(sum(map(together, some)), len(some)),
            "paper": dict(zip(_RSC, paper, strict=True)),
        }
        for what, some, together, paper in rows
    ]


def gpu_swaps(flags: Iterable[Flag], tickets: Iterable[Ticket]) -> list[Row]:
    """Return the GPU replacements found in the store, sorted by time: [{cluster, node, time, subject, why}]. Pure.

    flags    cleared flags that a GPU keeps for life
    tickets  their text may name a GPU and a replacement

    A flag belongs to a ticket of its node if it was cleared while the ticket was open, or within a day after it was
    closed.
    """
    exchanges = [row for row in tickets if _SAYS_GPU.fullmatch(row.text) and _SAYS_SWAP.fullmatch(row.text)]
    found = [_swap(row.cluster, row.node, row.opened_time, "", "ticket") for row in exchanges]
    places = set()
    for flag in flags:
        of_ticket = any(
            (row.cluster, row.node) == (flag.cluster, flag.node)
            and row.opened_time <= flag.time
            and (row.closed_time is None or flag.time <= row.closed_time + 86400)
            for row in exchanges
        )
        place = (flag.cluster, flag.node, flag.subject, flag.time)
        if not of_ticket and place not in places:
            places.add(place)
            found.append(_swap(flag.cluster, flag.node, flag.time, flag.subject, flag.code))
    return sorted(found, key=lambda one: (one["time"], one["cluster"], one["node"], one["subject"], one["why"]))


def _swap(cluster: str, node: str, time: int, subject: str, why: str) -> Row:
    return {"cluster": cluster, "node": node, "time": time, "subject": subject, "why": why}


def _notes(told: Document, tickets: bool) -> Iterator[str]:
    because = told["unattributed_because"]
    if because["no_node_list"]:
        yield f"{because['no_node_list']:,} failed jobs have no node list, so no condition can be matched to them."
    if because["not_observed"]:
        yield (
            f"{because['not_observed']:,} failed jobs without a cause had a node that was not observed for the whole "
            "window; faults there may have been missed."
        )
    where = (
        "tickets that mention one, and cleared flags that a GPU keeps for life"
        if tickets
        else ("cleared flags that a GPU keeps for life (the store has no tickets)")
    )
    yield f"The store has no GPU serial numbers. Replacements are inferred from {where}; there may be more."
