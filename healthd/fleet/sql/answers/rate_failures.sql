-- The chosen jobs that nodes ended, each with the node that ended it. This is the node in `hardware_ends`; if there is none, the node that Slurm set down; if there is none, the job's only node.
--
-- parameters
--   more_than_gpus BIGINT = 128   r_f covers jobs with more GPUs
--   before_seconds BIGINT = 600   how long before the end Slurm may have set the node down
--   after_seconds BIGINT = 300   how long after it

WITH failed AS (
  SELECT
    ran.cluster, ran.db_index, ran.job_id, ran.gpus_up_to, ran.gpus, ran.start_time, ran.end_time, ends.ended,
    ends.node AS seen_node
  FROM rate_jobs AS ran
  JOIN hardware_ends AS ends ON ends.cluster = ran.cluster AND ends.db_index = ran.db_index
),
placed AS (
  SELECT failed.cluster, failed.db_index, failed.end_time, failed.seen_node, job_nodes.node
  FROM failed
  JOIN job_nodes ON job_nodes.cluster = failed.cluster AND job_nodes.db_index = failed.db_index
),
down AS (
  SELECT
    placed.cluster, placed.db_index, placed.node,
    row_number() OVER (
      PARTITION BY placed.cluster, placed.db_index
      ORDER BY abs(node_states.start_time - placed.end_time), placed.node
    ) AS place
  FROM placed
  CROSS JOIN parameters
  JOIN node_states ON node_states.cluster = placed.cluster AND node_states.node = placed.node
  WHERE placed.seen_node IS NULL AND node_states.state LIKE 'DOWN%'
    AND node_states.start_time BETWEEN placed.end_time - parameters.before_seconds AND placed.end_time + parameters.after_seconds
),
single AS (
  SELECT cluster, db_index, min(node) AS node FROM placed GROUP BY cluster, db_index HAVING count(*) = 1
)
SELECT
  failed.cluster, failed.db_index, failed.job_id, failed.ended, failed.gpus_up_to,
  failed.gpus > parameters.more_than_gpus AS large, failed.start_time, failed.end_time,
  coalesce(failed.seen_node, down.node, single.node) AS node
FROM failed
CROSS JOIN parameters
LEFT JOIN down ON down.cluster = failed.cluster AND down.db_index = failed.db_index AND down.place = 1
LEFT JOIN single ON single.cluster = failed.cluster AND single.db_index = failed.db_index
ORDER BY failed.cluster, failed.job_id, failed.end_time, failed.db_index
