-- Lines in the nodes' event streams, each with the cluster of its stream.
--
-- Until a node has read slurm.conf, it does not know its cluster and writes "" as the name. Such lines get the cluster of later lines, because a stream belongs to one node (docs/events.md).
-- Lines with an unknown schema, which have no number, are left out. Not limited to the requested period.
--
-- columns: the columns of the table events that other queries need; stream_time: the first time of the stream in the store
-- source: docs/events.md

WITH streams AS (
  SELECT node, stream_id, max(cluster) AS cluster, min(time) AS stream_time
  FROM events
  WHERE seq IS NOT NULL AND time IS NOT NULL
  GROUP BY node, stream_id
)
SELECT
  streams.cluster, streams.node, streams.stream_id, streams.stream_time, events.boot_id, events.seq, events.time, events.mono,
  events.event, events.stage, events.condition_id, events.check_name, events.code, events.subject, events.severity,
  events.kind, events.first_time, events.last_time, events.times, events.cleared_by, events.reason, events.who,
  events.last_alive_time, events.dropped, events.observed, events.history, events.jobs, events.slowdown,
  events.onset_time, events.serial, events.nvlink_domain, events.was
FROM streams
JOIN events ON events.node = streams.node AND events.stream_id = streams.stream_id
WHERE events.seq IS NOT NULL AND events.time IS NOT NULL
