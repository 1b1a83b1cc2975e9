-- GPU-seconds of jobs on the chosen nodes, in the periods for which jobs were read (`known_times`).
--
-- parameters
--   chosen_alone BIGINT = 0   1: count only the chosen jobs; 0: count all jobs on these nodes

SELECT
  CAST(coalesce(sum(job_nodes.gpus * greatest(
    least(coalesce(job_nodes.end_time, jobs_known.known_until), known_times.end_time)
      - greatest(job_nodes.start_time, known_times.begin_time), 0
  )), 0) AS DOUBLE) AS gpu_seconds
FROM job_nodes
JOIN known_times ON known_times.cluster = job_nodes.cluster
JOIN jobs_known ON jobs_known.cluster = job_nodes.cluster
JOIN chosen_nodes ON chosen_nodes.cluster = job_nodes.cluster AND chosen_nodes.node = job_nodes.node
CROSS JOIN parameters
LEFT JOIN chosen_jobs ON chosen_jobs.cluster = job_nodes.cluster AND chosen_jobs.db_index = job_nodes.db_index
WHERE chosen_nodes.gpus IS NOT NULL
  AND (parameters.chosen_alone = 0 OR chosen_jobs.db_index IS NOT NULL)
  AND job_nodes.start_time < known_times.end_time
  AND coalesce(job_nodes.end_time, jobs_known.known_until) > known_times.begin_time
