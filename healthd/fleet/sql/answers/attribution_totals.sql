-- How many of the chosen jobs failed, by state and how well their nodes were observed, and what they lost.

SELECT
  state, looked, count(*) AS jobs, CAST(sum(lost_gpu_seconds) AS BIGINT) AS lost_gpu_seconds
FROM attribution_failed
GROUP BY state, looked
ORDER BY state, looked
