-- Conditions on a failed job's nodes around the job's end.
--
-- The conditions are candidates for the cause. Contains jobs that ended FAILED or NODE_FAIL in [from_time, to_time), with each condition that was seen on one of their nodes in [end - before_seconds, end + after_seconds]. An edge counts
-- if it was seen in this window. A level counts only if it began or became worse in this window, because a condition that is open for days coincides with every job. Two kinds of conditions are never candidates: conditions that a user can forge
-- (`observed`), and conditions from before healthd's first start (`history`), which were not evaluated and, in a file, may also be forged. If a failed job has no row, no cause is known;
-- the query `observed` shows whether its nodes were monitored.
--
-- columns
--   first_seen, last_seen, moments   when and how often the condition was seen within the window
--   from_events, from_scrapes        number of moments that healthd's stream reported, and number of moments that a scrape reported; a scrape does not show whether a user can forge the condition
-- parameters
--   before_seconds BIGINT = 600   how long before the end
--   after_seconds BIGINT = 300   how long after it
--   shift_seconds BIGINT = 0   shift of the windows (-3600: an hour earlier); conditions in a shifted window, in which no job failed, are due to chance
-- source: "detected within the last 10 minutes or 5 minutes after a failing job's lifetime (FAILED or NODE_FAIL)", Kokolis, Kuchnik et al. (HPCA 2025, arXiv 2410.21680)

WITH failed AS (
  SELECT
    jobs.cluster, jobs.db_index, jobs.job_id, jobs.state, jobs.end_time, jobs.gpus, jobs.nodes,
    jobs.end_time - parameters.before_seconds + parameters.shift_seconds AS window_begin, jobs.end_time + parameters.after_seconds + parameters.shift_seconds AS window_end,
    parameters.before_seconds + parameters.after_seconds + 1 AS width
  FROM jobs
  CROSS JOIN parameters
  WHERE jobs.state IN ('FAILED', 'NODE_FAIL') AND jobs.end_time >= parameters.from_time AND jobs.end_time < parameters.to_time
),
placed AS (
  SELECT
    failed.cluster, failed.db_index, failed.job_id, failed.state, failed.end_time, failed.gpus, failed.nodes,
    failed.window_begin, failed.window_end, job_nodes.node,
    failed.window_begin - failed.window_begin % nullif(failed.width, 0) + numbers.n * failed.width AS time_bin
  FROM failed
  JOIN job_nodes ON job_nodes.cluster = failed.cluster AND job_nodes.db_index = failed.db_index
  CROSS JOIN numbers
  WHERE numbers.n < 2
),
counting AS (
  SELECT
    sightings.cluster, sightings.node, sightings.origin, sightings.check_name, sightings.code, sightings.subject, sightings.severity, sightings.kind, sightings.time,
    sightings.time - sightings.time % nullif(parameters.before_seconds + parameters.after_seconds + 1, 0) AS time_bin
  FROM sightings
  CROSS JOIN parameters
  WHERE (sightings.kind = 'edge' OR sightings.what IN ('onset', 'growth'))
    AND NOT coalesce(sightings.observed, FALSE) AND NOT coalesce(sightings.history, FALSE)
),
met AS (
  SELECT
    placed.cluster, placed.db_index, placed.job_id, placed.state, placed.end_time, placed.gpus, placed.nodes, placed.node,
    counting.origin, counting.check_name, counting.code, counting.subject, counting.kind, counting.time,
    CASE counting.severity WHEN 'critical' THEN 3 WHEN 'degraded' THEN 2 WHEN 'warning' THEN 1 WHEN 'info' THEN 0 END AS badness
  FROM placed
  JOIN counting
    ON counting.cluster = placed.cluster AND counting.node = placed.node AND counting.time_bin = placed.time_bin
    AND counting.time BETWEEN placed.window_begin AND placed.window_end
)
SELECT
  job_id, node, code, subject,
  CASE max(badness) WHEN 3 THEN 'critical' WHEN 2 THEN 'degraded' WHEN 1 THEN 'warning' WHEN 0 THEN 'info' END AS severity,
  min(kind) AS kind, state, end_time, min(time) AS first_seen, max(time) AS last_seen, count(*) AS moments,
  count(CASE WHEN origin = 'events' THEN 1 END) AS from_events, count(CASE WHEN origin = 'scraped' THEN 1 END) AS from_scrapes,
  gpus, nodes, min(check_name) AS check_name, db_index, cluster
FROM met
GROUP BY cluster, db_index, job_id, state, end_time, gpus, nodes, node, code, subject
ORDER BY cluster, end_time, db_index, node, code, subject
