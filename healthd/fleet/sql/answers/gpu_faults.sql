-- Moments at which a condition that drains began, became worse or was seen on a GPU, in the whole store.
--
-- The GPU is the one whose serial number the condition has. If it has none, it is the GPU that was in the slot at that time. Conditions that a user can forge, or that were logged before healthd's first start, are excluded.
--
-- columns
--   gpu, from_time   identify a row of `gpu_periods`

WITH numbered AS (
  SELECT cluster, node, condition_id, max(serial) AS serial
  FROM lines
  WHERE serial IS NOT NULL AND condition_id IS NOT NULL
  GROUP BY cluster, node, condition_id
),
faults AS (
  SELECT DISTINCT sightings.cluster, sightings.node, sightings.subject, sightings.time, sightings.code, numbered.serial
  FROM sightings
  LEFT JOIN numbered
    ON numbered.cluster = sightings.cluster AND numbered.node = sightings.node
    AND numbered.condition_id = sightings.condition_id
  WHERE sightings.severity IN ('degraded', 'critical')
    AND (sightings.kind = 'edge' OR sightings.what IN ('onset', 'growth'))
    AND NOT coalesce(sightings.observed, FALSE) AND NOT coalesce(sightings.history, FALSE)
),
candidates AS (
  SELECT
    faults.cluster, faults.node, faults.subject, faults.time, faults.code, gpu_periods.gpu, gpu_periods.from_time,
    row_number() OVER (
      PARTITION BY faults.cluster, faults.node, faults.subject, faults.time, faults.code, faults.serial
      ORDER BY
        CASE WHEN gpu_periods.until_time <= faults.time OR gpu_periods.from_time > faults.time THEN 1 ELSE 0 END,
        gpu_periods.from_time DESC, gpu_periods.gpu
    ) AS place
  FROM faults
  JOIN gpu_periods
    ON gpu_periods.cluster = faults.cluster AND gpu_periods.node = faults.node
    AND gpu_periods.subject = faults.subject
  WHERE gpu_periods.serial = faults.serial
    OR (
      faults.serial IS NULL AND gpu_periods.from_time <= faults.time
      AND (gpu_periods.until_time IS NULL OR gpu_periods.until_time > faults.time)
    )
)
SELECT DISTINCT cluster, node, subject, gpu, from_time, time, code
FROM candidates
WHERE place = 1
