-- When the chosen nodes were observed, within `unread_times` (for which Slurm's node states were not read). Elsewhere there would be many spans.

SELECT
  observed_pieces.cluster, observed_pieces.node,
  greatest(observed_pieces.begin_time, unread_times.begin_time) AS begin_time,
  least(observed_pieces.end_time, unread_times.end_time) AS end_time
FROM observed_pieces
JOIN chosen_nodes ON chosen_nodes.cluster = observed_pieces.cluster AND chosen_nodes.node = observed_pieces.node
JOIN unread_times ON unread_times.cluster = observed_pieces.cluster
WHERE observed_pieces.begin_time < unread_times.end_time AND observed_pieces.end_time > unread_times.begin_time
ORDER BY observed_pieces.cluster, observed_pieces.node, begin_time, end_time
