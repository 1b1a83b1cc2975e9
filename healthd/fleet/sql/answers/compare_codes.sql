-- Number of sightings of each draining code on the chosen nodes. Sightings of a code on the same node within an hour are counted once.

WITH drains AS (
  SELECT
    evidence.cluster, evidence.node, evidence.code, evidence.time,
    lag(evidence.time) OVER (
      PARTITION BY evidence.cluster, evidence.node, evidence.code ORDER BY evidence.time
    ) AS before
  FROM evidence
  JOIN chosen_nodes ON chosen_nodes.cluster = evidence.cluster AND chosen_nodes.node = evidence.node
  CROSS JOIN parameters
  WHERE evidence.badness >= 2 AND evidence.time >= parameters.from_time AND evidence.time < parameters.to_time
)
SELECT code, cluster, node, count(*) AS times
FROM drains
WHERE before IS NULL OR time > before + 3600
GROUP BY code, cluster, node
ORDER BY code, cluster, node
