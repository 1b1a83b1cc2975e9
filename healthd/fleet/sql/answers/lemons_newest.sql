-- Latest time before to_time in each table with failures, by cluster.

WITH times AS (
  SELECT 'jobs' AS source, cluster, start_time AS time FROM jobs
  UNION ALL
  SELECT 'jobs', cluster, end_time FROM jobs
  UNION ALL
  SELECT 'events', cluster, time FROM events
  UNION ALL
  SELECT 'node_states', cluster, start_time FROM node_states
  UNION ALL
  SELECT 'failures', cluster, time FROM failures
  UNION ALL
  SELECT 'scraped_conditions', cluster, last_time FROM scraped_conditions
)
SELECT times.source, times.cluster, max(times.time) AS newest
FROM times
CROSS JOIN parameters
WHERE times.time < parameters.to_time
GROUP BY times.source, times.cluster
ORDER BY times.source, times.cluster
