-- The long runs and their loss. Each attempt loses the time of its start. An interrupted attempt also loses the work since its last checkpoint (half an interval).
--
-- The query `runs` does not list the attempts of a run. They are the rows of the run's chain that were submitted within the run.
--
-- parameters
--   restart_seconds DOUBLE = 300   time from a start until the job makes progress
--   checkpoint_seconds DOUBLE = 3600   time between two checkpoints
-- source: "half an hour lost" with hourly checkpoints, Kokolis, Kuchnik et al. (HPCA 2025)

WITH attempts AS (
  SELECT
    long.cluster, long.run, long.chained_by, long.submit_time, jobs.nodes, jobs.state,
    jobs.start_time, jobs.end_time AS ended
  FROM ettr_long_runs AS long
  JOIN jobs ON jobs.cluster = long.cluster AND jobs.run_key = long.run_key
  WHERE long.chained_by = 'run_key' AND jobs.array_task_id IS NULL
    AND jobs.submit_time BETWEEN long.submit_time AND long.end_time
  UNION ALL
  SELECT
    long.cluster, long.run, long.chained_by, long.submit_time, jobs.nodes, jobs.state,
    jobs.start_time, jobs.end_time AS ended
  FROM ettr_long_runs AS long
  JOIN jobs ON jobs.cluster = long.cluster AND jobs.job_id = long.run
  WHERE long.chained_by = 'job_id' AND (jobs.run_key IS NULL OR jobs.array_task_id IS NOT NULL)
    AND jobs.submit_time BETWEEN long.submit_time AND long.end_time
),
timed AS (
  SELECT
    attempts.cluster, attempts.run, attempts.chained_by, attempts.submit_time, attempts.nodes,
    CASE WHEN attempts.start_time IS NOT NULL THEN 1 ELSE 0 END AS started,
    CASE WHEN attempts.ended IS NOT NULL AND attempts.state <> 'COMPLETED' THEN 1 ELSE 0 END AS interrupted,
    greatest(
      coalesce(attempts.ended, least(jobs_known.known_until, parameters.to_time)) - attempts.start_time, 0
    ) AS ran,
    parameters.restart_seconds, parameters.checkpoint_seconds
  FROM attempts
  JOIN jobs_known ON jobs_known.cluster = attempts.cluster
  CROSS JOIN parameters
),
summed AS (
  SELECT
    cluster, run, chained_by, submit_time, max(nodes) AS nodes, sum(started) AS starts,
    sum(started * interrupted) AS interruptions,
    coalesce(sum(least(ran, restart_seconds + interrupted * checkpoint_seconds / 2)), 0) AS lost_seconds
  FROM timed
  GROUP BY cluster, run, chained_by, submit_time
)
SELECT
  long.cluster, long.run, long.gpus, summed.nodes, CAST(summed.starts AS BIGINT) AS starts,
  CAST(summed.interruptions AS BIGINT) AS interruptions, long.runtime_seconds, long.queued_seconds,
  summed.lost_seconds
FROM ettr_long_runs AS long
JOIN summed
  ON summed.cluster = long.cluster AND summed.run = long.run AND summed.chained_by = long.chained_by
  AND summed.submit_time = long.submit_time
ORDER BY long.cluster, long.run, long.submit_time, long.chained_by
