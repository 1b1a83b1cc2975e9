-- The chosen jobs with GPUs that ran in [from_time, to_time), with the time they ran. A job without an end is counted until `known_until` of its cluster.

SELECT
  jobs.cluster, jobs.db_index, jobs.job_id, jobs.gpus, jobs.nodes, jobs.start_time, jobs.end_time,
  least(jobs.gpus_up_to, 131072) AS gpus_up_to,
  greatest(jobs.start_time, parameters.from_time) AS ran_from,
  greatest(
    least(coalesce(jobs.end_time, jobs_known.known_until), parameters.to_time), jobs.start_time, parameters.from_time
  ) AS ran_to
FROM chosen_jobs AS jobs
JOIN jobs_known ON jobs_known.cluster = jobs.cluster
CROSS JOIN parameters
WHERE jobs.gpus > 0 AND jobs.start_time < parameters.to_time
  AND coalesce(jobs.end_time, jobs_known.known_until) >= parameters.from_time
