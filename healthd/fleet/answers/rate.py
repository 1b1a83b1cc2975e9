"""Computes how often nodes end large jobs, how uncertain this rate is, and the resulting MTTF for a job of any size."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from healthd.common.page import plural
from healthd.fleet.answers import document, hardware_ends
from healthd.fleet.answers.document import Document
from healthd.fleet.answers.study import Row, Study
from healthd.fleet.statistics.intervals import LEVEL, Estimate, Interval, Spread, rate_estimate

MORE_THAN_GPUS = 128  # r_f covers jobs with more GPUs than this: Kokolis, Kuchnik et al. (HPCA 2025, arXiv 2410.21680)
GPUS_PER_NODE = 8  # used if the store does not contain the number of GPUs per node
RATE_NODE_DAYS = 1000
SIZES = tuple(2**power for power in range(3, 18))  # GPUs, 8 to 131,072: figure 7 of the paper
SIZE_CLASSES = tuple(2**power for power in range(18))  # as in the query `states`
DAY = 86400
MAX_MTTF_SECONDS = 1000 * 365 * DAY  # an interval whose upper end is longer than this is treated as unbounded
# If an attempt fails in its first hour and the previous attempt failed too, the job probably met the same fault again.
# By chance, this happens to 7 in 100 attempts of a job on 2,000 GPUs with independent failures (MTTF 14 h).
LOOP_SECONDS = 3600


class RunSums(NamedTuple):
    """A row returned by rate_sums.sql."""

    gpus_up_to: int
    large: bool
    jobs: int
    job_seconds: int
    node_seconds: int
    gpu_seconds: int


class Exposure(NamedTuple):
    """A row returned by rate_exposures.sql."""

    gpus_up_to: int
    large: bool
    cluster: str
    node: str
    node_seconds: int


class Failure(NamedTuple):
    """A row returned by rate_failures.sql."""

    cluster: str
    db_index: int
    job_id: int
    ended: str
    gpus_up_to: int
    large: bool
    start_time: int
    end_time: int
    node: str | None


has_findings = document.no_findings


def rate(study: Study, *, more_than_gpus: int = MORE_THAN_GPUS, gpus_per_node: int = 0) -> Document:
    """Return the document for `healthd fleet rate` (docs/json.md). r_f is per 1000 node-days.

    Raises Unanswerable if there are no jobs.

    Source: r_f is "all jobs using more than 128 GPUs that ended NODE_FAIL, or FAILED with a critical check in the last
    10 minutes or 5 minutes after", per node-day of runtime: Kokolis, Kuchnik et al. (HPCA 2025, arXiv 2410.21680).
    healthd counts the jobs of the rule `hardware_ends`, which includes two more kinds. FAILED jobs with a degraded
    condition are included because the paper's critical checks include link faults, to which healthd gives the severity
    degraded. Jobs that healthd requeued because of a fault are included because they would otherwise have ended FAILED
    or NODE_FAIL.

    Args:
        gpus_per_node: GPUs per node for the projection; 0 means the mean of the large jobs.
    """
    ran_jobs = load_ran_jobs(study, more_than_gpus)
    large_rate = ran_jobs.large_rate()
    large = ran_jobs.large_sums
    gpus_per_node_used = gpus_per_node or measured_gpus_per_node(large)
    return {
        **study.head(
            "rate", *study.coverage_notes("jobs", "events"), *_notes(study, large, large_rate, more_than_gpus)
        ),
        "more_than_gpus": more_than_gpus,
        "level": LEVEL,
        **large_rate,
        "by_size": by_size(ran_jobs, large_rate["r_f"]),
        "gpus_per_node": gpus_per_node_used,
        "projection": projection(large_rate["r_f"], large_rate["interval"], gpus_per_node_used),
    }


class Cluster(NamedTuple):
    """A row returned by rate_clusters.sql."""

    cluster: str


class RanJobs(NamedTuple):
    """Running times and failures of the chosen jobs."""

    sums: list[RunSums]
    failures: list[Failure]
    exposures: list[Exposure]

    @property
    def large_sums(self) -> Row:
        return totals(row for row in self.sums if row.large)

    def large_rate(self) -> Row:
        """Return the rate for the large jobs."""
        failures = [row for row in self.failures if row.large]
        return rate_row(self.large_sums, failures, [row for row in self.exposures if row.large])


def load_ran_jobs(study: Study, more_than_gpus: int = MORE_THAN_GPUS) -> RanJobs:
    """Load the running times and failures of the chosen jobs. Raises Unanswerable if there are no jobs."""
    study.require("jobs")
    return RanJobs(
        study.query("rate_sums", RunSums, more_than_gpus=more_than_gpus),
        study.query("rate_failures", Failure, more_than_gpus=more_than_gpus),
        study.query("rate_exposures", Exposure, more_than_gpus=more_than_gpus),
    )


def _notes(study: Study, large: Row, overall: Row, more_than_gpus: int) -> list[str]:
    notes = hardware_ends.notes(study)
    if not large["node_seconds"]:
        notes.append(
            f"No job with more than {plural(more_than_gpus, 'GPU')} ran, so there is no r_f. Choose another size with "
            "--more-than-gpus."
        )
    if overall["placed"] < overall["failures"]:
        notes.append(
            f"The node is unknown for {overall['failures'] - overall['placed']} of {overall['failures']} failures: no "
            "critical condition was seen, and Slurm set none of the jobs' nodes DOWN."
        )
    clusters = study.query("rate_clusters", Cluster)
    if len(clusters) > 1:
        notes.append(f"{len(clusters)} clusters are counted together. Select one with --cluster.")
    return notes


# --- pure functions on the rows


def totals(sums: Iterable[RunSums]) -> Row:
    """Return the sums of the rows."""
    keys = ("jobs", "job_seconds", "node_seconds", "gpu_seconds")
    rows = list(sums)
    return {key: sum(getattr(row, key) for row in rows) for key in keys}


def measured_gpus_per_node(sums: Row) -> int:
    """Return the mean number of GPUs per node over all jobs, rounded."""
    return max(1, round(sums["gpu_seconds"] / sums["node_seconds"])) if sums["node_seconds"] else GPUS_PER_NODE


def rate_row(sums: Row, failures: Sequence[Failure], exposures: Iterable[Exposure]) -> Row:
    """Return the rate per 1000 node-days for these jobs, with its interval and the method."""
    node_days = sums["node_seconds"] / DAY
    unit_spread = failure_spread(failures, exposures, node_days)
    estimate = rate_estimate(unit_spread)
    return {
        "failures": len(failures),
        "by_end": {
            end_kind: sum(1 for failure in failures if failure.ended == end_kind)
            for end_kind in hardware_ends.END_KINDS
        },
        "jobs": sums["jobs"],
        "node_days": node_days,
        "r_f": RATE_NODE_DAYS * len(failures) / node_days if node_days else None,
        "interval": _per_1000(estimate),
        "method": estimate.method,
        "why": estimate.explanation,
        "dispersion": estimate.dispersion,
        "dispersion_p_value": estimate.p_value,
        "incidents": len(group_incidents(failures)),
        "placed": sum(1 for failure in failures if failure.node is not None),
    }


def _per_1000(estimate: Estimate) -> list[float] | None:
    return None if estimate.interval is None else [RATE_NODE_DAYS * end for end in estimate.interval]


def failure_spread(failures: Sequence[Failure], exposures: Iterable[Exposure], node_days: float) -> Spread:
    """Return the failures and node-days of each node.

    Incidents whose node is unknown are counted separately. So are failures on nodes without node-days, which occur if
    the job has no node list.
    """
    days: dict[tuple[str, str], float] = {}
    for exposure in exposures:
        key = (exposure.cluster, exposure.node)
        days[key] = days.get(key, 0.0) + exposure.node_seconds / DAY
    counts = dict.fromkeys(days, 0)
    unplaced = []
    for cluster, node, size in group_incidents(failures):
        if node is not None and days.get((cluster, node), 0.0) > 0:
            counts[cluster, node] += size
        else:
            unplaced.append(size)
    with_days = [key for key in sorted(days) if days[key] > 0]
    unplaced_days = node_days - math.fsum(days.values())
    return Spread(
        [counts[key] for key in with_days],
        [days[key] for key in with_days],
        sorted(unplaced),
        unplaced_days if unplaced_days > 1e-9 * node_days else 0.0,
    )


def group_incidents(failures: Iterable[Failure]) -> list[tuple[str, str | None, int]]:
    """Group failures into incidents (cluster, node, failures).

    If attempts of a job fail one after the other, each within LOOP_SECONDS of its start, their failures are one
    incident. The incident's node is None if it is unknown or if there are several nodes: a job that kills its nodes
    dies on a different node each time.

    Source: the crash loop in Kokolis, Kuchnik et al. (HPCA 2025), one job on 1,024 GPUs that NODE_FAILed and was
    requeued 35 times. The rule for when a loop ends is healthd's own.
    """
    loops: list[list[Failure]] = []
    for failure in sorted(
        failures, key=lambda failure: (failure.cluster, failure.job_id, failure.end_time, failure.node or "")
    ):
        last = loops[-1][-1] if loops else None
        continues_loop = (
            last is not None
            and (last.cluster, last.job_id) == (failure.cluster, failure.job_id)
            and failure.end_time - failure.start_time < LOOP_SECONDS
        )
        if continues_loop:
            loops[-1].append(failure)
        else:
            loops.append([failure])
    found = []
    for loop in loops:
        nodes = {failure.node for failure in loop} - {None}
        found.append((loop[0].cluster, nodes.pop() if len(nodes) == 1 else None, len(loop)))
    return found


def by_size(ran: RanJobs, r_f: float | None) -> list[dict[str, Any]]:
    """Return the measured rate of each size class next to its projected MTTF.

    The projection uses r_f and the mean number of nodes of the class's jobs.

    Source: figure 7 of Kokolis, Kuchnik et al. (HPCA 2025), which shows measured next to projected values.
    """
    rows = []
    for size in sorted({item.gpus_up_to for item in ran.sums}):
        class_sums = totals(item for item in ran.sums if item.gpus_up_to == size)
        failures = [item for item in ran.failures if item.gpus_up_to == size]
        row = rate_row(class_sums, failures, [item for item in ran.exposures if item.gpus_up_to == size])
        nodes = class_sums["node_seconds"] / class_sums["job_seconds"] if class_sums["job_seconds"] else None
        mttf, ends = mttf_interval(row["r_f"], row["interval"], nodes)
        rows.append(
            {
                "gpus_up_to": size,
                **row,
                "job_seconds": class_sums["job_seconds"],
                "nodes": nodes,
                "mttf_seconds": mttf,
                "mttf_interval_seconds": ends,
                "projected_mttf_seconds": mttf_interval(r_f, None, nodes)[0],
            }
        )
    return rows


def projection(r_f: float | None, interval: Sequence[float] | None, gpus_per_node: int) -> list[dict[str, Any]]:
    """Return the MTTF of a job for each size in SIZES: [{gpus, nodes, mttf_seconds, interval_seconds}].

    A size smaller than one node counts as one node.
    """
    rows = []
    for gpus in SIZES:
        nodes = max(1.0, gpus / gpus_per_node)
        mttf, ends = mttf_interval(r_f, interval, nodes)
        rows.append({"gpus": gpus, "nodes": nodes, "mttf_seconds": mttf, "interval_seconds": ends})
    return rows


def mttf_interval(
    r_f: float | None, interval: Sequence[float] | Interval | None, nodes: float | None
) -> tuple[float | None, list[float | None] | None]:
    """Return MTTF = 1 / (N r_f) and its interval, or None if r_f is 0 or unknown.

    r_f is per 1000 node-days. The upper end is None (unbounded) if a rate of 0 is possible or if the end exceeds
    MAX_MTTF_SECONDS.

    Source: Kokolis, Kuchnik et al. (HPCA 2025, arXiv 2410.21680). The formula assumes that nodes fail independently.
    """

    def of(failure_rate: float | None) -> float | None:
        return RATE_NODE_DAYS * DAY / (nodes * failure_rate) if nodes and failure_rate else None

    if interval is None or not nodes:
        return of(r_f), None
    upper = of(interval[0])
    return of(r_f), [of(interval[1]), upper if upper is None or upper <= MAX_MTTF_SECONDS else None]
