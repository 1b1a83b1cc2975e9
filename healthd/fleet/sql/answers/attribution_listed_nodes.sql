-- The chosen nodes that list their GPUs, and the time of their first list.

SELECT gpu_periods.cluster, gpu_periods.node, min(gpu_periods.from_time) AS first_time
FROM gpu_periods
JOIN chosen_nodes ON chosen_nodes.cluster = gpu_periods.cluster AND chosen_nodes.node = gpu_periods.node
GROUP BY gpu_periods.cluster, gpu_periods.node
ORDER BY gpu_periods.cluster, gpu_periods.node
