-- Moments at which a condition began or became worse, in the whole store and on all nodes.
--
-- An edge counts each time that it was seen. A level counts only when it began or became worse, as in the query `seen_with_failures`. Conditions that a user can forge, or that were logged before healthd's first start, are excluded.
--
-- columns
--   badness   0 info, 1 warning, 2 degraded, 3 critical; 2 and above drain
--   life      identifier of the condition

SELECT
  cluster, node, coalesce(check_name, regexp_extract(code, '^([^/]*)', 1)) AS check_name, code, subject, kind, time, origin,
  CASE severity WHEN 'critical' THEN 3 WHEN 'degraded' THEN 2 WHEN 'warning' THEN 1 ELSE 0 END AS badness,
  coalesce(condition_id, CAST(time AS VARCHAR)) AS life
FROM sightings
WHERE (kind = 'edge' OR what IN ('onset', 'growth'))
  AND NOT coalesce(observed, FALSE) AND NOT coalesce(history, FALSE)
  AND node IS NOT NULL AND code IS NOT NULL
