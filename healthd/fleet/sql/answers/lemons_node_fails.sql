-- Nodes of the jobs that ended NODE_FAIL, with the columns of `lemons_failed_jobs`. It is unknown here which of the nodes failed.
--
-- parameters
--   window_from BIGINT = 0   jobs that ended in [window_from, window_to), seconds since the epoch
--   window_to BIGINT = 0

SELECT
  jobs.cluster, jobs.db_index, jobs.job_id, jobs.state, jobs.end_time, jobs.gpus, jobs.nodes, job_nodes.node,
  jobs.end_time AS time, '' AS code, '' AS severity, 'unknown' AS kind
FROM jobs
JOIN job_nodes ON job_nodes.cluster = jobs.cluster AND job_nodes.db_index = jobs.db_index
CROSS JOIN parameters
WHERE jobs.state = 'NODE_FAIL' AND jobs.end_time >= parameters.window_from AND jobs.end_time < parameters.window_to
ORDER BY jobs.cluster, jobs.db_index, jobs.job_id, jobs.end_time, jobs.gpus, jobs.nodes, job_nodes.node
