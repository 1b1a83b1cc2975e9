-- Completed jobs that saw a failing check: in total (level 0), by check (1) and by code (2).
--
-- columns
--   alarms, squares   the number of conditions; the sum over the conditions of the squared number of jobs that saw it
--   jobs              jobs that saw a condition begin; already_open_jobs: jobs that ran while a condition was already open; warned_jobs: jobs that saw only warnings

WITH levels AS (
  SELECT 0 AS level, '' AS check_name, '' AS code, cluster, db_index, failing, began, life FROM alarmed_jobs
  UNION ALL
  SELECT 1 AS level, check_name, '' AS code, cluster, db_index, failing, began, life FROM alarmed_jobs
  UNION ALL
  SELECT 2 AS level, check_name, code, cluster, db_index, failing, began, life FROM alarmed_jobs
),
once AS (
  SELECT
    level, check_name, code, cluster, db_index, max(CASE WHEN failing AND began THEN 1 ELSE 0 END) AS saw,
    max(CASE WHEN failing THEN 1 ELSE 0 END) AS stood, min(CASE WHEN failing AND began THEN life END) AS life
  FROM levels
  GROUP BY level, check_name, code, cluster, db_index
),
clumps AS (
  SELECT level, check_name, code, life, count(*) AS k FROM once WHERE saw = 1 GROUP BY level, check_name, code, life
),
clumped AS (
  SELECT level, check_name, code, count(*) AS alarms, CAST(sum(k * k) AS BIGINT) AS squares
  FROM clumps
  GROUP BY level, check_name, code
),
summed AS (
  SELECT
    level, check_name, code, count(CASE WHEN saw = 1 THEN 1 END) AS jobs,
    count(CASE WHEN stood = 1 AND saw = 0 THEN 1 END) AS already_open_jobs, count(CASE WHEN stood = 0 THEN 1 END) AS warned_jobs
  FROM once
  GROUP BY level, check_name, code
)
SELECT
  summed.level, summed.check_name, summed.code, coalesce(clumped.alarms, 0) AS alarms,
  coalesce(clumped.squares, 0) AS squares, summed.jobs, summed.already_open_jobs, summed.warned_jobs
FROM summed
LEFT JOIN clumped
  ON clumped.level = summed.level AND clumped.check_name = summed.check_name AND clumped.code = summed.code
ORDER BY
  summed.level, summed.jobs DESC, summed.already_open_jobs DESC, summed.warned_jobs DESC, summed.check_name, summed.code
