-- Rows of `slow_times`: when the chosen nodes reported slow jobs, the slowdown and the jobs.

SELECT
  slow_times.cluster, slow_times.node, slow_times.begin_time, slow_times.end_time, slow_times.slowdown, slow_times.jobs
FROM slow_times
JOIN chosen_nodes ON chosen_nodes.cluster = slow_times.cluster AND chosen_nodes.node = slow_times.node
ORDER BY
  slow_times.cluster, slow_times.node, slow_times.begin_time, slow_times.end_time, slow_times.slowdown, slow_times.jobs
