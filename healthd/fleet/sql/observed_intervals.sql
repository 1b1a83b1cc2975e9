-- Intervals in which each node was observed, for each line of its stream.
--
-- A node is observed from one line of its stream to the next if all these conditions are met: no number is missing between the lines, the daemon was not stopped, the next line is not a start, at most 25 hours lie between the lines (`alive` is written each day), and
-- the clock was not set. Before a start, it is observed from its last line until the last moment at which it is known to have run. It is not observed before the first line of a stream and after the last line.
-- Not limited to the requested period. `observed` contains the same times by day.
--
-- columns
--   begin_time, end_time   epoch seconds; the spans of a node do not overlap, and mostly touch
-- source: docs/events.md, "Without alive a time is not observed"

WITH followed AS (
  SELECT
    cluster, node, stream_time, stream_id, seq, time, mono, boot_id, event, last_alive_time,
    lag(event) OVER (PARTITION BY cluster, node ORDER BY stream_time, stream_id, seq) AS event_before,
    lag(time) OVER (PARTITION BY cluster, node ORDER BY stream_time, stream_id, seq) AS time_before,
    lag(mono) OVER (PARTITION BY cluster, node ORDER BY stream_time, stream_id, seq) AS mono_before,
    lag(boot_id) OVER (PARTITION BY cluster, node ORDER BY stream_time, stream_id, seq) AS boot_before,
    lag(stream_id) OVER (PARTITION BY cluster, node ORDER BY stream_time, stream_id, seq) AS stream_before,
    lag(seq) OVER (PARTITION BY cluster, node ORDER BY stream_time, stream_id, seq) AS seq_before
  FROM lines
),
pieces AS (
  SELECT
    cluster, node, stream_time, stream_id, seq, time_before AS begin_time,
    CASE
      WHEN event_before = 'stopped' OR (stream_id = stream_before AND seq > seq_before + 1) THEN CAST(NULL AS BIGINT)
      WHEN event = 'started' THEN last_alive_time
      WHEN stream_id = stream_before AND boot_id = boot_before AND time - time_before <= mono - mono_before + 60 THEN time
    END AS end_time
  FROM followed
),
whole AS (
  SELECT cluster, node, stream_time, stream_id, seq, begin_time, end_time
  FROM pieces
  WHERE end_time > begin_time AND end_time - begin_time <= 90000
),
apart AS (
  SELECT
    cluster, node, end_time,
    greatest(begin_time, max(end_time) OVER (
      PARTITION BY cluster, node ORDER BY begin_time, end_time, stream_time, stream_id, seq
      ROWS BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING
    )) AS begin_time
  FROM whole
)
SELECT cluster, node, begin_time, end_time
FROM apart
WHERE end_time > begin_time
ORDER BY cluster, node, begin_time, end_time
