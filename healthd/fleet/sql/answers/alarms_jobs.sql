-- Number of chosen jobs that completed, and of those whose nodes are known.

WITH with_nodes AS (SELECT DISTINCT cluster, db_index FROM job_nodes)
SELECT count(*) AS completed, count(with_nodes.db_index) AS placed
FROM completed
LEFT JOIN with_nodes ON with_nodes.cluster = completed.cluster AND with_nodes.db_index = completed.db_index
