-- Moments at which a node may have ended a job: conditions that drain, and Slurm's node states, in the whole store.
--
-- columns
--   code       code of a condition, or reason for a state
--   severity   degraded | critical; for a state: down | drain
--   kind       condition; the setter of a state: healthd | slurm | person | unknown

SELECT cluster, node, time, code, severity, 'condition' AS kind
FROM sightings
WHERE severity IN ('degraded', 'critical') AND (kind = 'edge' OR what IN ('onset', 'growth'))
  AND NOT coalesce(observed, FALSE) AND NOT coalesce(history, FALSE)
UNION ALL
SELECT
  cluster, node, start_time AS time, coalesce(reason, '') AS code,
  CASE WHEN state LIKE '%DOWN%' THEN 'down' ELSE 'drain' END AS severity, coalesce(set_by, 'unknown') AS kind
FROM node_states
WHERE node IS NOT NULL
