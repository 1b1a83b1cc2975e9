"""Effective training time ratio (ETTR) of a large job, and the measured ETTR of the runs in the store.

The answer is `exact`: the job's progress divided by its expected time with random failures. The paper's formulas ignore
failures during recovery and are too low if failures are frequent. The results of these formulas and of a simulation are
printed for comparison only.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from healthd.common.page import plural
from healthd.fleet.answers import document, rate
from healthd.fleet.answers.document import Document, head
from healthd.fleet.answers.study import Study
from healthd.fleet.statistics import ettr_model
from healthd.fleet.statistics.ettr_model import Job

# Default job size, from the paper's example.
GPUS = 16_384
CHECKPOINT_SECONDS, RESTART_SECONDS = 3600.0, 300.0  # the paper's values, for the comparison with its runs
SEED = 13
# The grid, as in figure 10 of the paper. 2.34 and 6.5 are the rates of its two clusters.
GRID_GPUS = tuple(2**power for power in range(10, 18))
GRID_CHECKPOINTS_SECONDS = (60, 120, 300, 600, 900, 1800, 3600, 7200)
GRID_RATES = (0.5, 1.0, 2.34, 4.0, 6.5, 10.0)

# E[R/T] is at least R/E[T] (Jensen).
RUN_MEAN_NOTE = "The simulated value is the mean of the runs' ratios, which is above the ETTR for short jobs."
LOWER_BOUND_NOTE = "The formula and the closed form ignore failures during recovery, so they are lower bounds."

has_findings = document.no_findings


def ettr_for_rate(
    gpus: int,
    r_f: float,
    *,
    gpus_per_node: int = 0,
    checkpoint_seconds: float = CHECKPOINT_SECONDS,
    restart_seconds: float = RESTART_SECONDS,
    queue_seconds: float = 0.0,
    write_seconds: float = 0.0,
    productive_seconds: float | None = None,
    seed: int = SEED,
) -> Document:
    """Return the ETTR document without a store, for a failure rate per 1000 node-days.

    Args:
        gpus_per_node: 0 means 8.
    """
    gpus_per_node_used = gpus_per_node or rate.GPUS_PER_NODE
    job = Job(
        max(1.0, gpus / gpus_per_node_used),
        *(r_f, checkpoint_seconds, restart_seconds, queue_seconds, write_seconds, productive_seconds),
    )
    return {
        **head("ettr", None, None, {}, ()),
        **ettr_values(job, gpus, gpus_per_node_used, seed, None),
        "measured": [],
        "families": 0,
    }


def ettr(
    study: Study,
    *,
    gpus: int = 0,
    r_f: float | None = None,
    gpus_per_node: int = 0,
    checkpoint_seconds: float = CHECKPOINT_SECONDS,
    restart_seconds: float = RESTART_SECONDS,
    queue_seconds: float = 0.0,
    write_seconds: float = 0.0,
    productive_seconds: float | None = None,
    seed: int = SEED,
) -> Document:
    """Return the ETTR of a job with `gpus` GPUs (0: `GPUS`), and of the runs in the store.

    The keys are exact, simulated, analytic, ... (docs/json.md). Raises Unanswerable if there are no jobs, or if r_f
    must come from the store and no large job ran.

    Args:
        r_f: failure rate; None to use the store's rate.
    """
    ran = rate.load_ran_jobs(study)
    large_rate = ran.large_rate()
    interval = None
    if r_f is None:
        r_f, interval = large_rate["r_f"], large_rate["interval"]
    if r_f is None:
        raise document.Unanswerable(
            f"no job with more than {rate.MORE_THAN_GPUS} GPUs ran, so there is no failure rate: specify one with "
            "--rate"
        )
    gpus_per_node_used = gpus_per_node or rate.measured_gpus_per_node(ran.large_sums)
    job = Job(
        max(1.0, (gpus or GPUS) / gpus_per_node_used),
        *(r_f, checkpoint_seconds, restart_seconds, queue_seconds, write_seconds, productive_seconds),
    )
    runs, families = _measured_runs(study, r_f, checkpoint_seconds, restart_seconds)
    notes = study.coverage_notes("jobs", "events")
    if runs:
        notes.append(
            "Every end other than COMPLETED counts as an interruption, including cancellations by users. Runs of all "
            "priorities are included. The measured ETTR therefore tends to be too low."
        )
    if families:
        notes.append(
            f"{plural(families, 'run')} of 24 h or more {'is' if families == 1 else 'are'} left out: jobs with the "
            "same name that ran at the same time do not form a run."
        )
    return {
        **study.head("ettr", *notes),
        **ettr_values(job, gpus or GPUS, gpus_per_node_used, seed, interval),
        "measured": runs,
        "families": families,
    }


def ettr_values(job: Job, gpus: int, gpus_per_node: int, seed: int, interval: Sequence[float] | None) -> dict[str, Any]:
    """Return a job's ETTR by each method.

    Args:
        interval: confidence interval for a measured rate, or None for a given rate.
    """
    simulated = ettr_model.simulate(job, seed)
    best_interval = ettr_model.daly_young_seconds(job)
    failures_per_second = job.failures_per_second
    return {
        "parameters": {
            "gpus": gpus,
            "gpus_per_node": gpus_per_node,
            "rate": job.rate,
            "checkpoint_seconds": job.checkpoint_seconds,
            "restart_seconds": job.restart_seconds,
            "queue_seconds": job.queue_seconds,
            "write_seconds": job.write_seconds,
            "productive_seconds": job.productive_seconds,
            "seed": seed,
        },
        "exact": ettr_model.exact(job),
        "rate_interval": None if interval is None else list(interval),
        "interval": None
        if interval is None
        else [ettr_model.exact(replace(job, rate=end)) for end in (interval[1], interval[0])],
        "simulated": simulated.ettr,
        "analytic": ettr_model.analytic(job),
        "approximate": ettr_model.closed_form(job),
        "simulation": {
            "standard_error": simulated.standard_error,
            "low": simulated.low,
            "high": simulated.high,
            "runs": simulated.runs,
            "productive_seconds": simulated.productive_seconds,
        },
        "lost_ratio": job.lost_share,
        "mttf_seconds": 1 / failures_per_second if failures_per_second > 1e-300 else None,
        "daly_young_seconds": best_interval,
        "exact_at_daly_young": None
        if best_interval is None
        else ettr_model.exact(ettr_model.with_interval(job, best_interval)),
        "warnings": warnings(job, simulated, interval),
        "grid": grid(job, gpus_per_node),
    }


def warnings(job: Job, simulated: ettr_model.Simulation, interval: Sequence[float] | None = None) -> list[str]:
    """Return sentences about the answer's limits.

    Args:
        interval: confidence interval for the rate (see `ettr_values`).
    """
    found = []
    if interval is not None and not job.rate:
        found.append("no failure occurred, so the rate has only an upper bound, and the ETTR only a lower bound")
    if ettr_model.writes_too_long(job):
        found.append(
            "writing a checkpoint takes more than half the time between two failures, so the rule for the best "
            "checkpoint interval (Daly, Young) does not apply"
        )
    if not simulated.runs:
        found.append("a failure occurs in almost every interval between two checkpoints, so the job makes no progress")
    return found


def grid(job: Job, gpus_per_node: int) -> dict[str, list[dict[str, Any]]]:
    """Return two grids of ETTR values: by GPUs and checkpoint interval, and by GPUs and failure rate.

    All other parameters are those of `job`. Source: figure 10 of Kokolis, Kuchnik et al. (HPCA 2025).
    """
    sizes = [(gpus, replace(job, nodes=max(1.0, gpus / gpus_per_node))) for gpus in GRID_GPUS]
    return {
        "by_checkpoint": [
            {
                "gpus": gpus,
                "checkpoint_seconds": seconds,
                "ettr": ettr_model.exact(ettr_model.with_interval(sized_job, seconds)),
            }
            for gpus, sized_job in sizes
            for seconds in GRID_CHECKPOINTS_SECONDS
        ],
        "by_rate": [
            {"gpus": gpus, "rate": r_f, "ettr": ettr_model.exact(replace(sized_job, rate=r_f))}
            for gpus, sized_job in sizes
            for r_f in GRID_RATES
        ],
    }


# --- the runs in the store: successive jobs with the same name


class JobRun(NamedTuple):
    """A row returned by ettr_runs.sql. `lost_seconds` is the lost part of the running time."""

    cluster: str
    run: int
    gpus: int
    nodes: int | None
    starts: int
    interruptions: int
    runtime_seconds: int
    queued_seconds: int
    lost_seconds: float


class ConcurrentRuns(NamedTuple):
    """A row returned by ettr_concurrent_runs.sql."""

    runs: int


def _measured_runs(
    study: Study, r_f: float | None, checkpoint_seconds: float, restart_seconds: float
) -> tuple[list[dict[str, Any]], int]:
    """Return the rows for `by_size` and the number of runs that were left out.

    A run is left out if its jobs with the same name ran at the same time.
    """
    seconds = {"restart_seconds": float(restart_seconds), "checkpoint_seconds": float(checkpoint_seconds)}
    rows = study.query("ettr_runs", JobRun, **seconds)
    (families,) = study.query("ettr_concurrent_runs", ConcurrentRuns)
    return by_size(rows, r_f, checkpoint_seconds, restart_seconds), families.runs


def run_ettr(run: JobRun) -> float:
    """Return progress / (running time + time queued while eligible), from 0 to 1.

    Progress is the running time without the lost seconds. An interrupted attempt loses min(runtime, restart + half a
    checkpoint interval), every other attempt min(runtime, restart).

    Source: the definitions, and "half an hour lost" with hourly checkpoints, in Kokolis, Kuchnik et al. (HPCA 2025).
    """
    return float((run.runtime_seconds - run.lost_seconds) / (run.runtime_seconds + run.queued_seconds))


def by_size(
    runs: Sequence[JobRun], r_f: float | None, checkpoint_seconds: float, restart_seconds: float
) -> list[dict[str, Any]]:
    """Return [{gpus_up_to, runs, interruptions, mean, low, high, expected}] for each size class.

    Keys:
        mean: mean ETTR of the runs.
        low, high: 10th and 90th percentile.
        expected: mean of the ETTR that the model computes for each run from the run's nodes and progress and the
            class's mean wait.
    """
    classes: dict[int, list[JobRun]] = {}
    for run in runs:
        up_to = next((size for size in rate.SIZE_CLASSES if run.gpus <= size), rate.SIZE_CLASSES[-1])
        classes.setdefault(up_to, []).append(run)
    found = []
    for up_to, class_runs in sorted(classes.items()):
        ratios = np.asarray([run_ettr(run) for run in class_runs])
        starts = sum(run.starts for run in class_runs)
        queue = sum(run.queued_seconds for run in class_runs) / starts if starts else 0.0
        low, high = (float(end) for end in np.quantile(ratios, (0.1, 0.9)))
        expected_ettrs = [
            ettr_model.exact(
                Job(
                    max(1.0, run.nodes),
                    r_f,
                    checkpoint_seconds,
                    restart_seconds,
                    queue,
                    0.0,
                    max(1.0, run.runtime_seconds - run.lost_seconds),
                )
            )
            for run in class_runs
            if r_f is not None and run.nodes
        ]
        found.append(
            {
                "gpus_up_to": up_to,
                "runs": len(class_runs),
                "attempts": starts,
                "interruptions": sum(run.interruptions for run in class_runs),
                "queue_seconds": queue,
                "mean": float(ratios.mean()),
                "low": low,
                "high": high,
                "expected": sum(expected_ettrs) / len(expected_ettrs) if expected_ettrs else None,
            }
        )
    return found
