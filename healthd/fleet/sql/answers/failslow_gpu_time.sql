-- GPU time of all jobs on the chosen nodes in [from_time, to_time), if Slurm recorded it. The unit is a thousandth of a GPU-second, so that all numbers are whole and their sum does not depend on the order.

WITH ran AS (
  SELECT
    1000 * job_nodes.gpus + 0.5e0 AS thousandths,
    greatest(job_nodes.start_time, parameters.from_time) AS begin_time,
    least(coalesce(job_nodes.end_time, jobs_known.known_until), parameters.to_time) AS end_time
  FROM job_nodes
  JOIN chosen_nodes ON chosen_nodes.cluster = job_nodes.cluster AND chosen_nodes.node = job_nodes.node
  JOIN jobs_known ON jobs_known.cluster = job_nodes.cluster
  CROSS JOIN parameters
  WHERE job_nodes.start_time < parameters.to_time
    AND coalesce(job_nodes.end_time, jobs_known.known_until) > greatest(parameters.from_time, job_nodes.start_time)
)
SELECT
  CAST(coalesce(sum(CAST(thousandths - thousandths % 1 AS BIGINT) * (end_time - begin_time)), 0) AS DOUBLE) AS thousandths
FROM ran
