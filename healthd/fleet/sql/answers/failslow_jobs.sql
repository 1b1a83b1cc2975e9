-- Jobs on nodes that reported a slow job. A job without an end is counted until `known_until` of its cluster.

SELECT
  job_nodes.cluster, job_nodes.node, jobs.job_id, job_nodes.start_time AS begin_time,
  coalesce(job_nodes.end_time, jobs_known.known_until) AS end_time, job_nodes.gpus
FROM job_nodes
JOIN jobs ON jobs.cluster = job_nodes.cluster AND jobs.db_index = job_nodes.db_index
JOIN jobs_known ON jobs_known.cluster = job_nodes.cluster
CROSS JOIN parameters
WHERE job_nodes.start_time < parameters.to_time
  AND coalesce(job_nodes.end_time, jobs_known.known_until) > parameters.from_time
  AND EXISTS (
    SELECT 1 FROM slow_times WHERE slow_times.cluster = job_nodes.cluster AND slow_times.node = job_nodes.node
  )
ORDER BY job_nodes.cluster, job_nodes.node, jobs.job_id, begin_time, end_time, job_nodes.gpus
