-- Until when the jobs of each cluster are known.
--
-- A job without an end ran at that time; whether it runs on, nobody has read. It is the end of the latest time that an ingest of jobs read, or the latest time of a
-- job's row, where that is later: a file does not say when it was made.
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
