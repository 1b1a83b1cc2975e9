-- Running time of large jobs, and the number ended by their nodes.
--
-- The failure rate of jobs with more than more_than_gpus GPUs is failures / running time. Running time is the node-seconds of these jobs within [from_time, to_time), including suspended time. Failures are jobs that
-- ended in this period as NODE_FAIL, or as FAILED with a critical condition on one of their nodes (`seen_with_failures`). A job
-- without an end counts until it was last read (`jobs_known`), not until to_time, because it is unknown whether it still runs.
-- This is the paper's definition, with healthd's definition of "critical". The answer `rate` counts more jobs: those that FAILED with a degraded condition (a port that is down is
-- critical in the paper), and those that healthd requeued for a fault, which would otherwise have failed.
--
-- columns
--   node_seconds          nodes x seconds
--   jobs                  jobs that ran in that period
--   node_fails, failed_seen, failures   number of jobs that ended NODE_FAIL, number that FAILED with a critical condition, and the sum
--   failures_per_1000_node_days   empty if no job ran. With few failures, it is a rough estimate; the report gives the interval
-- parameters
--   more_than_gpus BIGINT = 128   jobs with more GPUs
-- source: r_f in Kokolis, Kuchnik et al. (HPCA 2025, arXiv 2410.21680)

WITH large AS (
  SELECT
    jobs.cluster, jobs.db_index, jobs.state, jobs.nodes, jobs.end_time, parameters.from_time, parameters.to_time,
    greatest(jobs.start_time, parameters.from_time) AS ran_from, least(coalesce(jobs.end_time, jobs_known.known_until), parameters.to_time) AS ran_to
  FROM jobs
  JOIN jobs_known ON jobs_known.cluster = jobs.cluster
  CROSS JOIN parameters
  WHERE jobs.gpus > parameters.more_than_gpus AND jobs.start_time < parameters.to_time AND coalesce(jobs.end_time, jobs_known.known_until) >= parameters.from_time
),
critical AS (
  SELECT DISTINCT cluster, db_index FROM seen_with_failures WHERE severity = 'critical'
),
summed AS (
  SELECT
    large.cluster, count(*) AS jobs, CAST(coalesce(sum(large.nodes * greatest(large.ran_to - large.ran_from, 0)), 0) AS BIGINT) AS node_seconds,
    count(CASE WHEN large.state = 'NODE_FAIL' AND large.end_time < large.to_time THEN 1 END) AS node_fails,
    count(CASE WHEN large.state = 'FAILED' AND large.end_time < large.to_time AND critical.db_index IS NOT NULL THEN 1 END) AS failed_seen
  FROM large
  LEFT JOIN critical ON critical.cluster = large.cluster AND critical.db_index = large.db_index
  GROUP BY large.cluster
)
SELECT
  cluster, jobs, node_seconds, node_fails, failed_seen, node_fails + failed_seen AS failures,
  (node_fails + failed_seen) * 864e5 / nullif(node_seconds, 0) AS failures_per_1000_node_days
FROM summed
ORDER BY cluster
