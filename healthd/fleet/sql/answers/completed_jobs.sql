-- The chosen jobs that completed in [from_time, to_time).

SELECT jobs.cluster, jobs.db_index, jobs.end_time
FROM chosen_jobs AS jobs
CROSS JOIN parameters
WHERE jobs.state = 'COMPLETED' AND jobs.end_time >= parameters.from_time AND jobs.end_time < parameters.to_time
