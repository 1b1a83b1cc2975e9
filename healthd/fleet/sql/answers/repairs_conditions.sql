-- Conditions on the chosen nodes that drained, with their ending. A condition that is still open has no cleared_time.

SELECT
  conditions.cluster, conditions.node, conditions.code, coalesce(conditions.subject, '') AS subject,
  conditions.first_time, conditions.cleared_time, conditions.cleared_by
FROM conditions
JOIN chosen_nodes ON chosen_nodes.cluster = conditions.cluster AND chosen_nodes.node = conditions.node
WHERE conditions.severity IN ('degraded', 'critical') AND conditions.origin = 'events'
  AND NOT coalesce(conditions.observed, FALSE) AND NOT coalesce(conditions.history, FALSE)
ORDER BY
  conditions.cluster, conditions.node, conditions.code, subject, conditions.first_time, conditions.cleared_time,
  conditions.cleared_by
