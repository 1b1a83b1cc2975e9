-- The chosen nodes: days out of service, days for which Slurm's node states were read, and observed days. Days for which the states were not read do not count as in service.

WITH told AS (
  SELECT
    sources_coverage.cluster, greatest(sources_coverage.from_time, parameters.from_time) AS from_time,
    least(sources_coverage.to_time, parameters.to_time) AS to_time
  FROM sources_coverage
  CROSS JOIN parameters
  WHERE sources_coverage.source = 'node_states' AND sources_coverage.to_time > parameters.from_time
),
known AS (SELECT cluster, sum(to_time - from_time) AS seconds FROM told GROUP BY cluster),
away AS (
  SELECT
    outage.cluster, outage.node,
    sum(greatest(
      least(coalesce(outage.end_time, told.to_time), told.to_time) - greatest(outage.start_time, told.from_time), 0
    )) AS seconds
  FROM out_of_service AS outage
  JOIN told ON told.cluster = outage.cluster
  WHERE outage.what = 'outage'
  GROUP BY outage.cluster, outage.node
),
seen AS (SELECT cluster, node, sum(observed_seconds) AS seconds FROM observed GROUP BY cluster, node)
SELECT
  chosen_nodes.cluster, chosen_nodes.node, coalesce(away.seconds, 0) / 86400e0 AS out_days,
  coalesce(known.seconds, 0) / 86400e0 AS known_days, coalesce(seen.seconds, 0) / 86400e0 AS observed_days
FROM chosen_nodes
LEFT JOIN known ON known.cluster = chosen_nodes.cluster
LEFT JOIN away ON away.cluster = chosen_nodes.cluster AND away.node = chosen_nodes.node
LEFT JOIN seen ON seen.cluster = chosen_nodes.cluster AND seen.node = chosen_nodes.node
ORDER BY chosen_nodes.cluster, chosen_nodes.node
