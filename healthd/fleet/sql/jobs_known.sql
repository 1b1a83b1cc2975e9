-- Until when the jobs of each cluster are known.
--
-- A job without an end ran at that time; whether it still runs was not read. It is the end of the latest period that an ingest of jobs read, or the latest time in a
-- job's row if that is later: a file does not contain the time it was made.
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
