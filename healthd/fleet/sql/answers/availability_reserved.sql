-- Reservations of the chosen nodes.

SELECT
  reservations.cluster, reservations.node, reservations.name,
  coalesce(reservations.maintenance, FALSE) AS maintenance, reservations.start_time, reservations.end_time
FROM reservations
JOIN chosen_nodes ON chosen_nodes.cluster = reservations.cluster AND chosen_nodes.node = reservations.node
WHERE reservations.start_time IS NOT NULL
ORDER BY
  reservations.cluster, reservations.node, reservations.start_time, reservations.name, reservations.end_time
