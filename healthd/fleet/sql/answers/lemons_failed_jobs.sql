-- Failed jobs with the moments of `lemons_sightings` on their nodes, from before_seconds before the job's end to after_seconds after it.
--
-- parameters
--   window_from BIGINT = 0   moments in [window_from, window_to), seconds since the epoch
--   window_to BIGINT = 0   the jobs also end before this
--   before_seconds BIGINT = 600   how long before the job's end
--   after_seconds BIGINT = 300   how long after it

WITH hits AS (
  SELECT
    lemons_sightings.cluster, lemons_sightings.node, lemons_sightings.time, lemons_sightings.code, lemons_sightings.severity, lemons_sightings.kind,
    lemons_sightings.time - parameters.after_seconds AS first_end, lemons_sightings.time + parameters.before_seconds AS last_end,
    (lemons_sightings.time - parameters.after_seconds)
      - (lemons_sightings.time - parameters.after_seconds) % nullif(parameters.before_seconds + parameters.after_seconds, 0)
      + numbers.n * (parameters.before_seconds + parameters.after_seconds) AS time_bin
  FROM lemons_sightings
  CROSS JOIN parameters
  CROSS JOIN numbers
  WHERE numbers.n < 2 AND lemons_sightings.time >= parameters.window_from AND lemons_sightings.time < parameters.window_to
),
placed AS (
  SELECT
    job_nodes.cluster, job_nodes.db_index, job_nodes.node, job_nodes.end_time,
    job_nodes.end_time - job_nodes.end_time % nullif(parameters.before_seconds + parameters.after_seconds, 0) AS time_bin
  FROM job_nodes
  CROSS JOIN parameters
  WHERE job_nodes.end_time >= parameters.window_from - parameters.after_seconds AND job_nodes.end_time < parameters.window_to
),
met AS (
  SELECT placed.cluster, placed.db_index, placed.node, hits.time, hits.code, hits.severity, hits.kind
  FROM placed
  JOIN hits
    ON hits.cluster = placed.cluster AND hits.node = placed.node AND hits.time_bin = placed.time_bin
    AND placed.end_time BETWEEN hits.first_end AND hits.last_end
)
SELECT
  jobs.cluster, jobs.db_index, jobs.job_id, jobs.state, jobs.end_time, jobs.gpus, jobs.nodes, met.node, met.time,
  met.code, met.severity, met.kind
FROM met
JOIN jobs ON jobs.cluster = met.cluster AND jobs.db_index = met.db_index
CROSS JOIN parameters
WHERE jobs.state IN ('FAILED', 'NODE_FAIL', 'REQUEUED') AND jobs.end_time < parameters.window_to
ORDER BY
  jobs.cluster, jobs.db_index, jobs.job_id, jobs.state, jobs.end_time, jobs.gpus, jobs.nodes, met.node, met.time,
  met.code, met.severity, met.kind
