"""Which jobs the nodes ended: one rule for all answers that count them (states, goodput, rate, ettr, compare).

A record of the accounting (a requeue is one of its own) that ended

- NODE_FAIL: Slurm lost a node of it;
- FAILED, with a critical or degraded condition seen on a node of it within [end - 10 min, end + 5 min] that is no
  program's own (`seen_with_failures`): it may have been the cause, and most often was;
- REQUEUED, and healthd's stream says that healthd requeued it, which it does for critical faults alone.

A program that failed while a harmless condition happened to be seen beside it counts too; what no check saw does not.
Source: the first two are rule (1) of the lost goodput of Kokolis, Kuchnik et al. (HPCA 2025, arXiv 2410.21680); there
too "if a health check terminates a job, the system automatically requeues it with the same job id", which is the third.
"""

from __future__ import annotations

from healthd.common.job_failures import EndsJob
from healthd.fleet.answers import causes
from healthd.fleet.answers.study import Study
from healthd.fleet.store import literal

TABLE = "hardware_ends"
ENDED = ("node_fail", "failed", "requeued")
WORDS = dict(zip(ENDED, ("NODE_FAIL", "FAILED beside a failing check", "REQUEUED by healthd"), strict=True))
# Seconds between healthd's line and the end of the record: scontrol requeue kills the job first.
REQUEUED_WITHIN = 120

_SQL = f"""
WITH named AS (
  SELECT DISTINCT
    lines.cluster, lines.time, lines.node,
    regexp_extract(events.rest, '"job":"([0-9]+)', 1) AS job,
    regexp_extract(events.rest, '"job":"[0-9]+_([0-9]+)', 1) AS task
  FROM lines
  JOIN events USING (node, stream_id, seq)
  WHERE lines.event = 'requeue' AND events.stage = 'confirmed' AND events.rest IS NOT NULL
),
healthds AS (
  SELECT cluster, time, node, TRY_CAST(job AS BIGINT) AS job, TRY_CAST(task AS BIGINT) AS task
  FROM named WHERE job <> ''
),
ended AS (
  SELECT cluster, db_index, job_id, array_job_id, array_task_id, state, end_time
  FROM jobs CROSS JOIN asked
  WHERE state IN ('NODE_FAIL', 'FAILED', 'REQUEUED') AND end_time >= asked.from_time AND end_time < asked.to_time
),
asked_for AS (
  SELECT ended.cluster, ended.db_index, healthds.time, healthds.node FROM ended
  JOIN healthds ON healthds.cluster = ended.cluster
    AND healthds.job = ended.job_id AND healthds.task IS NULL
    AND ended.end_time BETWEEN healthds.time - {REQUEUED_WITHIN} AND healthds.time + {REQUEUED_WITHIN}
  WHERE ended.state = 'REQUEUED'
  UNION ALL
  SELECT ended.cluster, ended.db_index, healthds.time, healthds.node FROM ended
  JOIN healthds ON healthds.cluster = ended.cluster
    AND healthds.job = ended.array_job_id AND healthds.task = ended.array_task_id
    AND ended.end_time BETWEEN healthds.time - {REQUEUED_WITHIN} AND healthds.time + {REQUEUED_WITHIN}
  WHERE ended.state = 'REQUEUED'
),
requeued AS (
  SELECT cluster, db_index, node FROM asked_for
  QUALIFY row_number() OVER (PARTITION BY cluster, db_index ORDER BY time, node) = 1
),
seen AS (
  SELECT cluster, db_index, node FROM seen_with_failures
  WHERE {{of_hardware}} AND (severity = 'critical' OR (severity = 'degraded' AND state = 'FAILED'))
  QUALIFY row_number() OVER (
    PARTITION BY cluster, db_index ORDER BY severity <> 'critical', first_seen, node
  ) = 1
)
SELECT ended.cluster, ended.db_index, ended.job_id, ended.end_time, 'node_fail' AS ended, seen.node
FROM ended LEFT JOIN seen USING (cluster, db_index) WHERE ended.state = 'NODE_FAIL'
UNION ALL
SELECT ended.cluster, ended.db_index, ended.job_id, ended.end_time, 'failed', seen.node
FROM ended JOIN seen USING (cluster, db_index) WHERE ended.state = 'FAILED'
UNION ALL
SELECT ended.cluster, ended.db_index, ended.job_id, ended.end_time, 'requeued', requeued.node
FROM ended JOIN requeued USING (cluster, db_index)
"""


def loss(at_most_seconds: float) -> str:
    """SQL: the GPU-seconds of work that a row of `jobs` did in vain, min(runtime, at_most_seconds) * GPUs: half of the
    time between two checkpoints is lost on average. 0 of a job whose GPUs are not known. Source: the same paper, its
    lost goodput, with half an hour."""
    return f"coalesce(jobs.gpus * least(greatest(jobs.end_time - jobs.start_time, 0), {at_most_seconds}), 0)"


def make(study: Study) -> None:
    """The table `hardware_ends`: cluster, db_index, job_id, end_time, ended (of ENDED), node; of all jobs that ended in
    the time that is asked for, whatever is chosen.

    node: the one that showed it first, what is critical before what is degraded; of a requeue the one whose healthd
    requeued; NULL of a NODE_FAIL beside which nothing critical was seen (Slurm may know which node was down)."""
    study.need("lines", "seen_with_failures")
    codes = [row["code"] for row in study.rows("SELECT DISTINCT code FROM seen_with_failures ORDER BY code")]
    blamed = ", ".join(literal(code) for code in codes if of_a_node(code))
    study.make(TABLE, _SQL.format(of_hardware=f"code IN ({blamed})" if blamed else "FALSE"))


def of_a_node(code: str) -> bool:
    """Whether a condition can be a node's fault that ends jobs, as `attribution` has it: no program's own, and nothing
    that only slows, waits or is bookkeeping."""
    means = causes.meaning(code)
    return means.ends is not EndsJob.NEVER and means.domain != causes.USER_PROGRAM


def notes(study: Study) -> list[str]:
    """What limits the table."""
    if study.has("events") or study.has("scraped_conditions"):
        return []
    return ["No health check is in the store: of what the hardware ended only NODE_FAIL is known."]
