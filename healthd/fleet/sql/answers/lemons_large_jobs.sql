-- Number of chosen jobs with more than more_than_gpus GPUs that ended in [window_from, window_to).
--
-- parameters
--   window_from BIGINT = 0   seconds since the epoch
--   window_to BIGINT = 0
--   more_than_gpus BIGINT = 128   jobs with more GPUs

SELECT count(*) AS jobs
FROM chosen_jobs AS jobs
CROSS JOIN parameters
WHERE jobs.gpus > parameters.more_than_gpus AND jobs.start_time IS NOT NULL
  AND jobs.end_time >= parameters.window_from AND jobs.end_time < parameters.window_to
