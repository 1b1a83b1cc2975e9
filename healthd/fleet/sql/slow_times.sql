-- Periods in which a node reported a slow job, with the slowdown.
--
-- Contains spans of the conditions failslow/... within [from_time, to_time). A line has the slowdown at its last sighting. Its span therefore ends at this sighting. The span begins at the previous sighting, or at the onset if the onset is later (another job).
-- The time between the last sighting and the end of the condition is not counted as slow. Two conditions on a node may describe the same slowness; their spans then overlap. A scraped condition (Prometheus) is one span without numbers.
--
-- columns
--   begin_time, end_time   epoch seconds
--   slowdown       how much longer an iteration took than before (0.26 is 26 %); empty if not reported
--   jobs           the slow jobs, ids separated by blanks; empty if not reported
--   origin         events | scraped
-- source: docs/events.md, slowdown and onset

WITH told AS (
  SELECT
    cluster, node, condition_id, code, subject, stream_time, stream_id, seq, slowdown, jobs,
    coalesce(onset_time, first_time, time) AS onset, coalesce(last_time, time) AS last_seen
  FROM lines
  WHERE event IN ('opened', 'seen_again', 'worsened', 'acknowledged', 'cleared') AND code LIKE 'failslow/%'
    AND NOT coalesce(observed, FALSE)
),
followed AS (
  SELECT
    cluster, node, condition_id, code, subject, slowdown, jobs, onset, last_seen,
    max(last_seen) OVER (
      PARTITION BY cluster, node, condition_id, code, subject ORDER BY stream_time, stream_id, seq
      ROWS BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING
    ) AS seen_before
  FROM told
),
stretches AS (
  SELECT
    cluster, node, condition_id, code, subject, greatest(onset, coalesce(seen_before, onset)) AS begin_time,
    last_seen AS end_time, slowdown, jobs, 'events' AS origin
  FROM followed
  UNION ALL
  SELECT
    cluster, node, CAST(NULL AS VARCHAR), code, subject, first_time, last_time, CAST(NULL AS DOUBLE), CAST(NULL AS VARCHAR),
    'scraped'
  FROM scraped_conditions WHERE code LIKE 'failslow/%'
)
SELECT
  stretches.node, stretches.code, stretches.subject, greatest(stretches.begin_time, parameters.from_time) AS begin_time,
  least(stretches.end_time, parameters.to_time) AS end_time, stretches.slowdown, stretches.jobs, stretches.origin,
  stretches.condition_id, stretches.cluster
FROM stretches
CROSS JOIN parameters
WHERE least(stretches.end_time, parameters.to_time) > greatest(stretches.begin_time, parameters.from_time)
ORDER BY stretches.cluster, stretches.node, begin_time, stretches.code, stretches.subject, stretches.condition_id, end_time, stretches.origin
