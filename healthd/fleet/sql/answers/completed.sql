-- The chosen jobs that completed in [from_time, to_time).

SELECT jobs.cluster, jobs.db_index, jobs.end_time
FROM chosen_jobs AS jobs
CROSS JOIN asked
WHERE jobs.state = 'COMPLETED' AND jobs.end_time >= asked.from_time AND jobs.end_time < asked.to_time
