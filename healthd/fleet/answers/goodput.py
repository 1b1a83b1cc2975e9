"""The work that was lost when nodes failed: of the jobs that they ended, and of those that gave way to these."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from healthd.fleet.answers import hardware_ends
from healthd.fleet.answers.document import Document, WrongChoice, plural, share
from healthd.fleet.answers.study import Row, Study
from healthd.fleet.statistics.job_sizes import class_of

CHECKPOINT_SECONDS = 3600.0  # where nothing is said: "assume hourly checkpoints"
LOOP_ENDS = 5  # so often one job has to be ended by its nodes to be called a requeue loop: ours

_FIRST = f"""
SELECT
  ends.cluster, ends.job_id, ends.ended, ends.node, jobs.gpus, jobs.end_time, {class_of("jobs.gpus")} AS gpus_up_to,
  CAST({{loss}} AS DOUBLE) AS gpu_seconds
FROM hardware_ends AS ends JOIN chosen_jobs AS jobs USING (cluster, db_index)
ORDER BY ends.cluster, ends.end_time, ends.db_index
"""
# The record before that of the pre-emptor is one that the nodes ended: the pre-emptor is its requeue.
_REQUEUES = """
WITH attempts AS (
  SELECT
    cluster, db_index, job_id,
    lag(db_index) OVER (PARTITION BY cluster, job_id ORDER BY submit_time, start_time NULLS LAST, db_index) AS before
  FROM jobs SEMI JOIN hardware_ends USING (cluster, job_id)
)
SELECT attempts.cluster, attempts.db_index, attempts.job_id
FROM attempts JOIN hardware_ends AS ends ON ends.cluster = attempts.cluster AND ends.db_index = attempts.before
"""
_GAVE_WAY = f"""
SELECT
  preempted.how, requeues.job_id AS after, preempted.cluster, {class_of("jobs.gpus")} AS gpus_up_to,
  count(*) AS jobs, CAST(sum({{loss}}) AS DOUBLE) AS gpu_seconds,
  CAST(coalesce(sum(jobs.gpus), 0) AS BIGINT) AS gpus
FROM preempted JOIN chosen_jobs AS jobs USING (cluster, db_index)
LEFT JOIN hardware_requeues AS requeues
  ON requeues.cluster = preempted.cluster AND requeues.db_index = preempted.preemptor_db_index
WHERE preempted.state = 'PREEMPTED'
GROUP BY preempted.how, requeues.job_id, preempted.cluster, gpus_up_to
ORDER BY preempted.cluster, requeues.job_id NULLS FIRST, preempted.how, gpus_up_to NULLS FIRST
"""


def goodput(study: Study, *, checkpoint: float = CHECKPOINT_SECONDS, price: float | None = None) -> Document:
    """first_order, second_order: {jobs, gpu_seconds, gpu_hours, cost, ...}, by_size, requeue_loops, and how many
    pre-emptions are not known to be of either.

        loss(job) = min(runtime, checkpoint / 2) * GPUs

    checkpoint: seconds between two checkpoints, of which half is lost on average; price: of a GPU-hour, in money.

    Source: Kokolis, Kuchnik et al. (HPCA 2025, arXiv 2410.21680): hourly checkpoints, min(runtime, 30 min) * GPUs of
    (1) jobs that were NODE_FAIL, or FAILED by the hardware, (2) jobs PREEMPTED by the requeue of a job of (1). What
    we count as (1) is `hardware_ends`.

    Raises Unanswerable without jobs, WrongChoice for a checkpoint or price that is none.
    """
    if not 0 < checkpoint < float("inf"):
        raise WrongChoice("--checkpoint: must be a time longer than nothing")
    if price is not None and not 0 <= price < float("inf"):
        raise WrongChoice("--price: must be what a GPU-hour costs, 0 or more")
    study.must_have("jobs")
    hardware_ends.make(study)
    study.need("preempted")
    study.make("hardware_requeues", _REQUEUES)
    at_most = checkpoint / 2
    loss = hardware_ends.loss(at_most)
    first = study.rows(_FIRST.format(loss=loss))
    gave_way = study.rows(_GAVE_WAY.format(loss=loss))
    second = [row for row in gave_way if row["after"] is not None]
    others = [row for row in gave_way if row["after"] is None]
    one, two = lost(first, price), lost(second, price)
    return {
        **study.head("goodput", *_notes(study, first, others), *study.coverage_notes("jobs", "events")),
        "checkpoint_seconds": checkpoint,
        "loss_at_most_seconds": at_most,
        "price_per_gpu_hour": price,
        "first_order": {**one, "by_end": _by(first, "ended", hardware_ends.ENDED, price)},
        "second_order": {**two, "by_how": _by(second, "how", ("logged", "inferred"), price)},
        "share_second_order": share(two["gpu_seconds"], one["gpu_seconds"] + two["gpu_seconds"]),
        "preempted_by_unknown": lost([row for row in others if row["how"] == "unknown"], price),
        "preempted_by_others": lost([row for row in others if row["how"] != "unknown"], price),
        "by_size": [
            {
                "gpus_up_to": size,
                "first_order": lost([row for row in first if row["gpus_up_to"] == size], price),
                "second_order": lost([row for row in second if row["gpus_up_to"] == size], price),
            }
            for size in sorted({row["gpus_up_to"] for row in (*first, *second)}, key=lambda size: (size is None, size))
        ],
        "requeue_loops": loops(first, second),
    }


def found(goodput: Document) -> bool:
    """A job is requeued over and over."""
    return bool(goodput["requeue_loops"])


# --- decisions


def lost(rows: Iterable[Row], price: float | None) -> Row:
    """What these jobs lost. A row is a job, or as many as its `jobs` says."""
    jobs, gpu_seconds = 0, 0.0
    for row in rows:
        jobs += row.get("jobs", 1)
        gpu_seconds += row["gpu_seconds"]
    gpu_hours = gpu_seconds / 3600
    cost = None if price is None else gpu_hours * price
    return {"jobs": jobs, "gpu_seconds": gpu_seconds, "gpu_hours": gpu_hours, "cost": cost}


def loops(first: Sequence[Row], second: Sequence[Row]) -> list[Row]:
    """Jobs that their nodes ended LOOP_ENDS times or more, the most often ended one first: when, how many GPUs they
    have, which pre-emptions their requeues made, and what both lost."""
    by_job: dict[tuple[str, int], list[Row]] = {}
    for row in first:
        by_job.setdefault((row["cluster"], row["job_id"]), []).append(row)
    made: dict[tuple[str, int], list[Row]] = {}
    for row in second:
        made.setdefault((row["cluster"], row["after"]), []).append(row)
    found = [
        {
            "cluster": cluster,
            "job_id": job_id,
            "ends": len(ends),
            "gpus": max((row["gpus"] for row in ends if row["gpus"] is not None), default=None),
            "first_time": min(row["end_time"] for row in ends),
            "last_time": max(row["end_time"] for row in ends),
            "preemptions": sum(row["jobs"] for row in made.get((cluster, job_id), ())),
            "preempted_gpus": sum(row["gpus"] for row in made.get((cluster, job_id), ())),
            "first_order_gpu_seconds": sum(row["gpu_seconds"] for row in ends),
            "second_order_gpu_seconds": sum((row["gpu_seconds"] for row in made.get((cluster, job_id), ())), 0.0),
        }
        for (cluster, job_id), ends in by_job.items()
        if len(ends) >= LOOP_ENDS
    ]
    return sorted(found, key=lambda row: (-row["ends"], row["cluster"], row["job_id"]))


def _by(rows: Sequence[Row], key: str, values: Sequence[str], price: float | None) -> list[Row]:
    return [{key: value, **lost([row for row in rows if row[key] == value], price)} for value in values]


def _notes(study: Study, first: Sequence[Row], others: Sequence[Row]) -> list[str]:
    found = [
        *hardware_ends.notes(study),
        *study.elsewhere_notes(((row["cluster"], row["node"]) for row in first), "faults"),
        "What a job lost is assumed, not measured: half the time between two checkpoints.",
        "The work of jobs that no check and no NODE_FAIL shows to be ended by a node is not in it.",
    ]
    without = sum(row["gpus"] is None for row in first)
    if without:
        found.append(
            f"Of {plural(without, 'job')} that nodes ended the number of GPUs is not known: nothing lost is counted "
            "there."
        )
    unknown = sum(row["jobs"] for row in others if row["how"] == "unknown")
    if unknown:
        found.append(
            f"Who pre-empted {plural(unknown, 'job')} is not known: some of them may be of second order. slurmctld's "
            "log says it: healthd fleet ingest --slurmctld-log."
        )
    return found
