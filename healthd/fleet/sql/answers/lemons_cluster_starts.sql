-- First time of each cluster in the store.

WITH seen AS (
  SELECT cluster, start_time AS time FROM jobs WHERE start_time > 0
  UNION ALL
  SELECT cluster, time FROM events
  UNION ALL
  SELECT cluster, start_time FROM node_states WHERE start_time > 0
  UNION ALL
  SELECT cluster, time FROM failures
)
SELECT cluster, min(time) AS first_time
FROM seen
WHERE time IS NOT NULL
GROUP BY cluster
ORDER BY cluster
