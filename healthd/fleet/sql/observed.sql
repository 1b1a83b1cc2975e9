-- Observed time of each node, by day.
--
-- If no failure was recorded in unobserved time, this proves nothing. There is a row for each day (UTC) in [from_time, to_time) and each node known from its stream, its jobs, Slurm's records or the list of nodes. A node is observed from one line of its
-- stream to the next if all these conditions are met: no number is missing between the lines, the daemon was not stopped, the next line is not a start, at most 25 hours lie between the lines (`alive` is written each day), and
-- the clock was not set. Before a start, it is observed from its last line until the last moment at which it is known to have run. It is not observed before the first line of a stream and after the last line.
--
-- columns
--   day               its midnight, epoch seconds
--   seconds           length of the day within the requested period
--   observed_seconds  how much of it was observed
--   alives, starts, stops, gaps   number of lines on that day: alive, started, stopped, and lines before which lines are missing
-- source: docs/events.md, "Without alive a time is not observed"

WITH followed AS (
  SELECT
    cluster, node, stream_id, seq, time, event,
    lag(stream_id) OVER (PARTITION BY cluster, node ORDER BY stream_time, stream_id, seq) AS stream_before,
    lag(seq) OVER (PARTITION BY cluster, node ORDER BY stream_time, stream_id, seq) AS seq_before
  FROM lines
),
by_day AS (
  SELECT
    observed_intervals.cluster, observed_intervals.node, observed_intervals.begin_time - observed_intervals.begin_time % 86400 + numbers.n * 86400 AS day,
    greatest(observed_intervals.begin_time, parameters.from_time, observed_intervals.begin_time - observed_intervals.begin_time % 86400 + numbers.n * 86400) AS begin_time,
    least(observed_intervals.end_time, parameters.to_time, observed_intervals.begin_time - observed_intervals.begin_time % 86400 + numbers.n * 86400 + 86400) AS end_time
  FROM observed_intervals
  CROSS JOIN numbers
  CROSS JOIN parameters
  WHERE numbers.n < 3
),
seen AS (
  SELECT cluster, node, day, sum(end_time - begin_time) AS observed_seconds
  FROM by_day
  WHERE end_time > begin_time
  GROUP BY cluster, node, day
),
marks AS (
  SELECT
    followed.cluster, followed.node, followed.time - followed.time % 86400 AS day,
    count(CASE WHEN followed.event = 'alive' THEN 1 END) AS alives,
    count(CASE WHEN followed.event = 'started' THEN 1 END) AS starts,
    count(CASE WHEN followed.event = 'stopped' THEN 1 END) AS stops,
    count(CASE WHEN followed.stream_id = followed.stream_before AND followed.seq > followed.seq_before + 1 THEN 1 END) AS gaps
  FROM followed
  CROSS JOIN parameters
  WHERE followed.time >= parameters.from_time AND followed.time < parameters.to_time
  GROUP BY followed.cluster, followed.node, followed.time - followed.time % 86400
),
known AS (
  SELECT cluster, node FROM nodes
  UNION
  SELECT cluster, node FROM lines
  UNION
  SELECT cluster, node FROM job_nodes
  UNION
  SELECT cluster, node FROM node_states
),
days AS (
  SELECT known.cluster, known.node, parameters.from_time - parameters.from_time % 86400 + numbers.n * 86400 AS day, parameters.from_time, parameters.to_time
  FROM known
  CROSS JOIN parameters
  CROSS JOIN numbers
  WHERE parameters.from_time - parameters.from_time % 86400 + numbers.n * 86400 < parameters.to_time
),
grid AS (
  SELECT cluster, node, day, least(to_time, day + 86400) - greatest(from_time, day) AS seconds
  FROM days
)
SELECT
  grid.node, grid.day, grid.seconds, CAST(coalesce(seen.observed_seconds, 0) AS BIGINT) AS observed_seconds,
  coalesce(marks.alives, 0) AS alives, coalesce(marks.starts, 0) AS starts, coalesce(marks.stops, 0) AS stops,
  coalesce(marks.gaps, 0) AS gaps, grid.cluster
FROM grid
LEFT JOIN seen ON seen.cluster = grid.cluster AND seen.node = grid.node AND seen.day = grid.day
LEFT JOIN marks ON marks.cluster = grid.cluster AND marks.node = grid.node AND marks.day = grid.day
ORDER BY grid.cluster, grid.node, grid.day
