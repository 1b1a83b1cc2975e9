-- Moments at which a condition that drains began, became worse or was seen on a GPU, in the whole store.
--
-- The GPU is the one whose serial number the condition has, if this GPU is in the slot at that time or is listed there for the first time later. Otherwise, it is the GPU that is in the slot at that time.
-- Conditions that a user can forge, or that were logged before healthd's first start, are excluded.
--
-- columns
--   gpu, from_time   identify a row of `gpu_periods`
--   end_time         the later of the condition's last sighting and its end, epoch seconds; empty while it is open. For scraped conditions, the moment itself

WITH ends AS (
  SELECT
    cluster, node, condition_id, max(serial) AS serial, max(last_time) AS last_time,
    max(CASE WHEN event = 'cleared' THEN time END) AS cleared_time
  FROM lines
  WHERE condition_id IS NOT NULL
  GROUP BY cluster, node, condition_id
),
faults AS (
  SELECT DISTINCT
    sightings.cluster, sightings.node, sightings.subject, sightings.time, sightings.code, ends.serial,
    CASE
      WHEN ends.condition_id IS NULL THEN sightings.time
      WHEN ends.cleared_time IS NOT NULL THEN greatest(ends.last_time, ends.cleared_time)
    END AS end_time
  FROM sightings
  LEFT JOIN ends
    ON ends.cluster = sightings.cluster AND ends.node = sightings.node AND ends.condition_id = sightings.condition_id
  WHERE sightings.severity IN ('degraded', 'critical')
    AND (sightings.kind = 'edge' OR sightings.what IN ('onset', 'growth'))
    AND NOT coalesce(sightings.observed, FALSE) AND NOT coalesce(sightings.history, FALSE)
),
periods AS (
  SELECT
    cluster, node, subject, gpu, serial, from_time, until_time,
    min(from_time) OVER (PARTITION BY cluster, node, subject, gpu) AS first_time
  FROM gpu_periods
),
candidates AS (
  SELECT
    faults.cluster, faults.node, faults.subject, faults.time, faults.code, faults.end_time, periods.gpu, periods.from_time,
    row_number() OVER (
      PARTITION BY faults.cluster, faults.node, faults.subject, faults.time, faults.code, faults.serial, faults.end_time
      ORDER BY
        CASE WHEN periods.serial = faults.serial THEN 0 ELSE 1 END,
        CASE WHEN periods.from_time <= faults.time THEN 0 ELSE 1 END,
        periods.from_time, periods.gpu
    ) AS place
  FROM faults
  JOIN periods
    ON periods.cluster = faults.cluster AND periods.node = faults.node AND periods.subject = faults.subject
  WHERE (periods.until_time IS NULL OR periods.until_time > faults.time)
    AND (
      periods.from_time <= faults.time
      OR (periods.serial = faults.serial AND periods.from_time = periods.first_time)
    )
)
SELECT
  cluster, node, subject, gpu, from_time, time, code,
  CASE WHEN count(end_time) = count(*) THEN max(end_time) END AS end_time
FROM candidates
WHERE place = 1
GROUP BY cluster, node, subject, gpu, from_time, time, code
