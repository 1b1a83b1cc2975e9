-- Periods for which jobs were read.

SELECT cluster, from_time, to_time
FROM sources_coverage
WHERE source IN ('sacct', 'jobs_file') AND from_time IS NOT NULL AND to_time IS NOT NULL
ORDER BY cluster, from_time, to_time
