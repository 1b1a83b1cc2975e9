-- Time for which each node ran the chosen jobs, by size class.
--
-- parameters
--   more_than_gpus BIGINT = 128   r_f covers jobs with more GPUs

WITH ran AS (
  SELECT
    rate_jobs.gpus_up_to, rate_jobs.gpus > parameters.more_than_gpus AS large, job_nodes.cluster, job_nodes.node,
    rate_jobs.ran_to - rate_jobs.ran_from AS seconds
  FROM rate_jobs
  CROSS JOIN parameters
  JOIN job_nodes ON job_nodes.cluster = rate_jobs.cluster AND job_nodes.db_index = rate_jobs.db_index
)
SELECT gpus_up_to, large, cluster, node, CAST(sum(seconds) AS BIGINT) AS node_seconds
FROM ran
GROUP BY gpus_up_to, large, cluster, node
ORDER BY gpus_up_to, large, cluster, node
