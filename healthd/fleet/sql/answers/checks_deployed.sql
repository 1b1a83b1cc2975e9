-- When each check was first configured on the chosen nodes (this may be before from_time), and how often it was changed and disabled since from_time.

SELECT
  events.check_name, min(coalesce(events.since_time, events.time)) AS since_time,
  count(CASE WHEN events.event = 'check_changed' AND events.time >= parameters.from_time THEN 1 END) AS changes,
  count(CASE WHEN events.event = 'check_disabled' AND events.time >= parameters.from_time THEN 1 END) AS disabled
FROM events
JOIN chosen_nodes ON chosen_nodes.cluster = events.cluster AND chosen_nodes.node = events.node
CROSS JOIN parameters
WHERE events.event IN ('check_enabled', 'check_changed', 'check_disabled')
  AND events.time < parameters.to_time AND events.check_name IS NOT NULL
GROUP BY events.check_name
ORDER BY events.check_name
