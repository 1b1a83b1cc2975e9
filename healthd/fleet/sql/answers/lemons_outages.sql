-- Node states that overlap (window_from, window_to): Slurm's states, and the drains that healthd confirmed. A drain lasts until the next drain or resume.
--
-- parameters
--   window_from BIGINT = 0   seconds since the epoch
--   window_to BIGINT = 0

WITH confirmed AS (
  SELECT
    cluster, node, time AS start_time, event, coalesce(reason, '') AS reason,
    lead(time) OVER (PARTITION BY cluster, node ORDER BY time, stream_id, seq) AS end_time
  FROM lines
  WHERE event IN ('drain', 'resume') AND stage = 'confirmed'
),
spells AS (
  SELECT
    0 AS of_healthd, cluster, node, start_time, end_time, coalesce(state, '') AS state, coalesce(reason, '') AS reason,
    coalesce(set_by, 'unknown') AS by_whom
  FROM node_states
  WHERE node IS NOT NULL
  UNION ALL
  SELECT 1, cluster, node, start_time, end_time, 'DRAIN', reason, 'healthd'
  FROM confirmed
  WHERE event = 'drain'
)
SELECT
  spells.cluster, spells.node, spells.start_time, spells.end_time, spells.state, spells.reason, spells.by_whom
FROM spells
CROSS JOIN parameters
WHERE spells.start_time < parameters.window_to AND coalesce(spells.end_time, parameters.window_to) > parameters.window_from
ORDER BY
  spells.of_healthd, spells.cluster, spells.node, spells.start_time, spells.end_time, spells.state, spells.reason,
  spells.by_whom
