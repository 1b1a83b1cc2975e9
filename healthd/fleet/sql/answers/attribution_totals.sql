-- Number and loss of the chosen jobs that failed, by state and by how well their nodes were observed.

SELECT
  state, looked, count(*) AS jobs, CAST(sum(lost_gpu_seconds) AS BIGINT) AS lost_gpu_seconds
FROM attribution_failed
GROUP BY state, looked
ORDER BY state, looked
