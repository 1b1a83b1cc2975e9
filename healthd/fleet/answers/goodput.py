"""Computes the work lost to node failures, including the work of other jobs that a requeued job pre-empted."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from healthd.common.page import plural
from healthd.fleet.answers import hardware_ends
from healthd.fleet.answers.document import Document, WrongChoice, share
from healthd.fleet.answers.study import Row, Study

CHECKPOINT_SECONDS = 3600.0  # the paper's default: "assume hourly checkpoints"
LOOP_MIN_ENDS = 5  # a job that was ended by nodes this many times is in a requeue loop (the limit is healthd's own)


class EndedJob(NamedTuple):
    """A row returned by goodput_ended_jobs.sql: a job that a node ended. `jobs` is 1."""

    cluster: str
    job_id: int
    ended: str
    node: str | None
    gpus: int | None
    end_time: int
    gpus_up_to: int | None
    jobs: int
    gpu_seconds: float


class PreemptedJobs(NamedTuple):
    """A row returned by goodput_preempted_jobs.sql: pre-empted jobs. `after` is the job whose requeue pre-empted
    them."""

    how: str
    after: int | None
    cluster: str
    gpus_up_to: int | None
    jobs: int
    gpu_seconds: float
    gpus: int


def goodput(study: Study, *, checkpoint: float = CHECKPOINT_SECONDS, price: float | None = None) -> Document:
    """Return the first- and second-order losses by job size, the requeue loops, and all other pre-emptions.

        loss(job) = min(runtime, checkpoint / 2) * GPUs

    Source: Kokolis, Kuchnik et al. (HPCA 2025, arXiv 2410.21680): hourly checkpoints, min(runtime, 30 min) * GPUs of
    (1) jobs that ended NODE_FAIL, or FAILED because of the hardware, (2) jobs PREEMPTED by the requeue of a job of (1).
    `hardware_ends` defines (1) here.

    Raises Unanswerable if there are no jobs, and WrongChoice for an invalid checkpoint or price.

    Args:
        checkpoint: seconds between two checkpoints; on average, half of this is lost.
        price: cost of a GPU-hour.
    """
    if not 0 < checkpoint < float("inf"):
        raise WrongChoice("--checkpoint: must be more than 0")
    if price is not None and not 0 <= price < float("inf"):
        raise WrongChoice("--price: must be the price per GPU-hour, 0 or more")
    study.require("jobs")
    max_loss_seconds = float(checkpoint / 2)
    first = study.query("goodput_ended_jobs", EndedJob, at_most_seconds=max_loss_seconds)
    preempted = study.query("goodput_preempted_jobs", PreemptedJobs, at_most_seconds=max_loss_seconds)
    second = [row for row in preempted if row.after is not None]
    other_preempted = [row for row in preempted if row.after is None]
    first_loss, second_loss = loss(first, price), loss(second, price)
    return {
        **study.head("goodput", *_notes(study, first, other_preempted), *study.coverage_notes("jobs", "events")),
        "checkpoint_seconds": checkpoint,
        "loss_at_most_seconds": max_loss_seconds,
        "price_per_gpu_hour": price,
        "first_order": {**first_loss, "by_end": _losses_by(first, "ended", hardware_ends.END_KINDS, price)},
        "second_order": {**second_loss, "by_how": _losses_by(second, "how", ("logged", "inferred"), price)},
        "share_second_order": share(second_loss["gpu_seconds"], first_loss["gpu_seconds"] + second_loss["gpu_seconds"]),
        "preempted_by_unknown": loss([row for row in other_preempted if row.how == "unknown"], price),
        "preempted_by_others": loss([row for row in other_preempted if row.how != "unknown"], price),
        "by_size": [
            {
                "gpus_up_to": size,
                "first_order": loss([row for row in first if row.gpus_up_to == size], price),
                "second_order": loss([row for row in second if row.gpus_up_to == size], price),
            }
            for size in _sizes([*first, *second])
        ],
        "requeue_loops": requeue_loops(first, second),
    }


def has_findings(goodput: Document) -> bool:
    """Return True if a job is in a requeue loop."""
    return bool(goodput["requeue_loops"])


# --- decisions


def loss(rows: Iterable[EndedJob | PreemptedJobs], price: float | None) -> Row:
    """Return the work that these jobs lost."""
    job_rows = list(rows)
    gpu_seconds = sum((row.gpu_seconds for row in job_rows), 0.0)
    gpu_hours = gpu_seconds / 3600
    cost = None if price is None else gpu_hours * price
    return {"jobs": sum(row.jobs for row in job_rows), "gpu_seconds": gpu_seconds, "gpu_hours": gpu_hours, "cost": cost}


def requeue_loops(first: Sequence[EndedJob], second: Sequence[PreemptedJobs]) -> list[Row]:
    """Return the jobs that nodes ended at least LOOP_MIN_ENDS times, most frequent first.

    Each row has the number of ends, the GPUs, the jobs that the job's requeues pre-empted, and the first- and
    second-order loss.
    """
    by_job: dict[tuple[str, int], list[EndedJob]] = defaultdict(list)
    for row in first:
        by_job[row.cluster, row.job_id].append(row)
    preempted: dict[tuple[str, int | None], list[PreemptedJobs]] = defaultdict(list)
    for preempted_row in second:
        preempted[preempted_row.cluster, preempted_row.after].append(preempted_row)
    found = [
        {
            "cluster": cluster,
            "job_id": job_id,
            "ends": len(ends),
            "gpus": max((row.gpus for row in ends if row.gpus is not None), default=None),
            "first_time": min(row.end_time for row in ends),
            "last_time": max(row.end_time for row in ends),
            "preemptions": sum(row.jobs for row in preempted[cluster, job_id]),
            "preempted_gpus": sum(row.gpus for row in preempted[cluster, job_id]),
            "first_order_gpu_seconds": sum(row.gpu_seconds for row in ends),
            "second_order_gpu_seconds": sum((row.gpu_seconds for row in preempted[cluster, job_id]), 0.0),
        }
        for (cluster, job_id), ends in by_job.items()
        if len(ends) >= LOOP_MIN_ENDS
    ]
    return sorted(found, key=lambda row: (-row["ends"], row["cluster"], row["job_id"]))


def _sizes(rows: Iterable[EndedJob | PreemptedJobs]) -> list[int | None]:
    return sorted({row.gpus_up_to for row in rows}, key=lambda size: (size is None, size))


def _losses_by(
    rows: Sequence[EndedJob | PreemptedJobs], key: str, values: Sequence[str], price: float | None
) -> list[Row]:
    return [{key: value, **loss([row for row in rows if getattr(row, key) == value], price)} for value in values]


def _notes(study: Study, first: Sequence[EndedJob], other_preempted: Sequence[PreemptedJobs]) -> list[str]:
    found = [
        *hardware_ends.notes(study),
        *study.unchosen_node_notes(((row.cluster, row.node) for row in first), "faults"),
        "A job's lost work is assumed, not measured: half the time between two checkpoints.",
        "Jobs ended by a node without a failing check or NODE_FAIL are not included.",
    ]
    unknown_gpus = sum(row.gpus is None for row in first)
    if unknown_gpus:
        found.append(
            f"{plural(unknown_gpus, 'job')} ended by nodes had an unknown number of GPUs, so their lost work is "
            "not counted."
        )
    unknown = sum(row.jobs for row in other_preempted if row.how == "unknown")
    if unknown:
        found.append(
            f"The pre-empting jobs of {plural(unknown, 'job')} are unknown, so some of the loss may be second-order. "
            "Ingest slurmctld's log: healthd fleet ingest --slurmctld-log."
        )
    return found
