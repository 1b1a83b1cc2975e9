-- Number of jobs whose excluded nodes are known.
--
-- Counts jobs submitted in [from_time, to_time). Each job_id counts once, because a requeue keeps the exclusions. For jobs that are not covered, exclusions are unknown: a node that no job seems to exclude may be excluded by all of them.
--
-- columns
--   jobs             jobs that were submitted
--   known            jobs whose submit line, script or squeue entry could be read, or that name an excluded node
--   excluding        jobs that exclude at least one node
--   excluded_nodes   distinct nodes that jobs exclude
--   share_known      known / jobs
-- source: excl_jobid_count in Kokolis, Kuchnik et al. (HPCA 2025, arXiv 2410.21680), which predicted failing nodes poorly

WITH named AS (
  SELECT exclusions.cluster, exclusions.job_id, count(DISTINCT exclusions.node) AS nodes
  FROM exclusions
  WHERE exclusions.job_id IS NOT NULL AND exclusions.node IS NOT NULL
  GROUP BY exclusions.cluster, exclusions.job_id
),
submitted AS (
  SELECT jobs.cluster, jobs.job_id, max(CASE WHEN jobs.exclusions_known THEN 1 ELSE 0 END) AS looked_at
  FROM jobs
  CROSS JOIN parameters
  WHERE jobs.submit_time >= parameters.from_time AND jobs.submit_time < parameters.to_time
  GROUP BY jobs.cluster, jobs.job_id
),
counted AS (
  SELECT
    submitted.cluster, count(*) AS jobs, count(CASE WHEN submitted.looked_at = 1 OR named.job_id IS NOT NULL THEN 1 END) AS known,
    count(named.job_id) AS excluding
  FROM submitted
  LEFT JOIN named ON named.cluster = submitted.cluster AND named.job_id = submitted.job_id
  GROUP BY submitted.cluster
),
unwanted AS (
  SELECT exclusions.cluster, count(DISTINCT exclusions.node) AS excluded_nodes
  FROM exclusions
  JOIN submitted ON submitted.cluster = exclusions.cluster AND submitted.job_id = exclusions.job_id
  GROUP BY exclusions.cluster
)
SELECT
  counted.cluster, counted.jobs, counted.known, counted.excluding, coalesce(unwanted.excluded_nodes, 0) AS excluded_nodes,
  counted.known * 1e0 / nullif(counted.jobs, 0) AS share_known
FROM counted
LEFT JOIN unwanted ON unwanted.cluster = counted.cluster
ORDER BY counted.cluster
