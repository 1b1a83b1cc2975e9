-- The chosen nodes and their GPUs.
--
-- columns
--   nodes     number of nodes whose GPUs are known
--   without   number of nodes whose GPUs are unknown

SELECT
  cluster, CAST(coalesce(sum(gpus), 0) AS BIGINT) AS gpus, count(gpus) AS nodes, count(*) - count(gpus) AS without
FROM chosen_nodes
GROUP BY cluster
ORDER BY cluster
