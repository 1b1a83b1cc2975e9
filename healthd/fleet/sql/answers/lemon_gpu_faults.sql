-- `gpu_faults` on the chosen nodes in [window_from, window_to).
--
-- parameters
--   window_from BIGINT = 0   seconds since the epoch
--   window_to BIGINT = 0

SELECT gpu_faults.cluster, gpu_faults.node, gpu_faults.subject, gpu_faults.gpu, gpu_faults.from_time, gpu_faults.time, gpu_faults.code
FROM gpu_faults
JOIN chosen_nodes ON chosen_nodes.cluster = gpu_faults.cluster AND chosen_nodes.node = gpu_faults.node
CROSS JOIN parameters
WHERE gpu_faults.time >= parameters.window_from AND gpu_faults.time < parameters.window_to
ORDER BY gpu_faults.cluster, gpu_faults.gpu, gpu_faults.time, gpu_faults.node, gpu_faults.subject, gpu_faults.from_time, gpu_faults.code
