-- Jobs that nodes ended, among all jobs that ended in [from_time, to_time), chosen or not.
--
-- Counts accounting records; each requeue has its own record. A record counts in three cases. (1) It ended NODE_FAIL, because Slurm lost one of its nodes. (2) It ended FAILED with a critical or degraded condition
-- in `seen_with_failures` that is not a fault in the program; this condition is then most often the cause. (3) It ended REQUEUED, and healthd's stream names the job and the node; healthd requeues only for critical faults.
--
-- columns
--   ended   node_fail | failed | requeued
--   node    the first node with a condition, critical before degraded; for a requeue, the node whose healthd requeued it; empty for a NODE_FAIL without a critical condition
-- parameters
--   requeued_within_seconds BIGINT = 120   maximum time between healthd's line and the end of the record; needed because scontrol requeue kills the job first
-- source: cases 1 and 2 are rule (1) for lost goodput in Kokolis, Kuchnik et al. (HPCA 2025, arXiv 2410.21680), which also has "if a health check terminates a job, the system automatically requeues it with the same job id"

WITH named AS (
  SELECT DISTINCT
    lines.cluster, lines.time, lines.node,
    CAST(nullif(regexp_extract(events.rest, '"job":"([0-9]{1,18})[^0-9]', 1), '') AS BIGINT) AS job,
    CAST(nullif(regexp_extract(events.rest, '"job":"[0-9]+_([0-9]{1,18})[^0-9]', 1), '') AS BIGINT) AS task
  FROM lines
  JOIN events ON events.node = lines.node AND events.stream_id = lines.stream_id AND events.seq = lines.seq
  WHERE lines.event = 'requeue' AND events.stage = 'confirmed' AND events.rest IS NOT NULL
),
ended AS (
  SELECT
    jobs.cluster, jobs.db_index, jobs.job_id, jobs.array_job_id, jobs.array_task_id, jobs.state, jobs.end_time
  FROM jobs
  CROSS JOIN parameters
  WHERE jobs.state IN ('NODE_FAIL', 'FAILED', 'REQUEUED')
    AND jobs.end_time >= parameters.from_time AND jobs.end_time < parameters.to_time
),
asked_for AS (
  SELECT ended.cluster, ended.db_index, named.time, named.node
  FROM ended
  CROSS JOIN parameters
  JOIN named
    ON ended.cluster = named.cluster AND ended.job_id = named.job
    AND ended.end_time BETWEEN named.time - parameters.requeued_within_seconds AND named.time + parameters.requeued_within_seconds
  WHERE ended.state = 'REQUEUED' AND named.task IS NULL
  UNION ALL
  SELECT ended.cluster, ended.db_index, named.time, named.node
  FROM ended
  CROSS JOIN parameters
  JOIN named
    ON ended.cluster = named.cluster AND ended.array_job_id = named.job AND ended.array_task_id = named.task
    AND ended.end_time BETWEEN named.time - parameters.requeued_within_seconds AND named.time + parameters.requeued_within_seconds
  WHERE ended.state = 'REQUEUED'
),
requeued AS (
  SELECT
    cluster, db_index, node, row_number() OVER (PARTITION BY cluster, db_index ORDER BY time, node) AS place
  FROM asked_for
),
seen AS (
  SELECT
    met.cluster, met.db_index, met.node,
    row_number() OVER (
      PARTITION BY met.cluster, met.db_index
      ORDER BY CASE WHEN met.severity = 'critical' THEN 0 ELSE 1 END, met.first_seen, met.node
    ) AS place
  FROM seen_with_failures AS met
  LEFT JOIN codes ON codes.code = met.code
  WHERE coalesce(codes.of_node, TRUE)
    AND (met.severity = 'critical' OR (met.severity = 'degraded' AND met.state = 'FAILED'))
)
SELECT ended.cluster, ended.db_index, ended.job_id, ended.end_time, 'node_fail' AS ended, seen.node
FROM ended
LEFT JOIN seen ON seen.cluster = ended.cluster AND seen.db_index = ended.db_index AND seen.place = 1
WHERE ended.state = 'NODE_FAIL'
UNION ALL
SELECT ended.cluster, ended.db_index, ended.job_id, ended.end_time, 'failed' AS ended, seen.node
FROM ended
JOIN seen ON seen.cluster = ended.cluster AND seen.db_index = ended.db_index
WHERE ended.state = 'FAILED' AND seen.place = 1
UNION ALL
SELECT ended.cluster, ended.db_index, ended.job_id, ended.end_time, 'requeued' AS ended, requeued.node
FROM ended
JOIN requeued ON requeued.cluster = ended.cluster AND requeued.db_index = ended.db_index
WHERE requeued.place = 1
