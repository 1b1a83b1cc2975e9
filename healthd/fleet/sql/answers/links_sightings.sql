-- Moments in `evidence` with a link code on the chosen nodes, in [from_time, to_time).

SELECT evidence.cluster, evidence.node, evidence.subject, evidence.code, evidence.time
FROM evidence
JOIN chosen_nodes ON chosen_nodes.cluster = evidence.cluster AND chosen_nodes.node = evidence.node
JOIN link_codes ON link_codes.code = evidence.code
CROSS JOIN parameters
WHERE evidence.time >= parameters.from_time AND evidence.time < parameters.to_time
ORDER BY evidence.cluster, evidence.node, evidence.subject, evidence.code, evidence.time
