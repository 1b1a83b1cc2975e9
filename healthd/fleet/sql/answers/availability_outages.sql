-- Outages of the chosen nodes.
--
-- columns
--   first_state   Slurm's state at the beginning

SELECT
  out_of_service.cluster, out_of_service.node, out_of_service.by_whom, out_of_service.first_state,
  out_of_service.start_time, out_of_service.end_time
FROM out_of_service
JOIN chosen_nodes ON chosen_nodes.cluster = out_of_service.cluster AND chosen_nodes.node = out_of_service.node
WHERE out_of_service.what = 'outage'
ORDER BY out_of_service.cluster, out_of_service.node, out_of_service.start_time
