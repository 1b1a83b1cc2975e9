-- Completed jobs in each week (from Monday, UTC) of [from_time, to_time), and how many of them saw a failing check begin.
--
-- columns
--   week_time, days   the part of the week within the period

WITH saw AS (SELECT DISTINCT cluster, db_index FROM alarmed WHERE failing AND began),
weeks AS (
  SELECT
    completed.end_time - (completed.end_time - 345600) % 604800 AS week, count(*) AS completed,
    count(saw.db_index) AS jobs
  FROM completed
  LEFT JOIN saw ON saw.cluster = completed.cluster AND saw.db_index = completed.db_index
  GROUP BY completed.end_time - (completed.end_time - 345600) % 604800
)
SELECT
  greatest(weeks.week, parameters.from_time) AS week_time,
  (least(weeks.week + 604800, parameters.to_time) - greatest(weeks.week, parameters.from_time)) / 86400e0 AS days,
  weeks.completed, weeks.jobs
FROM weeks
CROSS JOIN parameters
ORDER BY week_time
