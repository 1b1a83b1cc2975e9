-- Moments in `evidence` on the chosen nodes with conditions that drain, in [from_time, to_time).

SELECT evidence.cluster, evidence.node, evidence.check_name, evidence.time, evidence.badness
FROM evidence
JOIN chosen_nodes ON chosen_nodes.cluster = evidence.cluster AND chosen_nodes.node = evidence.node
CROSS JOIN parameters
WHERE evidence.badness >= 2 AND evidence.time >= parameters.from_time AND evidence.time < parameters.to_time
ORDER BY evidence.cluster, evidence.node, evidence.check_name, evidence.time, evidence.badness
