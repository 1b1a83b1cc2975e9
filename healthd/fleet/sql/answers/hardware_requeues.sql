-- Records that are the requeue of a record in `hardware_ends`: the previous record of the same job is in `hardware_ends`.

WITH attempts AS (
  SELECT
    jobs.cluster, jobs.db_index, jobs.job_id,
    lag(jobs.db_index) OVER (
      PARTITION BY jobs.cluster, jobs.job_id ORDER BY jobs.submit_time, jobs.start_time, jobs.db_index
    ) AS before
  FROM jobs
  WHERE EXISTS (
    SELECT 1 FROM hardware_ends AS ends WHERE ends.cluster = jobs.cluster AND ends.job_id = jobs.job_id
  )
)
SELECT attempts.cluster, attempts.db_index, attempts.job_id
FROM attempts
JOIN hardware_ends AS ends ON ends.cluster = attempts.cluster AND ends.db_index = attempts.before
