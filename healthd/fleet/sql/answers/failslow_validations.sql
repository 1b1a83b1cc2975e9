-- Validations on the chosen nodes that failed or were slow.
--
-- columns
--   ongoing   true if the condition is not cleared

SELECT
  conditions.cluster, conditions.node, conditions.code, count(*) AS times, min(conditions.first_time) AS first_time,
  max(conditions.last_time) AS last_time,
  max(CASE WHEN conditions.cleared_time IS NULL AND conditions.origin = 'events' THEN 1 ELSE 0 END) = 1 AS ongoing
FROM conditions
JOIN chosen_nodes ON chosen_nodes.cluster = conditions.cluster AND chosen_nodes.node = conditions.node
WHERE conditions.code IN ('validation/failed', 'validation/slow')
GROUP BY conditions.cluster, conditions.node, conditions.code
ORDER BY conditions.cluster, conditions.node, conditions.code, times, first_time, last_time, ongoing
