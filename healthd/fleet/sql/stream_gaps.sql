-- Missing lines in the nodes' streams.
--
-- It is unknown what happened during a gap. Contains gaps that end in [from_time, to_time). Lost lines at the end of a stream or before its first stored line cannot be detected.
--
-- columns
--   from_seq, to_seq, lost   the missing numbers, and how many there are
--   after_time, until_time   when the last line before the gap and the first line after it were written
--   reported      true if the node reported the loss (its disk was full) with a line `dropped`
-- source: docs/events.md, "No silent hole"

WITH followed AS (
  SELECT
    cluster, node, stream_id, seq, time, event, dropped,
    lag(seq) OVER (PARTITION BY node, stream_id ORDER BY seq) AS seq_before,
    lag(time) OVER (PARTITION BY node, stream_id ORDER BY seq) AS time_before
  FROM lines
)
SELECT
  followed.node, followed.seq_before + 1 AS from_seq, followed.seq - 1 AS to_seq, followed.seq - followed.seq_before - 1 AS lost,
  followed.time_before AS after_time, followed.time AS until_time,
  followed.event = 'dropped' AND coalesce(followed.dropped, 0) >= followed.seq - followed.seq_before - 1 AS reported,
  followed.stream_id, followed.cluster
FROM followed
CROSS JOIN parameters
WHERE followed.seq > followed.seq_before + 1 AND followed.time >= parameters.from_time AND followed.time < parameters.to_time
ORDER BY followed.cluster, followed.node, followed.stream_id, followed.seq
