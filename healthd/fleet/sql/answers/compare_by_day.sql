-- Outcome of the chosen jobs by the day on which they ended, because jobs that ended on the same day are affected by the same events.
--
-- columns
--   unit   the beginning of the day, seconds since the epoch, as text

WITH ended AS (
  SELECT
    CAST(jobs.end_time - jobs.end_time % 86400 AS VARCHAR) AS unit, jobs.state,
    jobs.gpus * greatest(jobs.end_time - jobs.start_time, 0) AS gpu_seconds
  FROM chosen_jobs AS jobs
  CROSS JOIN parameters
  WHERE jobs.end_time >= parameters.from_time AND jobs.end_time < parameters.to_time
)
SELECT
  unit, count(*) AS jobs, count(CASE WHEN state = 'COMPLETED' THEN 1 END) AS completed,
  count(CASE WHEN state = 'FAILED' THEN 1 END) AS failed,
  count(CASE WHEN state = 'NODE_FAIL' THEN 1 END) AS node_fail,
  count(CASE WHEN state = 'PREEMPTED' THEN 1 END) AS preempted,
  count(CASE WHEN state = 'TIMEOUT' THEN 1 END) AS timeout, coalesce(sum(gpu_seconds), 0) / 3600e0 AS gpu_hours
FROM ended
GROUP BY unit
ORDER BY unit
