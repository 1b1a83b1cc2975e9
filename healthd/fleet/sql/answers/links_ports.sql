-- Number of ports that nodes of each model reported in the whole store. A node has at least this many ports.
--
-- columns
--   inside   true for PCI Express, inside a node

SELECT
  coalesce(chosen_nodes.gpu_model, '') AS model, link_codes.inside,
  greatest(1, count(DISTINCT CASE WHEN evidence.subject <> '' THEN evidence.subject END)) AS ports
FROM evidence
JOIN chosen_nodes ON chosen_nodes.cluster = evidence.cluster AND chosen_nodes.node = evidence.node
JOIN link_codes ON link_codes.code = evidence.code
GROUP BY chosen_nodes.gpu_model, link_codes.inside
ORDER BY model, link_codes.inside
