-- The chosen jobs that ended in [from_time, to_time), by state, by size class, and by how a node ended them.
--
-- columns
--   ended              as in `hardware_ends`; empty if no node ended them
--   runtime_seconds, gpu_seconds   for the whole runtime, including time before from_time
--   lost_gpu_seconds   at most half an hour of work of each job that was pre-empted or that a node ended
--   big_...            for jobs with 256 or more GPUs

WITH ended AS (
  SELECT
    jobs.state, jobs.gpus_up_to, ends.ended, jobs.gpus,
    greatest(jobs.end_time - jobs.start_time, 0) AS seconds,
    CASE WHEN jobs.state = 'PREEMPTED' OR ends.ended IS NOT NULL THEN 1 ELSE 0 END AS in_vain
  FROM chosen_jobs AS jobs
  CROSS JOIN parameters
  LEFT JOIN hardware_ends AS ends ON ends.cluster = jobs.cluster AND ends.db_index = jobs.db_index
  WHERE jobs.end_time >= parameters.from_time AND jobs.end_time < parameters.to_time
)
SELECT
  state, gpus_up_to, ended, count(*) AS jobs,
  CAST(coalesce(sum(gpus * seconds), 0) AS BIGINT) AS gpu_seconds,
  CAST(coalesce(sum(seconds), 0) AS BIGINT) AS runtime_seconds,
  CAST(coalesce(sum(in_vain * gpus * least(seconds, 1800)), 0) AS BIGINT) AS lost_gpu_seconds,
  count(CASE WHEN gpus >= 256 THEN 1 END) AS big_jobs,
  CAST(coalesce(sum(CASE WHEN gpus >= 256 THEN gpus * seconds END), 0) AS BIGINT) AS big_gpu_seconds
FROM ended
GROUP BY state, gpus_up_to, ended
ORDER BY state, gpus_up_to, ended
