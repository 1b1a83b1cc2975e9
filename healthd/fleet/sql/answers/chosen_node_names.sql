-- The chosen nodes.

SELECT cluster, node
FROM chosen_nodes
ORDER BY cluster, node
