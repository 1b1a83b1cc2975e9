-- Loss of the chosen jobs on the chosen nodes only. (A whole job is chosen if any of its nodes is chosen.)

WITH lost AS (
  SELECT job_nodes.gpus, greatest(jobs.end_time - jobs.start_time, 0) AS seconds
  FROM chosen_jobs AS jobs
  CROSS JOIN parameters
  JOIN job_nodes ON job_nodes.cluster = jobs.cluster AND job_nodes.db_index = jobs.db_index
  JOIN chosen_nodes ON chosen_nodes.cluster = job_nodes.cluster AND chosen_nodes.node = job_nodes.node
  LEFT JOIN hardware_ends AS ends ON ends.cluster = jobs.cluster AND ends.db_index = jobs.db_index
  WHERE jobs.end_time >= parameters.from_time AND jobs.end_time < parameters.to_time
    AND chosen_nodes.gpus IS NOT NULL AND (jobs.state = 'PREEMPTED' OR ends.ended IS NOT NULL)
)
SELECT coalesce(sum(gpus * least(seconds, 1800)), 0e0) AS gpu_seconds
FROM lost
