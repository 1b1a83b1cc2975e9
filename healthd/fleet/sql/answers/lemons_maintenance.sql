-- Maintenance reservations that overlap (window_from, window_to).
--
-- parameters
--   window_from BIGINT = 0   seconds since the epoch
--   window_to BIGINT = 0

SELECT reservations.cluster, reservations.node, reservations.start_time, reservations.end_time
FROM reservations
CROSS JOIN parameters
WHERE reservations.maintenance AND reservations.node IS NOT NULL AND reservations.start_time < parameters.window_to
  AND coalesce(reservations.end_time, parameters.window_to) > parameters.window_from
ORDER BY reservations.cluster, reservations.node, reservations.start_time, reservations.end_time
