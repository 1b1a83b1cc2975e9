-- Periods of GPUs in the chosen nodes that began before window_to.
--
-- parameters
--   window_to BIGINT = 0   seconds since the epoch

SELECT
  gpu_periods.cluster, gpu_periods.node, gpu_periods.subject, gpu_periods.gpu, gpu_periods.serial, gpu_periods.uuid,
  gpu_periods.name, gpu_periods.from_time, gpu_periods.until_time, gpu_periods.ended
FROM gpu_periods
JOIN chosen_nodes ON chosen_nodes.cluster = gpu_periods.cluster AND chosen_nodes.node = gpu_periods.node
CROSS JOIN parameters
WHERE gpu_periods.from_time < parameters.window_to
ORDER BY gpu_periods.cluster, gpu_periods.gpu, gpu_periods.from_time, gpu_periods.node, gpu_periods.subject
