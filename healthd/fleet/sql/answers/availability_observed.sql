-- Times at which the chosen nodes were observed. Only times in `unread_times`, for which Slurm's node states were not read, are included, because all times would be too many spans.

SELECT
  observed_intervals.cluster, observed_intervals.node,
  greatest(observed_intervals.begin_time, unread_times.begin_time) AS begin_time,
  least(observed_intervals.end_time, unread_times.end_time) AS end_time
FROM observed_intervals
JOIN chosen_nodes ON chosen_nodes.cluster = observed_intervals.cluster AND chosen_nodes.node = observed_intervals.node
JOIN unread_times ON unread_times.cluster = observed_intervals.cluster
WHERE observed_intervals.begin_time < unread_times.end_time AND observed_intervals.end_time > unread_times.begin_time
ORDER BY observed_intervals.cluster, observed_intervals.node, begin_time, end_time
