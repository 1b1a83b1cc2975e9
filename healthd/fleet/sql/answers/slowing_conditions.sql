-- Findings of the `named_checks` on the `named_nodes` that can slow a job. Findings that a user can forge, or that were logged before healthd's first start, are excluded.
--
-- columns
--   message    the newest message of the condition
--   end_time   empty if the condition is open. An edge is assumed to slow a job for before_seconds. A scraped condition ends with its last scrape.
-- parameters
--   before_seconds BIGINT = 600   how long an edge may slow a job

WITH messages AS (
  SELECT
    events.node, events.condition_id, events.message,
    row_number() OVER (
      PARTITION BY events.node, events.condition_id
      ORDER BY events.time DESC, events.seq DESC, events.stream_id, events.message
    ) AS place
  FROM events
  JOIN named_nodes ON named_nodes.node = events.node
  WHERE events.message IS NOT NULL AND events.condition_id IS NOT NULL
)
SELECT
  conditions.node, conditions.code, conditions.subject, messages.message, conditions.first_time,
  -- If a clock was set back, the end may be earlier than the beginning.
  CASE
    WHEN conditions.kind = 'edge' THEN greatest(conditions.last_time, conditions.first_time) + parameters.before_seconds
    WHEN conditions.cleared_time IS NOT NULL THEN greatest(conditions.cleared_time, conditions.first_time)
    WHEN conditions.origin = 'scraped' THEN conditions.last_time
  END AS end_time
FROM conditions
JOIN chosen_nodes ON chosen_nodes.cluster = conditions.cluster AND chosen_nodes.node = conditions.node
JOIN named_nodes ON named_nodes.node = conditions.node
JOIN named_checks ON named_checks.check_name = conditions.check_name
CROSS JOIN parameters
LEFT JOIN messages
  ON messages.node = conditions.node AND messages.condition_id = conditions.condition_id AND messages.place = 1
WHERE conditions.severity <> 'info' AND NOT coalesce(conditions.observed, FALSE)
  AND NOT coalesce(conditions.history, FALSE)
ORDER BY conditions.node, conditions.first_time, conditions.code, conditions.subject, end_time
