-- Distinct moments of `lemons_sightings` in [window_from, window_to), and whether a job was on the node or had just ended.
--
-- parameters
--   window_from BIGINT = 0   seconds since the epoch
--   window_to BIGINT = 0   a job without an end counts as running until this time
--   after_seconds BIGINT = 300   how long a job still counts after its end

WITH moments AS (
  SELECT DISTINCT
    lemons_sightings.cluster, lemons_sightings.node, lemons_sightings.time, lemons_sightings.code, lemons_sightings.severity, lemons_sightings.kind
  FROM lemons_sightings
  CROSS JOIN parameters
  WHERE lemons_sightings.time >= parameters.window_from AND lemons_sightings.time < parameters.window_to
),
places AS (SELECT DISTINCT cluster, node FROM moments),
timeline AS (
  SELECT
    job_nodes.cluster, job_nodes.node, job_nodes.start_time AS time, 0 AS of_moment,
    coalesce(job_nodes.end_time, parameters.window_to) AS end_time, CAST(NULL AS VARCHAR) AS code,
    CAST(NULL AS VARCHAR) AS severity, CAST(NULL AS VARCHAR) AS kind
  FROM job_nodes
  JOIN places ON places.cluster = job_nodes.cluster AND places.node = job_nodes.node
  CROSS JOIN parameters
  WHERE job_nodes.start_time < parameters.window_to
    AND coalesce(job_nodes.end_time, parameters.window_to) >= parameters.window_from - parameters.after_seconds
  UNION ALL
  SELECT cluster, node, time, 1, CAST(NULL AS BIGINT), code, severity, kind
  FROM moments
),
-- For each moment, the latest end of the jobs that began before it.
followed AS (
  SELECT
    cluster, node, time, code, severity, kind, of_moment,
    max(end_time) OVER (
      PARTITION BY cluster, node ORDER BY time, of_moment ROWS BETWEEN UNBOUNDED PRECEDING AND CURRENT ROW
    ) AS busy_until
  FROM timeline
)
SELECT
  followed.cluster, followed.node, followed.time, followed.code, followed.severity, followed.kind,
  coalesce(followed.busy_until >= followed.time - parameters.after_seconds, FALSE) AS busy
FROM followed
CROSS JOIN parameters
WHERE followed.of_moment = 1
ORDER BY followed.cluster, followed.node, followed.time, followed.code, followed.severity, followed.kind
