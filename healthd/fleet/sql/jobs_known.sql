-- Time up to which each cluster's jobs are known.
--
-- A job without an end was running at this time; it is unknown whether it still runs. The time is the end of the latest period that an ingest of jobs read. If a job's row has a later time, that time
-- is used, because a file does not contain the time at which it was written.
--
-- columns
--   known_until   epoch seconds
-- source: docs/fleet.md

WITH told AS (
  SELECT cluster, max(to_time) AS until FROM ingests WHERE source IN ('sacct', 'jobs_file') GROUP BY cluster
  UNION ALL
  SELECT cluster, max(coalesce(end_time, start_time, submit_time)) FROM jobs GROUP BY cluster
)
SELECT cluster, max(until) AS known_until
FROM told
WHERE until IS NOT NULL
GROUP BY cluster
ORDER BY cluster
