-- The chosen nodes, and the number of days for which each was observed.

SELECT
  chosen_nodes.cluster, chosen_nodes.node, coalesce(chosen_nodes.gpu_model, '') AS model, chosen_nodes.switch,
  coalesce(sum(observed.observed_seconds), 0) / 86400e0 AS days
FROM chosen_nodes
LEFT JOIN observed ON observed.cluster = chosen_nodes.cluster AND observed.node = chosen_nodes.node
GROUP BY chosen_nodes.cluster, chosen_nodes.node, chosen_nodes.gpu_model, chosen_nodes.switch
ORDER BY chosen_nodes.cluster, chosen_nodes.node, model, chosen_nodes.switch
