-- Jobs that nodes ended, and their loss: min(runtime, at_most_seconds) x GPUs, or 0 if the GPUs are unknown.
--
-- parameters
--   at_most_seconds DOUBLE = 1800   half of the time between two checkpoints
-- source: lost goodput in Kokolis, Kuchnik et al. (HPCA 2025, arXiv 2410.21680), first order

SELECT
  ends.cluster, ends.job_id, ends.ended, ends.node, jobs.gpus, jobs.end_time, jobs.gpus_up_to, 1 AS jobs,
  CAST(coalesce(
    jobs.gpus * least(greatest(jobs.end_time - jobs.start_time, 0), parameters.at_most_seconds), 0
  ) AS DOUBLE) AS gpu_seconds
FROM hardware_ends AS ends
JOIN chosen_jobs AS jobs ON jobs.cluster = ends.cluster AND jobs.db_index = ends.db_index
CROSS JOIN parameters
ORDER BY ends.cluster, ends.end_time, ends.db_index
