"""Failure rate of large jobs by their nodes, its uncertainty, and the resulting MTTF for a job of any size."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from healthd.common.page import plural
from healthd.fleet.answers import document, hardware_ends
from healthd.fleet.answers.document import Document
from healthd.fleet.answers.study import Row, Study
from healthd.fleet.statistics.intervals import LEVEL, Estimate, Interval, Spread, rate_estimate

MORE_THAN_GPUS = 128  # r_f covers jobs with more GPUs: Kokolis, Kuchnik et al. (HPCA 2025, arXiv 2410.21680)
GPUS_PER_NODE = 8  # if the store does not have it
PER_NODE_DAYS = 1000
SIZES = tuple(2**power for power in range(3, 18))  # GPUs, 8 to 131,072: figure 7 of the paper
CLASSES = tuple(2**power for power in range(18))  # as in the query `states`
DAY = 86400
LONGEST_SECONDS = 1000 * 365 * DAY  # a longer upper end of an interval is unbounded in practice
# An attempt that failed in its first hour, after one that failed too, did not get past the fault or the start. For a
# job of 2,000 GPUs with independent failures (MTTF 14 h), 7 in 100 look like this by chance.
LOOP_SECONDS = 3600


class Sums(NamedTuple):
    """Columns of rate_sums.sql."""

    gpus_up_to: int
    large: bool
    jobs: int
    job_seconds: int
    node_seconds: int
    gpu_seconds: int


class Exposure(NamedTuple):
    """Columns of rate_exposures.sql."""

    gpus_up_to: int
    large: bool
    cluster: str
    node: str
    node_seconds: int


class Failure(NamedTuple):
    """Columns of rate_failures.sql."""

    cluster: str
    db_index: int
    job_id: int
    ended: str
    gpus_up_to: int
    large: bool
    start_time: int
    end_time: int
    node: str | None


found = document.never


def rate(study: Study, *, more_than_gpus: int = MORE_THAN_GPUS, gpus_per_node: int = 0) -> Document:
    """Return failures, by_end, node_days, r_f (per 1000 node-days), interval, by_size, projection, ... (docs/json.md).

    gpus_per_node: of the projection; 0: as measured on the large jobs. Raises Unanswerable without jobs.

    Source: r_f is "all jobs using more than 128 GPUs that ended NODE_FAIL, or FAILED with a critical check in the last
    10 minutes or 5 minutes after", per node-day of runtime: Kokolis, Kuchnik et al. (HPCA 2025, arXiv 2410.21680).
    healthd counts the jobs of `hardware_ends`, which are more: FAILED jobs with a degraded condition too, since the
    paper's critical checks include links that healthd calls degraded; and jobs that healthd requeued for a fault, which
    would otherwise have ended as FAILED or NODE_FAIL.
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


class Cluster(NamedTuple):
    """Columns of rate_clusters.sql."""

    cluster: str


class Ran(NamedTuple):
    """Running times and failures of the chosen jobs."""

    sums: list[Sums]
    failures: list[Failure]
    exposures: list[Exposure]

    @property
    def large_sums(self) -> Row:
        return totals(one for one in self.sums if one.large)

    def of_large(self) -> Row:
        """Return the rate of the large jobs."""
        failures = [one for one in self.failures if one.large]
        return measured(self.large_sums, failures, [one for one in self.exposures if one.large])


def ran(study: Study, more_than_gpus: int = MORE_THAN_GPUS) -> Ran:
    """Load the running times and failures of the chosen jobs. Raises Unanswerable without jobs."""
    study.must_have("jobs")
    return Ran(
        study.ask("rate_sums", Sums, more_than_gpus=more_than_gpus),
        study.ask("rate_failures", Failure, more_than_gpus=more_than_gpus),
        study.ask("rate_exposures", Exposure, more_than_gpus=more_than_gpus),
    )


def _notes(study: Study, large: Row, overall: Row, more_than_gpus: int) -> list[str]:
    said = hardware_ends.notes(study)
    if not large["node_seconds"]:
        said.append(
            f"No job with more than {plural(more_than_gpus, 'GPU')} ran, so there is no r_f. Choose another size with "
            "--more-than-gpus."
        )
    if overall["placed"] < overall["failures"]:
        said.append(
            f"The node of {overall['failures'] - overall['placed']} of {overall['failures']} failures is not known: no "
            "critical condition was seen, and Slurm set none of their nodes down."
        )
    clusters = study.ask("rate_clusters", Cluster)
    if len(clusters) > 1:
        said.append(f"{len(clusters)} clusters are counted together; select one with --cluster.")
    return said


# --- pure functions of the rows


def totals(sums: Iterable[Sums]) -> Row:
    """Return the sums of the rows."""
    keys = ("jobs", "job_seconds", "node_seconds", "gpu_seconds")
    rows = list(sums)
    return {key: sum(getattr(row, key) for row in rows) for key in keys}


def measured_gpus_per_node(sums: Row) -> int:
    """Return the jobs' mean GPUs per node, rounded."""
    return max(1, round(sums["gpu_seconds"] / sums["node_seconds"])) if sums["node_seconds"] else GPUS_PER_NODE


def measured(sums: Row, failures: Sequence[Failure], exposures: Iterable[Exposure]) -> Row:
    """Return the rate per 1000 node-days of these jobs with its interval and method."""
    node_days = sums["node_seconds"] / DAY
    whom = spread(failures, exposures, node_days)
    estimate = rate_estimate(whom)
    return {
        "failures": len(failures),
        "by_end": {how: sum(1 for one in failures if one.ended == how) for how in hardware_ends.ENDED},
        "jobs": sums["jobs"],
        "node_days": node_days,
        "r_f": PER_NODE_DAYS * len(failures) / node_days if node_days else None,
        "interval": _per_1000(estimate),
        "method": estimate.method,
        "why": estimate.why,
        "dispersion": estimate.dispersion,
        "dispersion_p_value": estimate.p_value,
        "incidents": len(incidents(failures)),
        "placed": sum(1 for one in failures if one.node is not None),
    }


def _per_1000(estimate: Estimate) -> list[float] | None:
    return None if estimate.interval is None else [PER_NODE_DAYS * end for end in estimate.interval]


def spread(failures: Sequence[Failure], exposures: Iterable[Exposure], node_days: float) -> Spread:
    """Distribute the failures over nodes, each with its failures and node-days.

    Incidents without a known node are counted apart. So is a failure on a node without exposure (its job has no node
    list).
    """
    days: dict[tuple[str, str], float] = {}
    for one in exposures:
        key = (one.cluster, one.node)
        days[key] = days.get(key, 0.0) + one.node_seconds / DAY
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


def incidents(failures: Iterable[Failure]) -> list[tuple[str, str | None, int]]:
    """Group failures into incidents (cluster, node, failures).

    Failures of one job that follow each other in a loop, each within LOOP_SECONDS of its start, are one incident. node:
    None if unknown, or if there are several: a job that kills its nodes dies on another node each time.

    Source: the crash loop of Kokolis, Kuchnik et al. (HPCA 2025), one job of 1,024 GPUs that NODE_FAILed and was
    requeued 35 times. The rule for the end of a loop is healthd's.
    """
    loops: list[list[Failure]] = []
    for one in sorted(failures, key=lambda one: (one.cluster, one.job_id, one.end_time, one.node or "")):
        last = loops[-1][-1] if loops else None
        again = (
            last is not None
            and (last.cluster, last.job_id) == (one.cluster, one.job_id)
            and one.end_time - one.start_time < LOOP_SECONDS
        )
        if again:
            loops[-1].append(one)
        else:
            loops.append([one])
    found = []
    for loop in loops:
        nodes = {one.node for one in loop} - {None}
        found.append((loop[0].cluster, nodes.pop() if len(nodes) == 1 else None, len(loop)))
    return found


def by_size(ran: Ran, r_f: float | None) -> list[dict[str, Any]]:
    """Return the measured rate of each size class, and the MTTF that r_f gives jobs with its mean number of nodes.

    Source: figure 7 of Kokolis, Kuchnik et al. (HPCA 2025): measured beside projected.
    """
    rows = []
    for size in sorted({one.gpus_up_to for one in ran.sums}):
        here = totals(one for one in ran.sums if one.gpus_up_to == size)
        failures = [one for one in ran.failures if one.gpus_up_to == size]
        row = measured(here, failures, [one for one in ran.exposures if one.gpus_up_to == size])
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
    """Return the MTTF of a job of each of SIZES GPUs: [{gpus, nodes, mttf_seconds, interval_seconds}].

    A size of less than a node counts as one node.
    """
    rows = []
    for gpus in SIZES:
        nodes = max(1.0, gpus / gpus_per_node)
        mttf, ends = mttf_seconds(r_f, interval, nodes)
        rows.append({"gpus": gpus, "nodes": nodes, "mttf_seconds": mttf, "interval_seconds": ends})
    return rows


def mttf_seconds(
    r_f: float | None, interval: Sequence[float] | Interval | None, nodes: float | None
) -> tuple[float | None, list[float | None] | None]:
    """Return MTTF = 1 / (N r_f) and its interval. None: r_f is 0 or unknown.

    r_f is per 1000 node-days. The upper end is None if a rate of 0 is possible, or if it exceeds MAX_MTTF_SECONDS.

    Source: Kokolis, Kuchnik et al. (HPCA 2025, arXiv 2410.21680). It assumes that nodes fail independently.
    """

    def of(one: float | None) -> float | None:
        return PER_NODE_DAYS * DAY / (nodes * one) if nodes and one else None

    if interval is None or not nodes:
        return of(r_f), None
    longest = of(interval[0])
    return of(r_f), [of(interval[1]), longest if longest is None or longest <= LONGEST_SECONDS else None]
