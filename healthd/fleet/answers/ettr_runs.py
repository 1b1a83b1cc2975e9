"""What the store's runs (jobs of one name one after another) made of their time, beside what the model expects."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from healthd.fleet.answers.rate import CLASSES
from healthd.fleet.answers.study import Row, Study
from healthd.fleet.statistics.ettr_model import Job, exact

LEAST_RUNTIME_SECONDS = 86400  # runs of at least 24 h in total: Kokolis, Kuchnik et al. (HPCA 2025)

# The question `runs` does not name a run's attempts: they are the rows of its chain that were submitted within it.
# What each loses: its start; and, if it was interrupted, what it did since its last checkpoint, half an interval.
_RUNS = """
WITH long AS (
  SELECT cluster, run, chained_by, submit_time, end_time, gpus, attempts, runtime_seconds, queued_seconds
  FROM runs WHERE runtime_seconds >= $1 AND gpus > 0 AND overlapping = 0
),
firsts AS (
  SELECT long.*, jobs.run_key
  FROM long JOIN chosen_jobs AS jobs
    ON jobs.cluster = long.cluster AND jobs.job_id = long.run AND jobs.submit_time = long.submit_time
  QUALIFY row_number() OVER (
    PARTITION BY long.cluster, long.run, long.chained_by, long.submit_time ORDER BY jobs.db_index
  ) = 1
),
attempts AS (
  SELECT firsts.cluster, firsts.run, firsts.chained_by, firsts.submit_time, jobs.nodes, jobs.state,
    jobs.start_time IS NOT NULL AS started,
    jobs.end_time IS NOT NULL AND jobs.state <> 'COMPLETED' AS interrupted,
    greatest(coalesce(jobs.end_time, least(jobs_known.known_until, asked.to_time)) - jobs.start_time, 0) AS ran
  FROM firsts JOIN jobs
    ON firsts.chained_by = 'run_key' AND jobs.cluster = firsts.cluster AND jobs.run_key = firsts.run_key
    AND jobs.array_task_id IS NULL AND jobs.submit_time BETWEEN firsts.submit_time AND firsts.end_time
  JOIN jobs_known ON jobs_known.cluster = jobs.cluster CROSS JOIN asked
  UNION ALL
  SELECT firsts.cluster, firsts.run, firsts.chained_by, firsts.submit_time, jobs.nodes, jobs.state,
    jobs.start_time IS NOT NULL,
    jobs.end_time IS NOT NULL AND jobs.state <> 'COMPLETED',
    greatest(coalesce(jobs.end_time, least(jobs_known.known_until, asked.to_time)) - jobs.start_time, 0)
  FROM firsts JOIN jobs
    ON firsts.chained_by = 'job_id' AND jobs.cluster = firsts.cluster AND jobs.job_id = firsts.run
    AND (jobs.run_key IS NULL OR jobs.array_task_id IS NOT NULL)
    AND jobs.submit_time BETWEEN firsts.submit_time AND firsts.end_time
  JOIN jobs_known ON jobs_known.cluster = jobs.cluster CROSS JOIN asked
),
summed AS (
  SELECT cluster, run, chained_by, submit_time, max(nodes) AS nodes,
    count(*) FILTER (started) AS starts, count(*) FILTER (started AND interrupted) AS interruptions,
    coalesce(sum(least(ran, CASE WHEN interrupted THEN $2 + $3 / 2 ELSE $2 END)), 0) AS lost_seconds
  FROM attempts GROUP BY cluster, run, chained_by, submit_time
)
SELECT firsts.cluster, firsts.run, firsts.gpus, summed.nodes, summed.starts, summed.interruptions,
  firsts.runtime_seconds, firsts.queued_seconds, summed.lost_seconds
FROM firsts JOIN summed USING (cluster, run, chained_by, submit_time)
ORDER BY firsts.cluster, firsts.run, firsts.submit_time, firsts.chained_by
"""
_FAMILIES = """
SELECT count(*) AS runs FROM runs
SEMI JOIN chosen_jobs AS jobs ON jobs.cluster = runs.cluster AND jobs.job_id = runs.run
WHERE runtime_seconds >= $1 AND gpus > 0 AND overlapping > 0
"""


def measured(
    study: Study, r_f: float | None, checkpoint_seconds: float, restart_seconds: float
) -> tuple[list[dict[str, Any]], int]:
    """Each class of size, as `by_size` has it, and how many runs are left out: jobs of one name that ran at the same
    time are a family, no chain."""
    study.need("jobs_known", "runs")
    rows = study.rows(_RUNS, LEAST_RUNTIME_SECONDS, restart_seconds, checkpoint_seconds)
    families = int(study.row(_FAMILIES, LEAST_RUNTIME_SECONDS)["runs"])
    return by_size(rows, r_f, checkpoint_seconds, restart_seconds), families


def ettr_of(run: Row) -> float:
    """Progress / (running + queued while it could have run), from 0 to 1. lost_seconds: of its running time, by the
    rule min(runtime, restart + half a checkpoint) for each interrupted attempt, min(runtime, restart) for each other.

    Source: the definitions, and "half an hour lost" of hourly checkpoints, in Kokolis, Kuchnik et al. (HPCA 2025)."""
    return float((run["runtime_seconds"] - run["lost_seconds"]) / (run["runtime_seconds"] + run["queued_seconds"]))


def by_size(
    runs: Sequence[Row], r_f: float | None, checkpoint_seconds: float, restart_seconds: float
) -> list[dict[str, Any]]:
    """[{gpus_up_to, runs, interruptions, mean, low, high, expected}]: the mean of the runs' ETTR, of ten runs one is
    below `low` and one above `high`, and the mean of what the model expects of each: with its own nodes and progress,
    and the class's mean wait."""
    classes: dict[int, list[Row]] = {}
    for run in runs:
        up_to = next((size for size in CLASSES if run["gpus"] <= size), CLASSES[-1])
        classes.setdefault(up_to, []).append(run)
    found = []
    for up_to, some in sorted(classes.items()):
        ratios = np.asarray([ettr_of(run) for run in some])
        starts = sum(run["starts"] for run in some)
        queue = sum(run["queued_seconds"] for run in some) / starts if starts else 0.0
        low, high = (float(end) for end in np.quantile(ratios, (0.1, 0.9)))
        of_model = [
            exact(
                Job(
                    max(1.0, run["nodes"]),
                    r_f,
                    checkpoint_seconds,
                    restart_seconds,
                    queue,
                    0.0,
                    max(1.0, run["runtime_seconds"] - run["lost_seconds"]),
                )
            )
            for run in some
            if r_f is not None and run["nodes"]
        ]
        found.append(
            {
                "gpus_up_to": up_to,
                "runs": len(some),
                "attempts": starts,
                "interruptions": sum(run["interruptions"] for run in some),
                "queue_seconds": queue,
                "mean": float(ratios.mean()),
                "low": low,
                "high": high,
                "expected": sum(of_model) / len(of_model) if of_model else None,
            }
        )
    return found
