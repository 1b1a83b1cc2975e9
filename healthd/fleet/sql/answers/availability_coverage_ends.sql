-- Time until which node states and event streams were read. An outage without an end lasts until this time; the later state is unknown.

SELECT cluster, max(to_time) AS until
FROM ingests
WHERE source IN ('node_states', 'events') AND to_time IS NOT NULL
GROUP BY cluster
ORDER BY cluster
