-- Running time of the chosen jobs, by size class.
--
-- columns
--   large         jobs with more than more_than_gpus GPUs
--   gpu_seconds   of jobs whose nodes are known
-- parameters
--   more_than_gpus BIGINT = 128   r_f covers jobs with more GPUs

WITH ran AS (
  SELECT
    rate_jobs.gpus_up_to, rate_jobs.gpus > parameters.more_than_gpus AS large, rate_jobs.nodes, rate_jobs.gpus,
    rate_jobs.ran_to - rate_jobs.ran_from AS seconds
  FROM rate_jobs
  CROSS JOIN parameters
)
SELECT
  gpus_up_to, large, count(*) AS jobs, CAST(sum(seconds) AS BIGINT) AS job_seconds,
  CAST(coalesce(sum(nodes * seconds), 0) AS BIGINT) AS node_seconds,
  CAST(coalesce(sum(CASE WHEN nodes > 0 THEN gpus * seconds END), 0) AS BIGINT) AS gpu_seconds
FROM ran
GROUP BY gpus_up_to, large
ORDER BY gpus_up_to, large
