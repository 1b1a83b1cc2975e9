-- Pre-empted jobs and their pre-emptors, from slurmctld's log or inferred.
--
-- Contains jobs that ended PREEMPTED in [from_time, to_time), and other jobs that the log names. A pre-emptor is logged if the log has a line at most within_seconds from the victim's end.
-- A line belongs to only one end of the job_id, the closest. Without a line, the pre-emptor is inferred from the jobs that start on one of the victim's nodes at most within_seconds after its end:
-- it is the job that shares the most nodes with the victim or, if several do, the job that started first. Slurm's accounting does not contain the pre-emptor.
--
-- columns
--   how            logged | inferred | unknown (PREEMPTED, but no job started on its nodes)
--   preemptor_job_id, preemptor_db_index   empty if it is unknown or not in the accounting
--   shared_nodes   for an inferred pre-emptor, the number of the victim's nodes that it took
--   mode           as logged: requeued, cancelled, suspended, ...
-- parameters
--   within_seconds BIGINT = 60   maximum time between the victim's end and the line or the next start
-- source: "preempted JobId=.. has been requeued to reclaim resources for JobId=.." from slurmctld (src/slurmctld/preempt.c of SchedMD/slurm); the inference is healthd's

WITH ends_met AS (
  SELECT
    jobs.cluster, jobs.db_index, jobs.job_id, jobs.state, jobs.end_time, jobs.gpus, preemptions.time, preemptions.mode, preemptions.preemptor_job_id, preemptions.preemptor_array_task_id,
    row_number() OVER (
      PARTITION BY preemptions.cluster, preemptions.job_id, preemptions.time ORDER BY abs(preemptions.time - jobs.end_time), jobs.end_time, jobs.db_index
    ) AS place
  FROM preemptions
  CROSS JOIN parameters
  JOIN jobs
    ON jobs.cluster = preemptions.cluster AND jobs.job_id = preemptions.job_id
    AND jobs.end_time BETWEEN preemptions.time - parameters.within_seconds AND preemptions.time + parameters.within_seconds
  WHERE jobs.start_time IS NOT NULL
),
lines_met AS (
  SELECT
    cluster, db_index, job_id, state, end_time, gpus, time, mode, preemptor_job_id, preemptor_array_task_id,
    row_number() OVER (PARTITION BY cluster, db_index ORDER BY abs(time - end_time), time, preemptor_job_id, mode) AS place
  FROM ends_met WHERE place = 1
),
logged AS (
  SELECT
    lines_met.cluster, lines_met.db_index, lines_met.job_id, lines_met.state, lines_met.end_time, lines_met.gpus, lines_met.time,
    lines_met.mode, lines_met.preemptor_job_id, lines_met.preemptor_array_task_id
  FROM lines_met
  CROSS JOIN parameters
  WHERE lines_met.place = 1 AND lines_met.end_time >= parameters.from_time AND lines_met.end_time < parameters.to_time
),
takers AS (
  SELECT
    logged.cluster, logged.db_index, jobs.db_index AS preemptor_db_index, jobs.job_id AS preemptor_job_id,
    row_number() OVER (PARTITION BY logged.cluster, logged.db_index ORDER BY jobs.start_time NULLS LAST, jobs.db_index) AS place
  FROM logged
  JOIN jobs
    ON jobs.cluster = logged.cluster AND jobs.job_id = logged.preemptor_job_id
    AND coalesce(jobs.end_time, logged.time) >= logged.time
  WHERE logged.preemptor_array_task_id IS NULL
  UNION ALL
  SELECT
    logged.cluster, logged.db_index, jobs.db_index, jobs.job_id,
    row_number() OVER (PARTITION BY logged.cluster, logged.db_index ORDER BY jobs.start_time NULLS LAST, jobs.db_index)
  FROM logged
  JOIN jobs
    ON jobs.cluster = logged.cluster AND jobs.array_job_id = logged.preemptor_job_id
    AND jobs.array_task_id = logged.preemptor_array_task_id
    AND coalesce(jobs.end_time, logged.time) >= logged.time
  WHERE logged.preemptor_array_task_id IS NOT NULL
),
unlogged AS (
  SELECT jobs.cluster, jobs.db_index, jobs.job_id, jobs.state, jobs.end_time, jobs.gpus, parameters.within_seconds
  FROM jobs
  CROSS JOIN parameters
  LEFT JOIN logged ON logged.cluster = jobs.cluster AND logged.db_index = jobs.db_index
  WHERE jobs.state = 'PREEMPTED' AND jobs.end_time >= parameters.from_time AND jobs.end_time < parameters.to_time AND jobs.start_time IS NOT NULL
    AND logged.db_index IS NULL
),
placed AS (
  SELECT
    unlogged.cluster, unlogged.db_index, unlogged.job_id, unlogged.end_time, unlogged.within_seconds, job_nodes.node,
    unlogged.end_time - unlogged.end_time % nullif(unlogged.within_seconds + 1, 0) + numbers.n * (unlogged.within_seconds + 1) AS time_bin
  FROM unlogged
  JOIN job_nodes ON job_nodes.cluster = unlogged.cluster AND job_nodes.db_index = unlogged.db_index
  CROSS JOIN numbers
  WHERE numbers.n < 2
),
starting AS (
  SELECT
    job_nodes.cluster, job_nodes.node, job_nodes.db_index, job_nodes.start_time,
    job_nodes.start_time - job_nodes.start_time % nullif(parameters.within_seconds + 1, 0) AS time_bin
  FROM job_nodes
  CROSS JOIN parameters
),
-- Count before joining the jobs, because few of the millions of starts coincide with a victim. `meets` keeps the victim's
-- job_id, so that the join with jobs needs no other table. With `unlogged` in the same join, DuckDB would first pair every
-- job with every victim of its cluster.
meets AS (
  SELECT
    placed.cluster, placed.db_index, placed.job_id, starting.db_index AS preemptor_db_index, starting.start_time, count(*) AS shared_nodes
  FROM placed
  JOIN starting
    ON starting.cluster = placed.cluster AND starting.node = placed.node AND starting.time_bin = placed.time_bin
    AND starting.start_time BETWEEN placed.end_time AND placed.end_time + placed.within_seconds
  GROUP BY placed.cluster, placed.db_index, placed.job_id, starting.db_index, starting.start_time
),
candidates AS (
  SELECT
    meets.cluster, meets.db_index, meets.preemptor_db_index, meets.shared_nodes, jobs.job_id AS preemptor_job_id,
    row_number() OVER (
      PARTITION BY meets.cluster, meets.db_index ORDER BY meets.shared_nodes DESC, meets.start_time, meets.preemptor_db_index
    ) AS place
  FROM meets
  JOIN jobs ON jobs.cluster = meets.cluster AND jobs.db_index = meets.preemptor_db_index
  WHERE jobs.job_id <> meets.job_id
),
victims AS (
  SELECT
    logged.cluster, logged.db_index, logged.job_id, logged.state, logged.end_time, logged.gpus, 'logged' AS how,
    coalesce(takers.preemptor_job_id, logged.preemptor_job_id) AS preemptor_job_id, takers.preemptor_db_index,
    CAST(NULL AS BIGINT) AS shared_nodes, logged.mode
  FROM logged
  LEFT JOIN takers ON takers.cluster = logged.cluster AND takers.db_index = logged.db_index AND takers.place = 1
  UNION ALL
  SELECT
    unlogged.cluster, unlogged.db_index, unlogged.job_id, unlogged.state, unlogged.end_time, unlogged.gpus,
    CASE WHEN candidates.db_index IS NOT NULL THEN 'inferred' ELSE 'unknown' END,
    candidates.preemptor_job_id, candidates.preemptor_db_index, candidates.shared_nodes, CAST(NULL AS VARCHAR)
  FROM unlogged
  LEFT JOIN candidates ON candidates.cluster = unlogged.cluster AND candidates.db_index = unlogged.db_index AND candidates.place = 1
)
SELECT
  job_id, end_time, gpus, how, preemptor_job_id, shared_nodes, mode, state, db_index, preemptor_db_index, cluster
FROM victims
ORDER BY cluster, end_time, db_index
