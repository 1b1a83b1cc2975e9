-- How long each node ran the chosen jobs, by size class.
--
-- parameters
--   more_than_gpus BIGINT = 128   r_f covers jobs with more GPUs

WITH ran AS (
  SELECT
    rate_ran.gpus_up_to, rate_ran.gpus > parameters.more_than_gpus AS large, job_nodes.cluster, job_nodes.node,
    rate_ran.ran_to - rate_ran.ran_from AS seconds
  FROM rate_ran
  CROSS JOIN parameters
  JOIN job_nodes ON job_nodes.cluster = rate_ran.cluster AND job_nodes.db_index = rate_ran.db_index
)
SELECT gpus_up_to, large, cluster, node, CAST(sum(seconds) AS BIGINT) AS node_seconds
FROM ran
GROUP BY gpus_up_to, large, cluster, node
ORDER BY gpus_up_to, large, cluster, node
