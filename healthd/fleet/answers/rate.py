"""How often large jobs fail by their nodes, how sure that is, and what it means for a job of any size."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from healthd.common.page import Page
from healthd.fleet.answers import document, hardware_ends
from healthd.fleet.answers.document import Document, number, plural, span
from healthd.fleet.answers.study import Row, Study
from healthd.fleet.statistics.intervals import LEVEL, Estimate, Interval, Spread, rate_estimate
from healthd.fleet.table import table

MORE_THAN_GPUS = 128  # r_f is of jobs of more GPUs than that: Kokolis, Kuchnik et al. (HPCA 2025, arXiv 2410.21680)
GPUS_PER_NODE = 8  # where the store does not tell
PER_NODE_DAYS = 1000
SIZES = tuple(2**power for power in range(3, 18))  # GPUs, 8 to 131,072: figure 7 of the paper
CLASSES = tuple(2**power for power in range(18))  # as in the question `states`
DAY = 86400
LONGEST_SECONDS = 1000 * 365 * DAY  # what no machine lives to see is no end of an interval
# An attempt that failed in its first hour, after one that failed too: it got no further than the fault, or than the
# start. Of a job of 2,000 GPUs whose failures are independent (MTTF 14 h) 7 in 100 look so by chance.
LOOP_SECONDS = 3600

_CLASS = (
    f"CASE {' '.join(f'WHEN gpus <= {size} THEN {size}' for size in CLASSES[:-1])} WHEN gpus > {CLASSES[-2]} "
    f"THEN {CLASSES[-1]} END"
)
# As the question `node_days`, but of the chosen jobs, of all sizes, and job by job.
_RAN = f"""
SELECT
  jobs.cluster, jobs.db_index, jobs.job_id, jobs.gpus, jobs.nodes, jobs.start_time, jobs.end_time,
  {_CLASS} AS gpus_up_to, jobs.gpus > {{more_than_gpus}} AS large,
  greatest(jobs.start_time, asked.from_time) AS ran_from,
  greatest(
    least(coalesce(jobs.end_time, jobs_known.known_until), asked.to_time), jobs.start_time, asked.from_time
  ) AS ran_to
FROM chosen_jobs AS jobs JOIN jobs_known USING (cluster) CROSS JOIN asked
WHERE jobs.gpus > 0 AND jobs.start_time < asked.to_time
  AND coalesce(jobs.end_time, jobs_known.known_until) >= asked.from_time
"""
_SUMS = f"""
WITH ran AS ({_RAN})
SELECT
  gpus_up_to, large, count(*) AS jobs, CAST(sum(ran_to - ran_from) AS BIGINT) AS job_seconds,
  CAST(coalesce(sum(nodes * (ran_to - ran_from)), 0) AS BIGINT) AS node_seconds,
  CAST(coalesce(sum(gpus * (ran_to - ran_from)) FILTER (nodes > 0), 0) AS BIGINT) AS gpu_seconds
FROM ran GROUP BY gpus_up_to, large
"""
_EXPOSURES = f"""
WITH ran AS ({_RAN})
SELECT
  ran.gpus_up_to, ran.large, job_nodes.cluster, job_nodes.node,
  CAST(sum(ran.ran_to - ran.ran_from) AS BIGINT) AS node_seconds
FROM job_nodes JOIN ran USING (cluster, db_index)
GROUP BY ran.gpus_up_to, ran.large, job_nodes.cluster, job_nodes.node
"""
# The node of a failure: as `hardware_ends` has it, else the one that Slurm set down then, else the job's only node.
_FAILURES = f"""
WITH ran AS ({_RAN}),
failed AS (
  SELECT ran.*, ends.ended, ends.node AS seen_node
  FROM ran JOIN hardware_ends AS ends USING (cluster, db_index)
),
down AS (
  SELECT failed.cluster, failed.db_index, job_nodes.node
  FROM failed CROSS JOIN asked JOIN job_nodes USING (cluster, db_index)
  JOIN node_states ON node_states.cluster = failed.cluster AND node_states.node = job_nodes.node
    AND node_states.start_time BETWEEN failed.end_time - asked.before_seconds AND failed.end_time + asked.after_seconds
  WHERE failed.seen_node IS NULL AND node_states.state LIKE 'DOWN%'
  QUALIFY row_number() OVER (
    PARTITION BY failed.cluster, failed.db_index ORDER BY abs(node_states.start_time - failed.end_time), job_nodes.node
  ) = 1
),
single AS (
  SELECT failed.cluster, failed.db_index, min(job_nodes.node) AS node
  FROM failed JOIN job_nodes USING (cluster, db_index)
  GROUP BY failed.cluster, failed.db_index HAVING count(*) = 1
)
SELECT
  failed.cluster, failed.db_index, failed.job_id, failed.ended, failed.gpus_up_to, failed.large,
  failed.start_time, failed.end_time, coalesce(failed.seen_node, down.node, single.node) AS node
FROM failed LEFT JOIN down USING (cluster, db_index) LEFT JOIN single USING (cluster, db_index)
"""
_ROWS = {  # name -> its SQL and its order
    "sums": (_SUMS, "gpus_up_to, large"),
    "failures": (_FAILURES, "cluster, job_id, end_time, db_index"),
    "exposures": (_EXPOSURES, "gpus_up_to, large, cluster, node"),
}

found = document.never


def rate(study: Study, *, more_than_gpus: int = MORE_THAN_GPUS, gpus_per_node: int = 0) -> Document:
    """failures, by_end, node_days, r_f (per 1000 node-days), interval, by_size, projection, ... (docs/json.md).

    gpus_per_node: of the projection; 0: what the large jobs had. Raises Unanswerable without jobs.

    Source: r_f is "all jobs using more than 128 GPUs that ended NODE_FAIL, or FAILED with a critical check in the last
    10 minutes or 5 minutes after", per node-day of runtime: Kokolis, Kuchnik et al. (HPCA 2025, arXiv 2410.21680).
    Ours counts what `hardware_ends` does, which is more: a FAILED job beside a degraded condition too, since the
    paper's critical checks include links that healthd calls degraded; and what healthd requeued for a fault, which had
    it not acted would have been a FAILED or a NODE_FAIL.
    """
    rows = ran(study, more_than_gpus)
    overall = rows.of_large()
    large = rows.large_sums
    per_node = gpus_per_node or measured_gpus_per_node(large)
    return {
        **study.head("rate", *study.coverage_notes("jobs", "events"), *_notes(study, large, overall, more_than_gpus)),
        "more_than_gpus": more_than_gpus,
        "level": LEVEL,
        **overall,
        "by_size": by_size(rows, overall["r_f"]),
        "gpus_per_node": per_node,
        "projection": projection(overall["r_f"], overall["interval"], per_node),
    }


@dataclass(frozen=True, slots=True)
class Ran:
    """What the chosen jobs ran and how they failed: rows of `_SUMS`, `_FAILURES`, `_EXPOSURES`."""

    sums: list[Row]
    failures: list[Row]
    exposures: list[Row]

    @property
    def large_sums(self) -> Row:
        return totals(one for one in self.sums if one["large"])

    def of_large(self) -> Row:
        """The rate of the large jobs."""
        failures, exposures = ([one for one in rows if one["large"]] for rows in (self.failures, self.exposures))
        return measured(self.large_sums, failures, exposures)


def ran(study: Study, more_than_gpus: int = MORE_THAN_GPUS) -> Ran:
    """Raises Unanswerable without jobs."""
    study.must_have("jobs")
    study.need("jobs_known")
    hardware_ends.make(study)
    return Ran(**{name: _once(study, name, more_than_gpus) for name in _ROWS})


def _once(study: Study, name: str, more_than_gpus: int) -> list[Row]:
    """Of a table that is made once, for rate and for ettr."""
    sql, order = _ROWS[name]
    table = f"rate_{name}_{more_than_gpus}"
    study.make(table, sql.format(more_than_gpus=more_than_gpus))
    return study.rows(f"SELECT * FROM {table} ORDER BY {order}")


def _notes(study: Study, large: Row, overall: Row, more_than_gpus: int) -> list[str]:
    said = hardware_ends.notes(study)
    if not large["node_seconds"]:
        said.append(
            f"No job of more than {plural(more_than_gpus, 'GPU')} ran: there is no r_f. Choose another size with "
            "--more-than-gpus."
        )
    if overall["placed"] < overall["failures"]:
        said.append(
            f"Of {overall['failures'] - overall['placed']} of {overall['failures']} failures the node is not known: "
            "nothing critical was seen, and Slurm set no node of theirs down."
        )
    clusters = study.rows("SELECT DISTINCT cluster FROM chosen_jobs ORDER BY cluster")
    if len(clusters) > 1:
        said.append(f"{len(clusters)} clusters are counted together: --cluster asks of one.")
    return said


# --- what follows from the rows, pure


def totals(sums: Iterable[Row]) -> Row:
    """Rows of `_SUMS` together."""
    keys = ("jobs", "job_seconds", "node_seconds", "gpu_seconds")
    rows = list(sums)
    return {key: sum(row[key] for row in rows) for key in keys}


def measured_gpus_per_node(sums: Row) -> int:
    """What the jobs had, to the nearest whole number."""
    return max(1, round(sums["gpu_seconds"] / sums["node_seconds"])) if sums["node_seconds"] else GPUS_PER_NODE


def measured(sums: Row, failures: Sequence[Row], exposures: Iterable[Row]) -> Row:
    """What happened to some jobs: the rate per 1000 node-days with its interval, and how it was made."""
    node_days = sums["node_seconds"] / DAY
    whom = spread(failures, exposures, node_days)
    estimate = rate_estimate(whom)
    return {
        "failures": len(failures),
        "by_end": {how: sum(1 for one in failures if one["ended"] == how) for how in hardware_ends.ENDED},
        "jobs": sums["jobs"],
        "node_days": node_days,
        "r_f": PER_NODE_DAYS * len(failures) / node_days if node_days else None,
        "interval": _per_1000(estimate),
        "method": estimate.method,
        "why": estimate.why,
        "dispersion": estimate.dispersion,
        "dispersion_p_value": estimate.p_value,
        "incidents": len(incidents(failures)),
        "placed": sum(1 for one in failures if one["node"] is not None),
    }


def _per_1000(estimate: Estimate) -> list[float] | None:
    return None if estimate.interval is None else [PER_NODE_DAYS * end for end in estimate.interval]


def spread(failures: Sequence[Row], exposures: Iterable[Row], node_days: float) -> Spread:
    """Whom the failures befell. Units are nodes, each with the failures whose incident is of it and its node-days; what
    no node is known of stands apart. A failure on a node without exposure (its job has no node list) is loose too."""
    days: dict[tuple[str, str], float] = {}
    for one in exposures:
        key = (one["cluster"], one["node"])
        days[key] = days.get(key, 0.0) + one["node_seconds"] / DAY
    counts = dict.fromkeys(days, 0)
    loose = []
    for cluster, node, size in incidents(failures):
        if node is not None and days.get((cluster, node), 0.0) > 0:
            counts[cluster, node] += size
        else:
            loose.append(size)
    with_days = [key for key in sorted(days) if days[key] > 0]
    rest = node_days - math.fsum(days.values())
    return Spread(
        [counts[key] for key in with_days],
        [days[key] for key in with_days],
        sorted(loose),
        rest if rest > 1e-9 * node_days else 0.0,
    )


def incidents(failures: Iterable[Row]) -> list[tuple[str, str | None, int]]:
    """(cluster, node, failures) of each incident: failures of one job that followed each other in a loop, each within
    LOOP_SECONDS of its start. node: None where no node of them is known, or several are: a job that kills its nodes
    dies on another one each time.

    Source: the crash loop of Kokolis, Kuchnik et al. (HPCA 2025), one job of 1,024 GPUs that NODE_FAILed and was
    requeued 35 times; what ends a loop is ours."""
    loops: list[list[Row]] = []
    for one in sorted(failures, key=lambda row: (row["cluster"], row["job_id"], row["end_time"], row["node"] or "")):
        last = loops[-1][-1] if loops else None
        again = (
            last is not None
            and (last["cluster"], last["job_id"]) == (one["cluster"], one["job_id"])
            and one["end_time"] - one["start_time"] < LOOP_SECONDS
        )
        if again:
            loops[-1].append(one)
        else:
            loops.append([one])
    found = []
    for loop in loops:
        nodes = {one["node"] for one in loop} - {None}
        found.append((loop[0]["cluster"], nodes.pop() if len(nodes) == 1 else None, len(loop)))
    return found


def by_size(ran: Ran, r_f: float | None) -> list[dict[str, Any]]:
    """Each class of size: what was measured there, and the MTTF that r_f would give jobs of its mean number of nodes.

    Source: figure 7 of Kokolis, Kuchnik et al. (HPCA 2025): measured beside projected."""
    rows = []
    for size in sorted({one["gpus_up_to"] for one in ran.sums}):
        sums, failures, exposures = (
            [one for one in some if one["gpus_up_to"] == size] for some in (ran.sums, ran.failures, ran.exposures)
        )
        here = totals(sums)
        row = measured(here, failures, exposures)
        nodes = here["node_seconds"] / here["job_seconds"] if here["job_seconds"] else None
        mttf, ends = mttf_seconds(row["r_f"], row["interval"], nodes)
        rows.append(
            {
                "gpus_up_to": size,
                **row,
                "job_seconds": here["job_seconds"],
                "nodes": nodes,
                "mttf_seconds": mttf,
                "mttf_interval_seconds": ends,
                "projected_mttf_seconds": mttf_seconds(r_f, None, nodes)[0],
            }
        )
    return rows


def projection(r_f: float | None, interval: Sequence[float] | None, gpus_per_node: int) -> list[dict[str, Any]]:
    """The MTTF of a job of each of SIZES GPUs: [{gpus, nodes, mttf_seconds, interval_seconds}]. A size of less than a
    node is a node."""
    rows = []
    for gpus in SIZES:
        nodes = max(1.0, gpus / gpus_per_node)
        mttf, ends = mttf_seconds(r_f, interval, nodes)
        rows.append({"gpus": gpus, "nodes": nodes, "mttf_seconds": mttf, "interval_seconds": ends})
    return rows


def mttf_seconds(
    r_f: float | None, interval: Sequence[float] | Interval | None, nodes: float | None
) -> tuple[float | None, list[float | None] | None]:
    """MTTF = 1 / (N r_f), and its interval, whose upper end is None where a rate of 0 is possible, or one of
    more than LONGEST_SECONDS. r_f is per 1000
    node-days. None: r_f is 0 or not known.

    Source: Kokolis, Kuchnik et al. (HPCA 2025, arXiv 2410.21680). It takes failures of nodes as independent."""

    def of(one: float | None) -> float | None:
        return PER_NODE_DAYS * DAY / (nodes * one) if nodes and one else None

    if interval is None or not nodes:
        return of(r_f), None
    longest = of(interval[0])
    return of(r_f), [of(interval[1]), longest if longest is None or longest <= LONGEST_SECONDS else None]


# --- for people


def text(rate: Document, page: Page) -> str:
    of = f"of more than {plural(rate['more_than_gpus'], 'GPU')}"
    said = [
        f"r_f {number(rate['r_f'])} failures per 1000 node-days{between(rate['interval'], number)}: "
        f"{plural(rate['failures'], 'failure')} in {number(rate['node_days'])} node-days of jobs {of}."
        if rate["r_f"] is not None
        else f"r_f is not known: no job {of} ran.",
        f"{by_end(rate)}. {plural(rate['incidents'], 'incident')}; {rate['why']}." if rate["failures"] else "",
    ]
    sizes = [
        (
            f"{row['gpus_up_to']:,}",
            f"{row['jobs']:,}",
            f"{row['failures']:,}",
            number(row["node_days"]),
            number(row["r_f"]),
            span(row["mttf_seconds"]),
            ends(row["mttf_interval_seconds"]),
            span(row["projected_mttf_seconds"]),
        )
        for row in rate["by_size"]
    ]
    columns = ("GPUs to", "jobs", "failures", "node-days", "r_f", "MTTF", "95 %", "by r_f")
    projected = [
        (f"{row['gpus']:,}", span(row["mttf_seconds"]), ends(row["interval_seconds"])) for row in rate["projection"]
    ]
    return document.told(
        "How often large jobs fail by their nodes",
        rate,
        [
            "\n".join(line for one in said if one for line in page.wrap(one)),
            "Measured, by size:\n" + table(columns, sizes, page) if sizes else "No job with GPUs ran in this time.",
            "Projected, MTTF = 1 / (N r_f):\n" + table(("GPUs", "MTTF", "95 %"), projected, page)
            if rate["r_f"] is not None
            else "",
        ],
        page,
    )


def by_end(rate: Document) -> str:
    """ "5 NODE_FAIL, 4 FAILED beside a failing check, 4 REQUEUED by healthd"."""
    return ", ".join(f"{rate['by_end'][how]:,} {words}" for how, words in hardware_ends.WORDS.items())


def between(interval: Sequence[float] | None, shown: Callable[[float], str]) -> str:
    """ " (95 %: 5.9 to 7.2)"."""
    return "" if interval is None else f" ({100 * LEVEL:.0f} %: {shown(interval[0])} to {shown(interval[1])})"


def ends(interval: Sequence[float | None] | None) -> str:
    """ "1.6 h to 2.0 h"; an end that is not known is open."""
    if interval is None:
        return "-"
    low, high = interval
    return f"{span(low)} to {span(high)}" if high is not None else f"over {span(low)}"
