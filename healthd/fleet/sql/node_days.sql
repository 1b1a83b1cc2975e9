-- How much the large jobs ran, and how often they failed by their nodes.
--
-- The two sides of a failure rate. Jobs of more than more_than_gpus GPUs. What they ran is the node-seconds between start and end that lie in [from_time, to_time), also of jobs that still ran when they were last read (`jobs_known`). What failed is the jobs that
-- ended in that time as NODE_FAIL, or as FAILED with a critical condition seen on a node of theirs (`seen_with_failures`). The time that a job was suspended is in it. A job
-- without an end ran until then, not until to_time: nobody has read whether it runs on.
-- These are the paper's words, with what healthd calls critical. The answer `rate` counts more: FAILED beside what healthd calls degraded too (a port that is down is
-- critical in the paper), and the jobs that healthd requeued for a fault, which would have failed had it not acted.
--
-- columns
--   node_seconds          nodes x seconds
--   jobs                  that ran in that time
--   node_fails, failed_seen, failures   NODE_FAIL, FAILED with a critical condition, both
--   failures_per_1000_node_days   empty where nothing ran. A few failures make it no more than a guess: the report gives the interval
-- parameters
--   more_than_gpus BIGINT = 128   jobs of more GPUs than that
-- source: r_f of Kokolis, Kuchnik et al. (HPCA 2025, arXiv 2410.21680)

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
