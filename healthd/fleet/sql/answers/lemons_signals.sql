-- Signals of each chosen node in [window_from, window_to). The signals about failed jobs and outages are not included.
--
-- columns
--   cluster_nodes   nodes of its cluster, chosen or not
--   xids            distinct Xids that drain, by code and GPU
--   exclusions      jobs whose users excluded the node
--   single_jobs     jobs on one node that ended there
--   seconds, observed_seconds   length of the days in the window, and how long the node was observed on these days
-- parameters
--   window_from BIGINT = 0   seconds since the epoch
--   window_to BIGINT = 0
-- source: Kokolis, Kuchnik et al. (HPCA 2025, arXiv 2410.21680), its lemon signals

WITH sizes AS (SELECT cluster, count(*) AS nodes FROM all_nodes GROUP BY cluster),
different AS (
  SELECT DISTINCT sightings.cluster, sightings.node, sightings.code, coalesce(sightings.subject, '') AS subject
  FROM sightings
  CROSS JOIN parameters
  WHERE sightings.check_name = 'gpu_xid' AND sightings.severity IN ('degraded', 'critical')
    AND NOT coalesce(sightings.observed, FALSE) AND NOT coalesce(sightings.history, FALSE)
    AND sightings.time >= parameters.window_from AND sightings.time < parameters.window_to
),
xids AS (SELECT cluster, node, count(*) AS times FROM different GROUP BY cluster, node),
excluded AS (
  SELECT exclusions.cluster, exclusions.node, count(DISTINCT exclusions.job_id) AS jobs
  FROM exclusions
  CROSS JOIN parameters
  WHERE exclusions.submit_time >= parameters.window_from AND exclusions.submit_time < parameters.window_to
  GROUP BY exclusions.cluster, exclusions.node
),
opened AS (
  SELECT tickets.cluster, tickets.node, count(*) AS tickets
  FROM tickets
  CROSS JOIN parameters
  WHERE tickets.opened_time >= parameters.window_from AND tickets.opened_time < parameters.window_to
  GROUP BY tickets.cluster, tickets.node
),
single AS (
  SELECT job_nodes.cluster, job_nodes.node, count(*) AS jobs
  FROM job_nodes
  JOIN jobs ON jobs.cluster = job_nodes.cluster AND jobs.db_index = job_nodes.db_index
  CROSS JOIN parameters
  WHERE jobs.nodes = 1 AND jobs.start_time IS NOT NULL
    AND jobs.end_time >= parameters.window_from AND jobs.end_time < parameters.window_to
  GROUP BY job_nodes.cluster, job_nodes.node
),
watched AS (
  SELECT
    observed.cluster, observed.node, CAST(sum(observed.seconds) AS BIGINT) AS seconds,
    CAST(sum(observed.observed_seconds) AS BIGINT) AS observed_seconds
  FROM observed
  CROSS JOIN parameters
  WHERE observed.day >= parameters.window_from - 86399 AND observed.day < parameters.window_to
  GROUP BY observed.cluster, observed.node
)
SELECT
  chosen_nodes.cluster, chosen_nodes.node, sizes.nodes AS cluster_nodes, coalesce(xids.times, 0) AS xids,
  coalesce(excluded.jobs, 0) AS exclusions, coalesce(opened.tickets, 0) AS tickets,
  coalesce(single.jobs, 0) AS single_jobs, coalesce(watched.seconds, 0) AS seconds,
  coalesce(watched.observed_seconds, 0) AS observed_seconds
FROM chosen_nodes
JOIN sizes ON sizes.cluster = chosen_nodes.cluster
LEFT JOIN xids ON xids.cluster = chosen_nodes.cluster AND xids.node = chosen_nodes.node
LEFT JOIN excluded ON excluded.cluster = chosen_nodes.cluster AND excluded.node = chosen_nodes.node
LEFT JOIN opened ON opened.cluster = chosen_nodes.cluster AND opened.node = chosen_nodes.node
LEFT JOIN single ON single.cluster = chosen_nodes.cluster AND single.node = chosen_nodes.node
LEFT JOIN watched ON watched.cluster = chosen_nodes.cluster AND watched.node = chosen_nodes.node
ORDER BY chosen_nodes.cluster, chosen_nodes.node
