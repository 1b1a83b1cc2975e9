-- Conditions failslow/... on the chosen nodes, each from its onset to its end.
--
-- columns
--   onset         the first slow iteration or, if it was not reported, the first sighting
--   known_time    when a person acknowledged the condition

SELECT
  lines.cluster, lines.node, min(coalesce(lines.onset_time, lines.first_time, lines.time)) AS onset,
  min(CASE WHEN lines.event = 'opened' THEN lines.time END) AS told_time, max(lines.last_time) AS last_time,
  max(CASE WHEN lines.event = 'cleared' THEN lines.time END) AS cleared_time,
  min(CASE WHEN lines.event = 'acknowledged' THEN lines.time END) AS known_time
FROM lines
JOIN chosen_nodes ON chosen_nodes.cluster = lines.cluster AND chosen_nodes.node = lines.node
WHERE lines.code LIKE 'failslow/%'
  AND lines.event IN ('opened', 'seen_again', 'worsened', 'acknowledged', 'cleared')
  AND NOT coalesce(lines.observed, FALSE)
GROUP BY lines.cluster, lines.node, lines.condition_id, lines.code, lines.subject
HAVING min(CASE WHEN lines.event = 'opened' THEN lines.time END) IS NOT NULL
ORDER BY lines.cluster, lines.node, onset, told_time, last_time, cleared_time, known_time
