-- Days (by their beginning, UTC) on which a chosen node was observed for less than half of the time.

SELECT observed.cluster, observed.node, observed.day
FROM observed
JOIN chosen_nodes ON chosen_nodes.cluster = observed.cluster AND chosen_nodes.node = observed.node
WHERE observed.observed_seconds * 2 < observed.seconds
ORDER BY observed.cluster, observed.node, observed.day
