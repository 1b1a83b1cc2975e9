-- Conditions that each completed job saw on its nodes. There is a row for each job and code, separate for conditions that fail (drain) and conditions that warn.
--
-- columns
--   began   true if the condition began or became worse while the job ran; false if it was already open
--   life    the first of the job's conditions with this code

WITH looks AS (
  SELECT
    cluster, node, check_name, code, badness >= 2 AS failing, TRUE AS began, time AS first_time, time AS last_time,
    time - time % 86400 AS day,
    coalesce(cluster || ' ', '') || node || ' ' || code || coalesce(' ' || subject, '') || ' ' || life AS life
  FROM evidence WHERE badness >= 1
  UNION ALL
  SELECT
    failing_levels.cluster, failing_levels.node, failing_levels.check_name, failing_levels.code, TRUE AS failing, FALSE AS began,
    failing_levels.from_time AS first_time, failing_levels.to_time AS last_time,
    failing_levels.from_time - failing_levels.from_time % 86400 + numbers.n * 86400 AS day,
    coalesce(failing_levels.cluster || ' ', '') || failing_levels.node || ' ' || failing_levels.code
      || coalesce(' ' || failing_levels.subject, '') || coalesce(' ' || failing_levels.life, '') AS life
  FROM failing_levels
  CROSS JOIN numbers
  WHERE numbers.n <= (failing_levels.to_time - failing_levels.from_time + failing_levels.from_time % 86400) / 86400e0
),
met AS (
  SELECT
    job_node_days.cluster, job_node_days.db_index, looks.check_name, looks.code, looks.failing, looks.began,
    looks.first_time, looks.life
  FROM job_node_days
  JOIN looks
    ON looks.cluster = job_node_days.cluster AND looks.node = job_node_days.node AND looks.day = job_node_days.day
    AND looks.first_time <= job_node_days.end_time AND looks.last_time >= job_node_days.start_time
),
ranked AS (
  SELECT
    met.cluster, met.db_index, met.check_name, met.code, met.failing, met.began, met.life,
    row_number() OVER (
      PARTITION BY met.cluster, met.db_index, met.check_name, met.code, met.failing
      ORDER BY CASE WHEN met.began THEN 0 ELSE 1 END, met.first_time, met.life
    ) AS place
  FROM met
  WHERE EXISTS (
    SELECT 1 FROM completed_jobs WHERE completed_jobs.cluster = met.cluster AND completed_jobs.db_index = met.db_index
  )
)
SELECT
  cluster, db_index, check_name, code, failing, max(CASE WHEN began THEN 1 ELSE 0 END) = 1 AS began,
  min(CASE WHEN place = 1 THEN life END) AS life
FROM ranked
GROUP BY cluster, db_index, check_name, code, failing
