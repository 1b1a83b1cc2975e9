-- The moments at which something on a node began or became worse, of the whole store and of all nodes.
--
-- An edge when it was seen, a level at its onset and its growth, as in the question `seen_with_failures`. What a user can forge and what was in the log before healthd's first start is no evidence.
--
-- columns
--   badness   0 info, 1 warning, 2 degraded, 3 critical; 2 and more drains
--   life      the condition that it is of

SELECT
  cluster, node, coalesce(check_name, regexp_extract(code, '^([^/]*)', 1)) AS check_name, code, subject, kind, time, origin,
  CASE severity WHEN 'critical' THEN 3 WHEN 'degraded' THEN 2 WHEN 'warning' THEN 1 ELSE 0 END AS badness,
  coalesce(condition_id, CAST(time AS VARCHAR)) AS life
FROM sightings
WHERE (kind = 'edge' OR what IN ('onset', 'growth'))
  AND NOT coalesce(observed, FALSE) AND NOT coalesce(history, FALSE)
  AND node IS NOT NULL AND code IS NOT NULL
