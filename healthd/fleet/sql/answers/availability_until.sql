-- Until when node states or event streams were read: a time out that has no end yet lasts until then. What became of the node later is not known.

SELECT cluster, max(to_time) AS until
FROM ingests
WHERE source IN ('node_states', 'events') AND to_time IS NOT NULL
GROUP BY cluster
ORDER BY cluster
