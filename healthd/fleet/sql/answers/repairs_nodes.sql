-- Time of the last line of each chosen node. After this time, it is unknown whether a fault returned.

SELECT lines.cluster, lines.node, max(lines.time) AS until
FROM lines
JOIN chosen_nodes ON chosen_nodes.cluster = lines.cluster AND chosen_nodes.node = lines.node
GROUP BY lines.cluster, lines.node
ORDER BY lines.cluster, lines.node
