-- Number of completed jobs that ran on a node on a day for less than half of which the node was observed, and how many of these jobs saw a check begin to fail.

WITH met AS (
  SELECT DISTINCT job_node_days.cluster, job_node_days.db_index
  FROM job_node_days
  JOIN observed
    ON observed.cluster = job_node_days.cluster AND observed.node = job_node_days.node AND observed.day = job_node_days.day
  WHERE observed.observed_seconds * 2 < observed.seconds
),
saw AS (SELECT DISTINCT cluster, db_index FROM alarmed_jobs WHERE failing AND began)
SELECT count(*) AS jobs, count(saw.db_index) AS alarmed
FROM completed_jobs
JOIN met ON met.cluster = completed_jobs.cluster AND met.db_index = completed_jobs.db_index
LEFT JOIN saw ON saw.cluster = completed_jobs.cluster AND saw.db_index = completed_jobs.db_index
