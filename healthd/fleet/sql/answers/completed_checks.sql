-- Checks that completed on the chosen nodes. Each row is a list of checks from a node's first `alive` line of a day, with the number of days on which the node had this list.
--
-- columns
--   checks   as in the line: names in double quotes, separated by commas

WITH alive AS (
  SELECT
    events.cluster, events.node, events.time, regexp_extract(events.rest, '"checks": *.([^]]*)[]]', 1) AS checks,
    row_number() OVER (
      PARTITION BY events.cluster, events.node, events.time - events.time % 86400
      ORDER BY events.time, events.stream_id, events.seq
    ) AS place
  FROM events
  JOIN chosen_nodes ON chosen_nodes.cluster = events.cluster AND chosen_nodes.node = events.node
  CROSS JOIN parameters
  WHERE events.event = 'alive' AND events.rest IS NOT NULL
    AND events.time >= parameters.from_time AND events.time < parameters.to_time
)
SELECT cluster, node, checks, count(*) AS node_days, min(time) AS first_time
FROM alive
WHERE place = 1 AND checks <> ''
GROUP BY cluster, node, checks
ORDER BY cluster, node, checks
