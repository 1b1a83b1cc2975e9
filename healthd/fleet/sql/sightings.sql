-- Moments at which a condition began, became worse or was only seen again.
--
-- Each line of healthd's events gives a first and a last sighting. Prometheus gives the first and last scrape that showed the condition. If several lines describe
-- the same moment, the line with the worst severity is used among those for which this moment is the last sighting, because a line has the severity of its last sighting. If there is no such line, the earliest line is used. Sources that a user can forge count only if there is no other source. Not limited to the requested period.
--
-- columns
--   time        time of the sighting, epoch seconds
--   what        onset | growth (worse than ever before) | seen; always seen for history
--   origin      events | scraped
--   kind        edge (the problem happened at this moment) | level (each run of the check finds the problem); level for scraped conditions
--   observed    true if only a source that a user can forge reports it (or the row is older than this column)
--   history     true if it was logged before healthd's first start on the node; empty for scraped conditions
-- source: docs/events.md, "The condition"

WITH told AS (
  SELECT
    cluster, node, 'events' AS origin, condition_id, check_name, code, subject, severity, kind,
    coalesce(first_time, time) AS time, 2 AS strength, time AS told_time, stream_id, seq, CAST(NULL AS BIGINT) AS badness,
    coalesce(observed, TRUE) AS observed, coalesce(history, FALSE) AS history
  FROM lines WHERE event IN ('opened', 'seen_again', 'worsened', 'acknowledged', 'cleared') AND code IS NOT NULL
  UNION ALL
  SELECT
    cluster, node, 'events', condition_id, check_name, code, subject, severity, kind,
    coalesce(last_time, time), CASE WHEN event = 'worsened' THEN 1 ELSE 0 END, time, stream_id, seq,
    CASE severity WHEN 'critical' THEN 3 WHEN 'degraded' THEN 2 WHEN 'warning' THEN 1 WHEN 'info' THEN 0 END,
    coalesce(observed, TRUE), coalesce(history, FALSE)
  FROM lines WHERE event IN ('opened', 'seen_again', 'worsened', 'acknowledged', 'cleared') AND code IS NOT NULL
  UNION ALL
  SELECT cluster, node, 'scraped', CAST(NULL AS VARCHAR), check_name, code, subject, coalesce(first_severity, severity), 'level', first_time, 2, first_time, severity, 0,
    CASE coalesce(first_severity, severity) WHEN 'critical' THEN 3 WHEN 'degraded' THEN 2 WHEN 'warning' THEN 1 WHEN 'info' THEN 0 END,
    observed, CAST(NULL AS BOOLEAN)
  FROM scraped_conditions
  UNION ALL
  SELECT cluster, node, 'scraped', CAST(NULL AS VARCHAR), check_name, code, subject, severity, 'level', worst_time, 1, worst_time, severity, 0,
    CASE severity WHEN 'critical' THEN 3 WHEN 'degraded' THEN 2 WHEN 'warning' THEN 1 WHEN 'info' THEN 0 END,
    observed, CAST(NULL AS BOOLEAN)
  FROM scraped_conditions WHERE worst_time > first_time
  UNION ALL
  SELECT cluster, node, 'scraped', CAST(NULL AS VARCHAR), check_name, code, subject, severity, 'level', last_time, 0, last_time, severity, 0,
    CASE severity WHEN 'critical' THEN 3 WHEN 'degraded' THEN 2 WHEN 'warning' THEN 1 WHEN 'info' THEN 0 END,
    observed, CAST(NULL AS BOOLEAN)
  FROM scraped_conditions
),
ranked AS (
  SELECT
    cluster, node, origin, condition_id, check_name, code, subject, severity, kind, time, observed,
    max(strength) OVER (PARTITION BY cluster, node, origin, condition_id, code, subject, time) AS strongest,
    max(CASE WHEN history THEN 1 WHEN NOT history THEN 0 END) OVER (PARTITION BY cluster, node, origin, condition_id, code, subject, time) AS oldest,
    row_number() OVER (
      PARTITION BY cluster, node, origin, condition_id, code, subject, time
      ORDER BY CASE WHEN observed = FALSE THEN 0 ELSE 1 END, badness DESC NULLS LAST, told_time, stream_id, seq, strength, severity, check_name, kind
    ) AS place
  FROM told
)
SELECT
  cluster, node, origin, condition_id, check_name, code, subject, severity, kind, time,
  CASE WHEN oldest = 1 THEN 'seen' WHEN strongest = 2 THEN 'onset' WHEN strongest = 1 THEN 'growth' ELSE 'seen' END AS what,
  observed, oldest = 1 AS history
FROM ranked
WHERE place = 1
