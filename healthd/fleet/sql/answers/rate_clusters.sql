-- The clusters of the chosen jobs.

SELECT DISTINCT cluster
FROM chosen_jobs
ORDER BY cluster
