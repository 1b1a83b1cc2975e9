-- The chosen nodes.

SELECT cluster, node, gpu_model, rack, gpus
FROM chosen_nodes
ORDER BY cluster, node
