"""What ended the jobs that failed: the most likely cause of each, how often each cause was it, and what that cost.

Source: arXiv 2410.21680 (Kokolis, Kuchnik et al., HPCA 2025), its section on attribution. incidents.py has the rule for
one job, causes.py the causes and their order, weeks.py what is counted by week.
"""

from __future__ import annotations

import sys
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from itertools import count, groupby, islice
from typing import NamedTuple

from healthd.common.text import regex
from healthd.fleet.answers import document
from healthd.fleet.answers.causes import CAUSES, HARDWARE, SYSTEM_SOFTWARE, USER_PROGRAM, meaning
from healthd.fleet.answers.document import Document, share
from healthd.fleet.answers.incidents import CONFIDENCES, Attributed, Failure, Seen, attributed
from healthd.fleet.answers.study import Row, Study
from healthd.fleet.statistics import weeks

# An hour earlier, not later: then the node was in service under the same kind of load; after a failure it is drained,
# down, or its repair is what is seen. What a slow fault showed an hour ahead counts as chance: rather too much than too
# little.
BY_CHANCE_SHIFT_SECONDS = -3600
# A job loses what it had run since its last checkpoint: half an hour, or all that it ran (the paper's rule for goodput,
# hourly checkpoints).
LOST_SECONDS = 1800
LARGEST, _AT_ONCE = 20, 200  # jobs without a cause that are listed; failures that are looked through at once
_PAGE = 5000  # rows that are fetched at once
ROLLED_OUT = 0.1  # of the nodes that told of any check: below it is no date of the fleet

# What was said of a job at a condition's source. A list that was cut names not all: then nothing follows.
_NAMED = """
SELECT
  lines.cluster, lines.node, lines.code, lines.subject, coalesce(lines.first_time, lines.time) AS first_time,
  coalesce(lines.last_time, lines.time) AS last_time, events.jobs,
  coalesce(events.rest LIKE '%"jobs_more"%', FALSE) AS cut
FROM lines JOIN events USING (node, stream_id, seq)
WHERE lines.code IS NOT NULL AND events.jobs <> ''
"""
# Each failed job: how well its nodes were looked at in its window, and its GPU time. The pieces of `observed_pieces`
# that touch are put together first, so that the last one that begins before a window is the only one that can cover it.
_FAILED = f"""
WITH marked AS (
  SELECT cluster, node, begin_time, end_time,
    CASE WHEN begin_time <= lag(end_time) OVER (PARTITION BY cluster, node ORDER BY begin_time) THEN 0 ELSE 1 END AS new
  FROM observed_pieces
), numbered AS (
  SELECT cluster, node, begin_time, end_time,
    sum(new) OVER (PARTITION BY cluster, node ORDER BY begin_time ROWS UNBOUNDED PRECEDING) AS spell
  FROM marked
), spells AS (
  SELECT cluster, node, min(begin_time) AS begin_time, max(end_time) AS end_time
  FROM numbered GROUP BY cluster, node, spell
), failed AS (
  SELECT cluster, db_index, state, end_time, coalesce(gpus, 0) AS gpus,
    greatest(coalesce(end_time - start_time, 0), 0) AS runtime,
    end_time - asked.before_seconds AS window_begin, end_time + asked.after_seconds AS window_end
  FROM chosen_jobs CROSS JOIN asked
  WHERE state IN ('FAILED', 'NODE_FAIL') AND end_time >= asked.from_time AND end_time < asked.to_time
), placed AS (
  SELECT failed.cluster, failed.db_index, failed.window_begin, failed.window_end, job_nodes.node
  FROM failed JOIN job_nodes USING (cluster, db_index)
), looked AS (
  SELECT placed.cluster, placed.db_index, bool_and(coalesce(placed.window_end <= spells.end_time, FALSE)) AS watched
  FROM placed ASOF LEFT JOIN spells
    ON placed.cluster = spells.cluster AND placed.node = spells.node AND placed.window_begin >= spells.begin_time
  GROUP BY placed.cluster, placed.db_index
)
SELECT failed.cluster, failed.db_index, failed.state, failed.end_time, CAST(failed.gpus AS BIGINT) AS gpus,
  CASE WHEN looked.watched IS NULL THEN 'no_node_list'
    WHEN looked.watched THEN 'observed' ELSE 'not_observed' END AS looked,
  CAST(failed.runtime * failed.gpus AS BIGINT) AS gpu_seconds,
  CAST(least(failed.runtime, {LOST_SECONDS}) * failed.gpus AS BIGINT) AS lost_gpu_seconds
FROM failed LEFT JOIN looked USING (cluster, db_index)
"""
_SEEN = """
WITH wanted AS (
  SELECT seen.*, chosen_jobs.array_job_id, chosen_jobs.array_task_id, chosen_jobs.start_time
  FROM {table} AS seen JOIN chosen_jobs USING (cluster, db_index)
), named AS (
  SELECT wanted.cluster, wanted.db_index, wanted.node, wanted.code, wanted.subject,
    CASE WHEN bool_or(said.cut) THEN NULL ELSE string_agg(DISTINCT said.jobs, ' ' ORDER BY said.jobs) END AS jobs
  FROM wanted JOIN attribution_named AS said
    ON said.cluster = wanted.cluster AND said.node = wanted.node AND said.code = wanted.code
    AND said.subject IS NOT DISTINCT FROM wanted.subject
    AND said.first_time <= wanted.last_seen AND said.last_time >= wanted.first_seen
  GROUP BY ALL
)
SELECT
  row_number() OVER (
    ORDER BY wanted.cluster, wanted.end_time, wanted.db_index, wanted.node, wanted.code, wanted.subject
  ) AS place,
  wanted.cluster, wanted.db_index, wanted.job_id, wanted.array_job_id, wanted.array_task_id, wanted.state,
  wanted.start_time, wanted.end_time, coalesce(wanted.nodes, 0) AS nodes, wanted.node, wanted.code,
  coalesce(wanted.subject, '') AS subject, coalesce(wanted.check_name, '') AS check_name, wanted.severity, wanted.kind,
  wanted.first_seen, wanted.last_seen, wanted.from_events, named.jobs,
  failed.gpus, failed.looked, failed.gpu_seconds, failed.lost_gpu_seconds
FROM wanted
JOIN attribution_failed AS failed USING (cluster, db_index)
LEFT JOIN named
  ON named.cluster = wanted.cluster AND named.db_index = wanted.db_index AND named.node = wanted.node
  AND named.code = wanted.code AND named.subject IS NOT DISTINCT FROM wanted.subject
"""
_TOTALS = """
SELECT state, looked, count(*) AS jobs, CAST(sum(gpu_seconds) AS BIGINT) AS gpu_seconds,
  CAST(sum(lost_gpu_seconds) AS BIGINT) AS lost_gpu_seconds
FROM attribution_failed GROUP BY state, looked ORDER BY state, looked
"""
# The largest failures, after so many of them.
_LARGEST = """
WITH largest AS (
  SELECT * FROM attribution_failed ORDER BY lost_gpu_seconds DESC, end_time, cluster, db_index LIMIT ? OFFSET ?
)
SELECT largest.cluster, jobs.job_id AS job, largest.db_index, largest.state, largest.end_time, largest.gpus,
  largest.lost_gpu_seconds, largest.looked
FROM largest JOIN jobs USING (cluster, db_index)
ORDER BY largest.lost_gpu_seconds DESC, largest.end_time, largest.cluster, largest.db_index
"""
# The GPU time of all jobs, by week. A job without an end ran until the jobs are known (`jobs_known`).
_GPU_HOURS = f"""
WITH ran AS (
  SELECT greatest(start_time, asked.from_time) AS begin_time,
    least(coalesce(end_time, jobs_known.known_until), asked.to_time) AS end_time, gpus
  FROM chosen_jobs JOIN jobs_known USING (cluster) CROSS JOIN asked
  WHERE gpus > 0 AND start_time < asked.to_time AND coalesce(end_time, jobs_known.known_until) > asked.from_time
), split AS (
  SELECT unnest(range(
      (begin_time - {weeks.MONDAY}) // {weeks.WEEK}, (end_time - 1 - {weeks.MONDAY}) // {weeks.WEEK} + 1
    )) * {weeks.WEEK} + {weeks.MONDAY} AS week, begin_time, end_time, gpus
  FROM ran WHERE end_time > begin_time
)
SELECT CAST(week AS BIGINT) AS week,
  CAST(sum(gpus * (least(end_time, week + {weeks.WEEK}) - greatest(begin_time, week))) AS BIGINT) AS gpu_seconds
FROM split GROUP BY week ORDER BY week
"""
# When a check came, went or became another on the fleet's nodes: the median of the nodes' first dates.
_CHECK_DATES = """
WITH told AS (
  SELECT lines.cluster, lines.node, lines.event, events.check_name, coalesce(events.version, '') AS version,
    coalesce(events.rest, '') AS settings, min(lines.time) AS time
  FROM lines JOIN events USING (node, stream_id, seq)
  WHERE lines.event IN ('check_enabled', 'check_changed', 'check_disabled') AND events.check_name IS NOT NULL
  GROUP BY ALL
), of_chosen AS (SELECT told.* FROM told JOIN chosen_nodes USING (cluster, node)),
every AS (SELECT cluster, count(DISTINCT node) AS nodes FROM of_chosen GROUP BY cluster)
SELECT cluster, check_name AS check, event, version, CAST(floor(median(time)) AS BIGINT) AS time,
  min(time) AS first_time, max(time) AS last_time, count(DISTINCT node) AS nodes
FROM of_chosen CROSS JOIN asked
GROUP BY cluster, check_name, event, version, settings, asked.from_time, asked.to_time
HAVING count(DISTINCT node) >= ? * (SELECT nodes FROM every WHERE every.cluster = of_chosen.cluster)
  AND median(time) >= asked.from_time AND median(time) < asked.to_time
ORDER BY time, cluster, check_name, event, version, settings
"""

# What a GPU keeps for its life (its InfoROM). Where the next look finds nothing of it, another GPU is in its place.
_FOR_LIFE = ("gpu_row_remap/failure", "gpu_row_remap/too_many", "gpu_retired_pages/too_many", "gpu_ecc/aggregate")
_NO_LOOK = ("others", "unconfirmed", "window")  # cleared_by: nothing was seen to be gone
_FLAGS_GONE = f"""
SELECT lines.cluster, lines.node, lines.subject, lines.code, lines.time
FROM lines JOIN chosen_nodes USING (cluster, node) CROSS JOIN asked
WHERE lines.event = 'cleared' AND lines.code IN {_FOR_LIFE} AND coalesce(lines.cleared_by, '') NOT IN {_NO_LOOK}
  AND lines.time >= asked.from_time AND lines.time < asked.to_time
ORDER BY lines.cluster, lines.node, lines.time, lines.subject, lines.code
"""
_TICKETS = """
SELECT tickets.cluster, tickets.node, tickets.opened_time, tickets.closed_time, tickets.words
FROM tickets JOIN chosen_nodes USING (cluster, node) CROSS JOIN asked
WHERE tickets.opened_time >= asked.from_time AND tickets.opened_time < asked.to_time AND tickets.words IS NOT NULL
ORDER BY tickets.cluster, tickets.node, tickets.opened_time
"""
_SAYS_GPU = regex(r"(?i).*\bgpus?\b.*")
_SAYS_SWAP = regex(r"(?i).*\b(?:swap|replac|exchang|rma)\w*.*")

LOOKED = ("observed", "not_observed", "no_node_list")
_RSC = ("RSC-1", "RSC-2")  # the paper's clusters
GPU_CAUSES = frozenset({"pcie", "gpu_lost", "nvlink", "gpu_memory", "gsp", "gpu"})

found = document.never


def attribution(study: Study) -> Document:
    """The document of `healthd fleet attribution` (docs/json.md). Raises Unanswerable without jobs, and where neither
    events nor scraped conditions say what was seen."""
    study.must_have("jobs")
    if not study.has("scraped_conditions"):
        study.must_have("events")
    study.need("lines", "sights", "observed_pieces", "jobs_known", "seen_with_failures")
    study.table("seen_by_chance", "seen_with_failures", shift_seconds=BY_CHANCE_SHIFT_SECONDS)
    study.make("attribution_named", _NAMED)
    study.make("attribution_failed", _FAILED)
    study.make("attribution_by_chance", _SEEN.format(table="seen_by_chance"))
    study.make("attribution_seen", _SEEN.format(table="seen_with_failures"))

    by_chance = Counter(it.cause for _, it in of_jobs(_in_pages(study, "attribution_by_chance")))
    jobs = list(of_jobs(_in_pages(study, "attribution_seen")))
    gpu_hours = {row["week"]: row["gpu_seconds"] / 3600 for row in study.rows(_GPU_HOURS)}
    totals = study.rows(_TOTALS)
    named = {(job.cluster, job.db_index) for job, _ in jobs}
    swaps = gpu_swaps(study.rows(_FLAGS_GONE), study.rows(_TICKETS))
    gpus = study.row("SELECT CAST(coalesce(sum(gpus), 0) AS BIGINT) AS gpus FROM chosen_nodes")["gpus"]
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
        "unattributed_jobs": list(islice(_largest_without(study, named), LARGEST)),
        "check_dates": study.rows(_CHECK_DATES, ROLLED_OUT),
        "gpu_swaps": {
            "known": len(swaps),
            "per_1000_gpus_and_year": share(1000 * len(swaps), gpus * years),
            "swaps": swaps,
        },
        "jobs": [_shown(job, it) for job, it in jobs],
    }


def _in_pages(study: Study, table: str) -> Iterator[Row]:
    """The rows of _SEEN in their order: Python never has all of them, which are 100,000 of a large fleet's year."""
    for page in count():
        rows = study.rows(
            f"SELECT * FROM {table} WHERE place > ? AND place <= ? ORDER BY place", page * _PAGE, (page + 1) * _PAGE
        )
        yield from rows
        if not rows:
            return


def _largest_without(study: Study, named: Collection[tuple[str, int]]) -> Iterator[Row]:
    """The failures without a cause, what lost most GPU time first."""
    for page in count():
        rows = study.rows(_LARGEST, _AT_ONCE, page * _AT_ONCE)
        yield from (row for row in rows if (row["cluster"], row["db_index"]) not in named)
        if not rows:
            return


# --- one job


class Job(NamedTuple):
    """A failed job, as its document has it. looked: one of LOOKED"""

    cluster: str
    job_id: int
    db_index: int
    state: str
    end_time: int
    gpus: int
    gpu_seconds: int
    lost_gpu_seconds: int
    looked: str


def of_jobs(rows: Iterable[Row]) -> Iterator[tuple[Job, Attributed]]:
    """From the rows of _SEEN, those of a job together, to each job and its cause, if it has one. Pure."""
    for _, its in groupby(rows, key=lambda row: (row["cluster"], row["db_index"])):
        some = list(its)
        it = attributed(_failure(some[0]), [_seen(row) for row in some])
        if it is not None:
            first = {**some[0], **{name: sys.intern(some[0][name]) for name in ("cluster", "state", "looked")}}
            yield Job(*(first[name] for name in Job._fields)), it


def _failure(row: Row) -> Failure:
    ids = {str(row["job_id"])}
    if row["array_task_id"] is not None:
        ids.add(f"{row['array_job_id']}_{row['array_task_id']}")
    return Failure(frozenset(ids), row["state"], row["start_time"], row["nodes"])


def _seen(row: Row) -> Seen:
    known = sys.intern  # few words, many rows
    return Seen(
        node=known(row["node"]),
        code=known(row["code"]),
        subject=known(row["subject"]),
        check=known(row["check_name"]),
        severity=known(row["severity"]),
        kind=known(row["kind"]),
        first_seen=row["first_seen"],
        last_seen=row["last_seen"],
        told=row["from_events"] > 0,
        jobs=frozenset((row["jobs"] or "").split()),
    )


def _shown(job: Job, it: Attributed) -> Row:
    means = meaning(it.seen.code)
    return {
        "job": job.job_id,
        "db_index": job.db_index,
        "cluster": job.cluster,
        "state": job.state,
        "end_time": job.end_time,
        "gpus": job.gpus,
        "gpu_seconds": job.gpu_seconds,
        "lost_gpu_seconds": job.lost_gpu_seconds,
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


# --- all of them


def unattributed(jobs: Sequence[tuple[Job, Attributed]], totals: Sequence[Row]) -> Document:
    """How many failed, how many of them have a cause, and of the others: how well their nodes were looked at. totals:
    the rows of _TOTALS. Pure."""
    having = Counter((job.state, job.looked) for job, _ in jobs)
    left = {(row["state"], row["looked"]): row["jobs"] - having[row["state"], row["looked"]] for row in totals}
    return {
        "failures": sum(row["jobs"] for row in totals),
        "attributed": len(jobs),
        "unattributed": sum(left.values()),
        "unattributed_because": {
            looked: sum(count for (_, how), count in left.items() if how == looked) for looked in LOOKED
        },
        "unattributed_by_state": {
            state: sum(count for (of, _), count in left.items() if of == state) for state in ("FAILED", "NODE_FAIL")
        },
        "unattributed_node_fails": sum(count for (of, _), count in left.items() if of == "NODE_FAIL"),
        "lost_gpu_seconds": sum(row["lost_gpu_seconds"] for row in totals),
    }


def by_cause(jobs: Sequence[tuple[Job, Attributed]], by_chance: Mapping[str, int], gpu_hours: float) -> Document:
    """What each cause did and cost; by_chance: the jobs that the same rule gives a cause an hour earlier. Pure."""
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
    """Each cause in each week of [from, to), also in those without a failure, and the weeks that stand out. A week at
    an end may be cut: `days` are those that were asked for. Pure."""
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
    """What is seen together, with what the paper has of its two clusters (its section on co-occurrence: "RSC-1" and
    "RSC-2"). [{what, of, together, share, paper}]: `together` of `of` attributed jobs. Pure."""
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


def gpu_swaps(flags: Sequence[Row], tickets: Sequence[Row]) -> list[Row]:
    """The exchanges of GPUs that the store knows of: [{cluster, node, time, subject, why}], by time. flags: what a GPU
    keeps for life was gone (_FLAGS_GONE); tickets: their words name a GPU and an exchange. A flag that went while such
    a ticket of its node was open is the ticket's. Pure."""
    said = [row for row in tickets if _SAYS_GPU.fullmatch(row["words"]) and _SAYS_SWAP.fullmatch(row["words"])]
    found = [
        {"cluster": row["cluster"], "node": row["node"], "time": row["opened_time"], "subject": "", "why": "ticket"}
        for row in said
    ]
    for row in flags:
        told = any(
            (one["cluster"], one["node"]) == (row["cluster"], row["node"])
            and one["opened_time"] <= row["time"]
            and (one["closed_time"] is None or row["time"] <= one["closed_time"] + 86400)
            for one in said
        )
        place = (row["cluster"], row["node"], row["subject"] or "", row["time"])
        again = any((one["cluster"], one["node"], one["subject"], one["time"]) == place for one in found)
        if not told and not again:
            found.append(
                {"cluster": place[0], "node": place[1], "time": place[3], "subject": place[2], "why": row["code"]}
            )
    return sorted(found, key=lambda one: (one["time"], one["cluster"], one["node"], one["subject"], one["why"]))


def _notes(told: Document, tickets: bool) -> Iterator[str]:
    because = told["unattributed_because"]
    if because["no_node_list"]:
        yield f"{because['no_node_list']:,} failed jobs have no list of nodes: nothing can be seen with them."
    if because["not_observed"]:
        yield (
            f"Of {because['not_observed']:,} failed jobs without a cause at least one node was not observed for the "
            "whole window: what nobody saw is no proof that nothing was wrong."
        )
    where = (
        "tickets that say so, and flags that a GPU keeps for life and that were gone"
        if tickets
        else ("flags that a GPU keeps for life and that were gone: the store has no tickets")
    )
    yield f"The store has no serial numbers of GPUs. Exchanges are known from {where}; there may be more."
