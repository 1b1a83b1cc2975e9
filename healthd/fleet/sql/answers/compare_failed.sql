-- The chosen jobs that nodes ended.
--
-- columns
--   large   true if the job had more than 128 GPUs and ran
--   lost    lost GPU-hours, at most half an hour of work

SELECT
  jobs.cluster, jobs.job_id, coalesce(jobs.gpus > 128 AND jobs.start_time IS NOT NULL, FALSE) AS large, ends.node,
  coalesce(jobs.gpus * least(greatest(jobs.end_time - jobs.start_time, 0), 1800), 0) / 3600e0 AS lost
FROM hardware_ends AS ends
JOIN chosen_jobs AS jobs ON jobs.cluster = ends.cluster AND jobs.db_index = ends.db_index
ORDER BY jobs.cluster, jobs.job_id, large, ends.node, lost
