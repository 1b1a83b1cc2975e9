-- Conditions on the chosen nodes whose worst severity was failing. A condition lasts from its first sighting, even if this was milder, until it was cleared.

SELECT
  conditions.cluster, conditions.node,
  coalesce(conditions.check_name, regexp_extract(conditions.code, '^([^/]*)', 1)) AS check_name,
  conditions.first_time, conditions.last_time, conditions.cleared_time
FROM conditions
JOIN chosen_nodes ON chosen_nodes.cluster = conditions.cluster AND chosen_nodes.node = conditions.node
WHERE conditions.severity IN ('degraded', 'critical')
  AND NOT coalesce(conditions.observed, FALSE) AND NOT coalesce(conditions.history, FALSE)
ORDER BY conditions.cluster, conditions.node, conditions.first_time, check_name, conditions.last_time
