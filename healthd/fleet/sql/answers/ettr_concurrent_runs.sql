-- Number of long runs that are left out because their jobs with the same name ran at the same time. Such jobs are a family, not a chain.
--
-- parameters
--   least_seconds BIGINT = 86400   minimum running time

SELECT count(*) AS runs
FROM runs
CROSS JOIN parameters
WHERE runs.runtime_seconds >= parameters.least_seconds AND runs.gpus > 0 AND runs.overlapping > 0
  AND EXISTS (SELECT 1 FROM chosen_jobs AS jobs WHERE jobs.cluster = runs.cluster AND jobs.job_id = runs.run)
