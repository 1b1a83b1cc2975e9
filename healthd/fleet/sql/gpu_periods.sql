-- Periods in which each GPU was in each node and slot.
--
-- A period begins when a node first lists the GPU in this slot, and ends when the node lists its GPUs without it, or when the GPU is found in another slot. A node lists its GPUs when they change
-- and repeats the list. The list still contains a GPU that is missing, so a GPU that was taken out stays here until its replacement is listed. A number that two GPUs of a node share does not identify a GPU.
-- Lists are in the order of the node's streams, even if its clock was set back: then a list has the time of the list before it. Not limited to the requested period.
--
-- columns
--   subject      PCI address of the slot
--   gpu          the UUID, or the serial number if the UUID is unknown
--   serial       number of the board; both GPUs of a dual-GPU board have the same
--   from_time, until_time   epoch seconds; until_time is empty while the GPU is there
--   ended        moved (the GPU was found again later, in any slot of the cluster) | replaced (the slot has another GPU) | removed; empty while the GPU is there
--   next_gpu, next_serial   the GPU that replaced it
-- source: docs/events.md, "gpus"

WITH told AS (
  SELECT node, stream_id, cluster, time FROM gpus
  UNION ALL
  SELECT node, stream_id, cluster, time FROM lines
),
streams AS (
  SELECT
    node, stream_id, max(cluster) AS cluster,
    -- A time before 2001 is from a clock that was not set yet.
    coalesce(min(CASE WHEN time >= 978307200 THEN time END), min(time)) AS stream_time
  FROM told
  GROUP BY node, stream_id
),
listed AS (
  SELECT DISTINCT node, stream_id, seq, time, subject, serial, uuid, name, coalesce(uuid, serial) AS gpu
  FROM gpus
  WHERE time IS NOT NULL AND seq IS NOT NULL AND subject IS NOT NULL
),
placed AS (
  SELECT
    streams.cluster, listed.node, listed.subject, listed.serial, listed.uuid, listed.name, listed.gpu,
    max(listed.time) OVER (PARTITION BY streams.cluster, listed.node ORDER BY streams.stream_time, listed.stream_id, listed.seq) AS time,
    dense_rank() OVER (PARTITION BY streams.cluster, listed.node ORDER BY streams.stream_time, listed.stream_id, listed.seq) AS place,
    count(*) OVER (PARTITION BY listed.node, listed.stream_id, listed.seq, listed.gpu) AS copies
  FROM listed
  JOIN streams ON streams.node = listed.node AND streams.stream_id = listed.stream_id
),
listings AS (
  SELECT DISTINCT cluster, node, place, time FROM placed
),
followed AS (
  SELECT
    cluster, node, time, subject, serial, uuid, name, gpu, place,
    lag(gpu) OVER (PARTITION BY cluster, node, subject ORDER BY place) AS gpu_before,
    lag(place) OVER (PARTITION BY cluster, node, subject ORDER BY place) AS place_before
  FROM placed
  WHERE gpu IS NOT NULL AND copies = 1
),
islands AS (
  SELECT
    cluster, node, time, subject, serial, uuid, name, gpu, place,
    sum(CASE WHEN gpu = gpu_before AND place = place_before + 1 THEN 0 ELSE 1 END) OVER (
      PARTITION BY cluster, node, subject ORDER BY place ROWS BETWEEN UNBOUNDED PRECEDING AND CURRENT ROW
    ) AS island
  FROM followed
),
spells AS (
  SELECT
    cluster, node, subject, gpu, max(serial) AS serial, max(uuid) AS uuid, max(name) AS name,
    min(time) AS from_time, max(place) AS last_place
  FROM islands
  GROUP BY cluster, node, subject, gpu, island
),
found AS (
  SELECT
    cluster, node, subject, gpu, serial, uuid, name, from_time, last_place,
    lead(from_time) OVER (PARTITION BY cluster, gpu ORDER BY from_time, node, last_place, subject) AS next_time
  FROM spells
)
SELECT
  found.node, found.subject, found.gpu, found.serial, found.uuid, found.name, found.from_time,
  least(listings.time, found.next_time) AS until_time,
  CASE
    WHEN found.next_time IS NOT NULL THEN 'moved'
    WHEN followed.gpu IS NOT NULL THEN 'replaced'
    WHEN listings.time IS NOT NULL THEN 'removed'
  END AS ended,
  CASE WHEN found.next_time IS NULL THEN followed.gpu END AS next_gpu,
  CASE WHEN found.next_time IS NULL THEN followed.serial END AS next_serial,
  found.cluster
FROM found
LEFT JOIN listings
  ON listings.cluster = found.cluster AND listings.node = found.node AND listings.place = found.last_place + 1
LEFT JOIN followed
  ON followed.cluster = found.cluster AND followed.node = found.node AND followed.subject = found.subject
  AND followed.place = found.last_place + 1
ORDER BY found.cluster, found.node, found.subject, found.from_time, found.gpu
