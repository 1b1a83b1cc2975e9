-- Nodes of each job that ended in [from_time, to_time), with a row for each day of its run. The days are time bins for cheap joins. Most jobs have one day.
--
-- For a job that began more than 366 days before from_time, earlier days are left out.
--
-- columns
--   day   start of the day, UTC

SELECT
  job_nodes.cluster, job_nodes.db_index, job_nodes.node, job_nodes.start_time, job_nodes.end_time,
  job_nodes.end_time - job_nodes.end_time % 86400 AS day
FROM job_nodes
CROSS JOIN parameters
WHERE job_nodes.end_time >= parameters.from_time AND job_nodes.end_time < parameters.to_time
  AND job_nodes.start_time <= job_nodes.end_time
  AND job_nodes.start_time - job_nodes.start_time % 86400 = job_nodes.end_time - job_nodes.end_time % 86400
UNION ALL
SELECT days.cluster, days.db_index, days.node, days.start_time, days.end_time, days.first_day + numbers.n * 86400 AS day
FROM (
  SELECT
    job_nodes.cluster, job_nodes.db_index, job_nodes.node, job_nodes.start_time, job_nodes.end_time,
    greatest(job_nodes.start_time, parameters.from_time - 366 * 86400)
      - greatest(job_nodes.start_time, parameters.from_time - 366 * 86400) % 86400 AS first_day
  FROM job_nodes
  CROSS JOIN parameters
  WHERE job_nodes.end_time >= parameters.from_time AND job_nodes.end_time < parameters.to_time
    AND job_nodes.start_time - job_nodes.start_time % 86400 < job_nodes.end_time - job_nodes.end_time % 86400
) AS days
CROSS JOIN numbers
WHERE numbers.n <= (days.end_time - days.first_day) / 86400e0
