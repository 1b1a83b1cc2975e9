-- Outages of the chosen nodes, and their origin.

SELECT
  out_of_service.cluster, out_of_service.node, out_of_service.start_time, out_of_service.end_time,
  out_of_service.by_whom
FROM out_of_service
JOIN chosen_nodes ON chosen_nodes.cluster = out_of_service.cluster AND chosen_nodes.node = out_of_service.node
WHERE out_of_service.what = 'outage'
ORDER BY out_of_service.cluster, out_of_service.node, out_of_service.start_time
