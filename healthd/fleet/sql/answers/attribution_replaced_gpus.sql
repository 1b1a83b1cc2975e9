-- GPUs of the chosen nodes that were replaced in [from_time, to_time), during a fault or not more than `within_seconds` after its end.
--
-- A fault ends with its last sighting or when it is cleared, whichever is later. GPUs that were found in another slot later are left out, because they were moved.
--
-- columns
--   time        when the node first listed the replacement
--   code        the last fault
-- parameters
--   within_seconds BIGINT = 2592000   30 days; a later replacement is not due to the fault

WITH ranked AS (
  SELECT
    gpu_periods.cluster, gpu_periods.node, gpu_periods.subject, gpu_periods.until_time AS time, gpu_periods.serial,
    gpu_periods.uuid, gpu_periods.next_gpu, gpu_periods.next_serial, gpu_faults.code,
    row_number() OVER (
      PARTITION BY gpu_periods.cluster, gpu_periods.node, gpu_periods.subject, gpu_periods.from_time, gpu_periods.gpu
      ORDER BY gpu_faults.time DESC, gpu_faults.code
    ) AS place
  FROM gpu_periods
  JOIN gpu_faults
    ON gpu_faults.cluster = gpu_periods.cluster AND gpu_faults.node = gpu_periods.node
    AND gpu_faults.subject = gpu_periods.subject AND gpu_faults.gpu = gpu_periods.gpu
    AND gpu_faults.from_time = gpu_periods.from_time
  CROSS JOIN parameters
  WHERE gpu_periods.ended = 'replaced'
    AND (gpu_faults.end_time IS NULL OR gpu_faults.end_time >= gpu_periods.until_time - parameters.within_seconds)
)
SELECT
  ranked.cluster, ranked.node, ranked.subject, ranked.time, ranked.serial, ranked.uuid, ranked.next_gpu, ranked.next_serial,
  ranked.code
FROM ranked
JOIN chosen_nodes ON chosen_nodes.cluster = ranked.cluster AND chosen_nodes.node = ranked.node
CROSS JOIN parameters
WHERE ranked.place = 1 AND ranked.time >= parameters.from_time AND ranked.time < parameters.to_time
ORDER BY ranked.cluster, ranked.node, ranked.time, ranked.subject
