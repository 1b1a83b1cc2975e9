-- Periods of GPUs in the chosen nodes that began before window_to.
--
-- If a node's last line is more than `silent_seconds` before window_to, its GPUs were there until that line.
--
-- parameters
--   window_to BIGINT = 0   seconds since the epoch
--   silent_seconds BIGINT = 2592000   30 days

WITH last_lines AS (
  SELECT cluster, node, max(time) AS time FROM lines GROUP BY cluster, node
),
seen AS (
  SELECT
    gpu_periods.cluster, gpu_periods.node, gpu_periods.subject, gpu_periods.gpu, gpu_periods.serial, gpu_periods.uuid,
    gpu_periods.name, gpu_periods.from_time, gpu_periods.until_time, gpu_periods.ended,
    greatest(gpu_periods.from_time, coalesce(last_lines.time, gpu_periods.from_time)) AS last_time
  FROM gpu_periods
  JOIN chosen_nodes ON chosen_nodes.cluster = gpu_periods.cluster AND chosen_nodes.node = gpu_periods.node
  LEFT JOIN last_lines ON last_lines.cluster = gpu_periods.cluster AND last_lines.node = gpu_periods.node
)
SELECT
  seen.cluster, seen.node, seen.subject, seen.gpu, seen.serial, seen.uuid, seen.name, seen.from_time,
  coalesce(
    seen.until_time,
    CASE WHEN seen.last_time < parameters.window_to - parameters.silent_seconds THEN seen.last_time END
  ) AS until_time,
  seen.ended
FROM seen
CROSS JOIN parameters
WHERE seen.from_time < parameters.window_to
ORDER BY seen.cluster, seen.gpu, seen.from_time, seen.node, seen.subject
