-- First time of each node: its first job, or the first line of its stream.

WITH seen AS (
  SELECT cluster, node, start_time AS time FROM job_nodes WHERE start_time > 0
  UNION ALL
  SELECT cluster, node, time FROM events WHERE cluster <> ''
)
SELECT cluster, node, min(time) AS first_time
FROM seen
WHERE time IS NOT NULL
GROUP BY cluster, node
ORDER BY cluster, node
