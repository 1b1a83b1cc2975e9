-- Periods that were read from each source.
--
-- A query about any other period has no answer. Periods of the same source are merged if they overlap or touch. Contains periods that overlap [from_time, to_time), and rows without a period (a list of nodes). A file covers the time from its first to its last time. Event streams cover, for each ingest, the time from the first to the last new line. It is unknown whether earlier and later times were read.
--
-- columns
--   from_time, to_time   the period, which has no gap; empty if there is none
--   names                number of files, sacct days, sacctmgr periods, event-stream ingests or servers
--   rows_read, rows_unread   lines that became rows, and lines that could not be read
--   read_time            time of the newest ingest
-- source: docs/fleet.md

WITH followed AS (
  SELECT
    cluster, source, name, from_time, to_time, read_time, rows_read, rows_unread,
    max(to_time) OVER (
      PARTITION BY cluster, source ORDER BY from_time NULLS FIRST, to_time NULLS FIRST, name
      ROWS BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING
    ) AS read_before
  FROM ingests
),
islands AS (
  SELECT
    cluster, source, name, from_time, to_time, read_time, rows_read, rows_unread,
    sum(CASE WHEN from_time IS NOT NULL AND (read_before IS NULL OR from_time > read_before) THEN 1 ELSE 0 END) OVER (
      PARTITION BY cluster, source ORDER BY from_time NULLS FIRST, to_time NULLS FIRST, name
      ROWS BETWEEN UNBOUNDED PRECEDING AND CURRENT ROW
    ) AS island
  FROM followed
),
merged AS (
  SELECT
    cluster, source, min(from_time) AS from_time, max(to_time) AS to_time, count(*) AS names,
    CAST(coalesce(sum(rows_read), 0) AS BIGINT) AS rows_read, CAST(coalesce(sum(rows_unread), 0) AS BIGINT) AS rows_unread,
    max(read_time) AS read_time
  FROM islands
  GROUP BY cluster, source, island
)
SELECT
  merged.source, merged.from_time, merged.to_time, merged.names, merged.rows_read, merged.rows_unread, merged.read_time, merged.cluster
FROM merged
CROSS JOIN parameters
WHERE merged.from_time IS NULL OR (merged.from_time < parameters.to_time AND coalesce(merged.to_time, merged.from_time) >= parameters.from_time)
ORDER BY merged.cluster, merged.source, merged.from_time NULLS FIRST
