-- Runs of the chosen jobs that lasted least_seconds or more, with the run_key of the first attempt. Jobs with the same name that ran at the same time are left out.
--
-- parameters
--   least_seconds BIGINT = 86400   minimum running time
-- source: runs of at least 24 h in total, Kokolis, Kuchnik et al. (HPCA 2025)

WITH firsts AS (
  SELECT
    runs.cluster, runs.run, runs.chained_by, runs.submit_time, runs.end_time, runs.gpus, runs.attempts,
    runs.runtime_seconds, runs.queued_seconds, jobs.run_key,
    row_number() OVER (
      PARTITION BY runs.cluster, runs.run, runs.chained_by, runs.submit_time ORDER BY jobs.db_index
    ) AS place
  FROM runs
  CROSS JOIN parameters
  JOIN chosen_jobs AS jobs
    ON jobs.cluster = runs.cluster AND jobs.job_id = runs.run AND jobs.submit_time = runs.submit_time
  WHERE runs.runtime_seconds >= parameters.least_seconds AND runs.gpus > 0 AND runs.overlapping = 0
)
SELECT cluster, run, chained_by, submit_time, end_time, gpus, runtime_seconds, queued_seconds, run_key
FROM firsts
WHERE place = 1
