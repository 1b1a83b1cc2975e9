-- How often each check reported a failure or warning on the chosen nodes, and the number of its codes.

SELECT
  evidence.check_name, count(CASE WHEN evidence.badness >= 2 THEN 1 END) AS failing,
  count(CASE WHEN evidence.badness = 1 THEN 1 END) AS warnings, count(DISTINCT evidence.code) AS codes
FROM evidence
JOIN chosen_nodes ON chosen_nodes.cluster = evidence.cluster AND chosen_nodes.node = evidence.node
CROSS JOIN parameters
WHERE evidence.badness >= 1 AND evidence.time >= parameters.from_time AND evidence.time < parameters.to_time
GROUP BY evidence.check_name
ORDER BY evidence.check_name
