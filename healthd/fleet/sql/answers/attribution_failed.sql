-- The chosen jobs that ended FAILED or NODE_FAIL in [from_time, to_time), their loss, and whether their nodes were observed around the end.
--
-- columns
--   looked             observed (all nodes were, from before_seconds before the end until after_seconds after it) | not_observed | no_node_list
--   gpu_seconds        GPU time of the whole runtime
--   lost_gpu_seconds   GPU time of at most half an hour: the mean work since the last hourly checkpoint, as in the paper's rule for goodput
--   place              rank by loss, largest first
-- parameters
--   before_seconds BIGINT = 600   how long before the end
--   after_seconds BIGINT = 300   how long after it
-- source: Kokolis, Kuchnik et al. (HPCA 2025, arXiv 2410.21680)

WITH marked AS (
  SELECT
    cluster, node, begin_time, end_time,
    CASE WHEN begin_time <= lag(end_time) OVER (PARTITION BY cluster, node ORDER BY begin_time) THEN 0 ELSE 1 END AS apart
  FROM observed_intervals
),
numbered AS (
  SELECT
    cluster, node, begin_time, end_time,
    sum(apart) OVER (
      PARTITION BY cluster, node ORDER BY begin_time ROWS BETWEEN UNBOUNDED PRECEDING AND CURRENT ROW
    ) AS spell
  FROM marked
),
failed AS (
  SELECT
    jobs.cluster, jobs.db_index, jobs.state, jobs.end_time, CAST(coalesce(jobs.gpus, 0) AS BIGINT) AS gpus,
    greatest(coalesce(jobs.end_time - jobs.start_time, 0), 0) AS runtime,
    jobs.end_time - parameters.before_seconds AS window_begin, jobs.end_time + parameters.after_seconds AS window_end
  FROM chosen_jobs AS jobs
  CROSS JOIN parameters
  WHERE jobs.state IN ('FAILED', 'NODE_FAIL') AND jobs.end_time >= parameters.from_time AND jobs.end_time < parameters.to_time
),
timeline AS (
  SELECT
    cluster, node, min(begin_time) AS time, 0 AS of_job, max(end_time) AS end_time, CAST(NULL AS BIGINT) AS db_index,
    CAST(NULL AS BIGINT) AS window_end
  FROM numbered
  GROUP BY cluster, node, spell
  UNION ALL
  SELECT
    failed.cluster, job_nodes.node, failed.window_begin, 1, CAST(NULL AS BIGINT), failed.db_index, failed.window_end
  FROM failed
  JOIN job_nodes ON job_nodes.cluster = failed.cluster AND job_nodes.db_index = failed.db_index
),
-- For each window, the latest end of the observation spans that began before it.
followed AS (
  SELECT
    cluster, db_index, of_job, window_end,
    max(end_time) OVER (
      PARTITION BY cluster, node ORDER BY time, of_job ROWS BETWEEN UNBOUNDED PRECEDING AND CURRENT ROW
    ) AS observed_until
  FROM timeline
),
watched AS (
  SELECT cluster, db_index, min(CASE WHEN window_end <= observed_until THEN 1 ELSE 0 END) AS whole
  FROM followed
  WHERE of_job = 1
  GROUP BY cluster, db_index
),
lost AS (
  SELECT
    failed.cluster, failed.db_index, failed.state, failed.end_time, failed.gpus,
    CASE watched.whole WHEN 1 THEN 'observed' WHEN 0 THEN 'not_observed' ELSE 'no_node_list' END AS looked,
    failed.runtime * failed.gpus AS gpu_seconds, least(failed.runtime, 1800) * failed.gpus AS lost_gpu_seconds
  FROM failed
  LEFT JOIN watched ON watched.cluster = failed.cluster AND watched.db_index = failed.db_index
)
SELECT
  cluster, db_index, state, end_time, gpus, looked, gpu_seconds, lost_gpu_seconds,
  row_number() OVER (ORDER BY lost_gpu_seconds DESC, end_time, cluster, db_index) AS place
FROM lost
