-- Completed jobs in each week (from Monday, UTC) in [from_time, to_time), and how many of them saw a check begin to fail.
--
-- columns
--   week_time, days   beginning and length of the part of the week that is within [from_time, to_time)

WITH saw AS (SELECT DISTINCT cluster, db_index FROM alarmed_jobs WHERE failing AND began),
weeks AS (
  SELECT
    completed_jobs.end_time - (completed_jobs.end_time - 345600) % 604800 AS week, count(*) AS completed,
    count(saw.db_index) AS jobs
  FROM completed_jobs
  LEFT JOIN saw ON saw.cluster = completed_jobs.cluster AND saw.db_index = completed_jobs.db_index
  GROUP BY completed_jobs.end_time - (completed_jobs.end_time - 345600) % 604800
)
SELECT
  greatest(weeks.week, parameters.from_time) AS week_time,
  (least(weeks.week + 604800, parameters.to_time) - greatest(weeks.week, parameters.from_time)) / 86400e0 AS days,
  weeks.completed, weeks.jobs
FROM weeks
CROSS JOIN parameters
ORDER BY week_time
