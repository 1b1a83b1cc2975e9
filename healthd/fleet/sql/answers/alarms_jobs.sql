-- Number of chosen jobs that completed, and how many of these have known nodes.

WITH with_nodes AS (SELECT DISTINCT cluster, db_index FROM job_nodes)
SELECT count(*) AS completed, count(with_nodes.db_index) AS placed
FROM completed_jobs
LEFT JOIN with_nodes ON with_nodes.cluster = completed_jobs.cluster AND with_nodes.db_index = completed_jobs.db_index
