-- Completed jobs with a node that was observed for less than half of a day on which they ran, and how many of them saw a failing check begin.

WITH met AS (
  SELECT DISTINCT placed_days.cluster, placed_days.db_index
  FROM placed_days
  JOIN observed
    ON observed.cluster = placed_days.cluster AND observed.node = placed_days.node AND observed.day = placed_days.day
  WHERE observed.observed_seconds * 2 < observed.seconds
),
saw AS (SELECT DISTINCT cluster, db_index FROM alarmed WHERE failing AND began)
SELECT count(*) AS jobs, count(saw.db_index) AS alarmed
FROM completed
JOIN met ON met.cluster = completed.cluster AND met.db_index = completed.db_index
LEFT JOIN saw ON saw.cluster = completed.cluster AND saw.db_index = completed.db_index
