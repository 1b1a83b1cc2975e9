-- Tickets that were opened in [window_from, window_to), and failures that another tool recorded then.
--
-- columns
--   kind    ticket | failure
--   code    kind of a failure
--   text    text of a ticket
-- parameters
--   window_from BIGINT = 0   seconds since the epoch
--   window_to BIGINT = 0

WITH noted AS (
  SELECT cluster, node, 'ticket' AS kind, opened_time AS time, 'ticket' AS code, coalesce(text, '') AS text
  FROM tickets
  UNION ALL
  SELECT cluster, node, 'failure', time, coalesce(kind, ''), ''
  FROM failures
)
SELECT noted.cluster, noted.node, noted.kind, noted.time, noted.code, noted.text
FROM noted
CROSS JOIN parameters
WHERE noted.node IS NOT NULL AND noted.time >= parameters.window_from AND noted.time < parameters.window_to
ORDER BY noted.cluster, noted.node, noted.kind, noted.time, noted.code, noted.text
