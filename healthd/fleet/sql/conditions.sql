-- Conditions on each node, with first and last time and number of sightings.
--
-- Contains conditions that were open in [from_time, to_time). A condition is open from its first sighting until its last, or until it was cleared. Only sightings are evidence: between two sightings of an edge,
-- no fault is known. The same fault may appear twice, once from healthd's events and once from scrapes.
--
-- columns
--   severity      the worst severity: info | warning | degraded (drains) | critical (requeues)
--   kind          edge: the problem happened at one moment; level: each run of the check finds the problem again
--   first_time, last_time, cleared_time   epoch seconds; cleared_time is empty if not yet cleared, or if unknown
--   times         how often it was seen, as counted by the node; empty for scraped conditions
--   moments       number of moments at which it is known to have been seen
--   origin        events | scraped
--   observed      true if only a source that a user can forge reported it, so that it triggered nothing (or the row is older than this column)
--   history       true if only log lines from before healthd's first start there reported it; empty for scraped conditions
--   step_seconds  interval of scraped conditions; shorter conditions are missing
-- source: docs/events.md

WITH ranked AS (
  SELECT
    cluster, node, condition_id, code, subject, check_name, kind, event, time, times, cleared_by, observed, history,
    coalesce(first_time, time) AS first_seen, coalesce(last_time, time) AS last_seen,
    CASE severity WHEN 'critical' THEN 3 WHEN 'degraded' THEN 2 WHEN 'warning' THEN 1 WHEN 'info' THEN 0 END AS badness
  FROM lines WHERE event IN ('opened', 'seen_again', 'worsened', 'acknowledged', 'cleared') AND code IS NOT NULL
),
lives AS (
  SELECT
    cluster, node, condition_id, code, subject, min(check_name) AS check_name, min(kind) AS kind, max(badness) AS badness,
    min(first_seen) AS first_time, max(last_seen) AS last_time,
    max(CASE WHEN event = 'cleared' THEN time END) AS cleared_time,
    max(CASE WHEN event = 'cleared' THEN cleared_by END) AS cleared_by,
    max(times) AS times,
    min(CASE WHEN observed = FALSE THEN 0 ELSE 1 END) = 1 AS observed, min(CASE WHEN history THEN 1 ELSE 0 END) = 1 AS history
  FROM ranked
  GROUP BY cluster, node, condition_id, code, subject
),
counted AS (
  SELECT cluster, node, condition_id, code, subject, count(*) AS moments
  FROM sightings WHERE origin = 'events'
  GROUP BY cluster, node, condition_id, code, subject
),
every AS (
  SELECT
    lives.cluster, lives.node, lives.condition_id, lives.code, lives.subject, lives.check_name, lives.kind, lives.badness,
    lives.first_time, lives.last_time, lives.cleared_time, lives.cleared_by, lives.times, counted.moments,
    lives.observed, lives.history,
    'events' AS origin, CAST(NULL AS BIGINT) AS step_seconds
  FROM lives
  JOIN counted
    ON counted.cluster = lives.cluster AND counted.node = lives.node AND counted.code = lives.code
    AND counted.condition_id IS NOT DISTINCT FROM lives.condition_id
    AND counted.subject IS NOT DISTINCT FROM lives.subject
  UNION ALL
  SELECT
    cluster, node, CAST(NULL AS VARCHAR), code, subject, check_name, 'level',
    CASE severity WHEN 'critical' THEN 3 WHEN 'degraded' THEN 2 WHEN 'warning' THEN 1 WHEN 'info' THEN 0 END,
    first_time, last_time, CAST(NULL AS BIGINT), CAST(NULL AS VARCHAR), CAST(NULL AS BIGINT),
    CAST(
      1 + CASE WHEN last_time > first_time THEN 1 ELSE 0 END + CASE WHEN worst_time > first_time AND worst_time < last_time THEN 1 ELSE 0 END AS BIGINT
    ),
    observed, CAST(NULL AS BOOLEAN), 'scraped', step_seconds
  FROM scraped_conditions
)
SELECT
  every.node, every.code, every.subject,
  CASE every.badness WHEN 3 THEN 'critical' WHEN 2 THEN 'degraded' WHEN 1 THEN 'warning' WHEN 0 THEN 'info' END AS severity,
  every.kind, every.first_time, every.last_time, every.cleared_time, every.times, every.moments, every.cleared_by,
  every.origin, every.observed, every.history, every.step_seconds, every.check_name, every.condition_id, every.cluster
FROM every
CROSS JOIN parameters
WHERE every.first_time < parameters.to_time AND greatest(every.last_time, coalesce(every.cleared_time, every.last_time)) >= parameters.from_time
ORDER BY every.cluster, every.node, every.first_time, every.code, every.subject, every.condition_id, every.origin
