-- Node-days of the chosen jobs with more than 128 GPUs, in [from_time, to_time).

SELECT
  coalesce(sum(jobs.nodes * greatest(
    least(coalesce(jobs.end_time, jobs_known.known_until), parameters.to_time) - greatest(jobs.start_time, parameters.from_time), 0
  )), 0) / 86400e0 AS days
FROM chosen_jobs AS jobs
JOIN jobs_known ON jobs_known.cluster = jobs.cluster
CROSS JOIN parameters
WHERE jobs.gpus > 128 AND jobs.start_time < parameters.to_time
  AND coalesce(jobs.end_time, jobs_known.known_until) >= parameters.from_time
