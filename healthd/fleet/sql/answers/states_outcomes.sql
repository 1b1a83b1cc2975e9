-- Outcome of the chosen jobs with `large` or more GPUs, before and after `split`.
--
-- parameters
--   split BIGINT = 0   seconds since the epoch
--   large BIGINT = 512   GPUs of a job

SELECT
  jobs.end_time >= parameters.split AS after, jobs.state, ends.ended IS NOT NULL AS by_hardware, count(*) AS jobs
FROM chosen_jobs AS jobs
CROSS JOIN parameters
LEFT JOIN hardware_ends AS ends ON ends.cluster = jobs.cluster AND ends.db_index = jobs.db_index
WHERE jobs.end_time >= parameters.from_time AND jobs.end_time < parameters.to_time
  AND jobs.gpus >= parameters.large AND jobs.start_time IS NOT NULL
GROUP BY jobs.end_time >= parameters.split, jobs.state, ends.ended IS NOT NULL
ORDER BY after, jobs.state, by_hardware
