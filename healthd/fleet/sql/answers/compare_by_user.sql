-- Outcome of the chosen jobs by user, because the jobs of a user share programs. If the user is unknown, the account is used.
--
-- columns
--   unit   cluster and user

WITH ended AS (
  SELECT
    coalesce(jobs.cluster || ' ', '') || coalesce(jobs.user_name, jobs.account, '') AS unit, jobs.state,
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
