-- Dates on which checks were enabled, disabled or changed. Included are changes on at least the share `rolled_out` of the chosen nodes that reported any change.
--
-- columns
--   time   the median over the nodes of the first date of the change
-- parameters
--   rolled_out DOUBLE = 0.1   share of these nodes in the cluster

WITH changes AS (
  SELECT
    lines.cluster, lines.node, lines.event, events.check_name, coalesce(events.version, '') AS version,
    coalesce(events.rest, '') AS settings, min(lines.time) AS time
  FROM lines
  JOIN events ON events.node = lines.node AND events.stream_id = lines.stream_id AND events.seq = lines.seq
  JOIN chosen_nodes ON chosen_nodes.cluster = lines.cluster AND chosen_nodes.node = lines.node
  WHERE lines.event IN ('check_enabled', 'check_changed', 'check_disabled') AND events.check_name IS NOT NULL
  GROUP BY
    lines.cluster, lines.node, lines.event, events.check_name, coalesce(events.version, ''), coalesce(events.rest, '')
),
reporting AS (SELECT cluster, count(DISTINCT node) AS nodes FROM changes GROUP BY cluster),
-- A node has one row in each group, so the number of rows in a group is its number of nodes.
ranked AS (
  SELECT
    cluster, event, check_name, version, settings, time,
    row_number() OVER (PARTITION BY cluster, event, check_name, version, settings ORDER BY time, node) AS place,
    count(*) OVER (PARTITION BY cluster, event, check_name, version, settings) AS nodes
  FROM changes
),
dated AS (
  SELECT
    cluster, event, check_name, version, settings, min(time) AS first_time, max(time) AS last_time,
    max(nodes) AS nodes, min(CASE WHEN 2 * place BETWEEN nodes AND nodes + 2 THEN time END) AS earlier,
    max(CASE WHEN 2 * place BETWEEN nodes AND nodes + 2 THEN time END) AS later
  FROM ranked
  GROUP BY cluster, event, check_name, version, settings
),
middle AS (
  SELECT
    cluster, event, check_name, version, settings, first_time, last_time, nodes,
    CAST((earlier + later - (earlier + later) % 2) / 2 AS BIGINT) AS time
  FROM dated
)
SELECT
  middle.cluster, middle.check_name AS check, middle.event, middle.version, middle.time, middle.first_time, middle.last_time,
  middle.nodes
FROM middle
JOIN reporting ON reporting.cluster = middle.cluster
CROSS JOIN parameters
WHERE middle.nodes >= parameters.rolled_out * reporting.nodes
  AND middle.time >= parameters.from_time AND middle.time < parameters.to_time
ORDER BY middle.time, middle.cluster, middle.check_name, middle.event, middle.version, middle.settings
