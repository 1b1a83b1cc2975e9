-- The chosen nodes and their GPUs.
--
-- columns
--   nodes     those whose GPUs are known
--   without   those whose GPUs are not known

SELECT
  cluster, CAST(coalesce(sum(gpus), 0) AS BIGINT) AS gpus, count(gpus) AS nodes, count(*) - count(gpus) AS without
FROM chosen_nodes
GROUP BY cluster
ORDER BY cluster
