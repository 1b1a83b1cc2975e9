-- Periods in which a level was failing: docs/events.md, "it was there from `first` to `last`".

SELECT
  cluster, node, coalesce(min(check_name), regexp_extract(code, '^([^/]*)', 1)) AS check_name, code, subject,
  condition_id AS life, min(time) AS from_time, max(time) AS to_time
FROM sightings
WHERE origin = 'events' AND kind = 'level' AND severity IN ('degraded', 'critical')
  AND NOT coalesce(observed, FALSE) AND NOT coalesce(history, FALSE) AND node IS NOT NULL AND code IS NOT NULL
GROUP BY cluster, node, code, subject, condition_id
UNION ALL
SELECT
  cluster, node, coalesce(check_name, regexp_extract(code, '^([^/]*)', 1)) AS check_name, code, subject,
  CAST(first_time AS VARCHAR) AS life, coalesce(worst_time, first_time) AS from_time,
  greatest(first_time, last_time) AS to_time
FROM scraped_conditions
WHERE severity IN ('degraded', 'critical') AND NOT coalesce(observed, FALSE) AND node IS NOT NULL AND code IS NOT NULL
