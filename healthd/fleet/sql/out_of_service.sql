-- Outages of each node, their origin, and the node's maintenance.
--
-- Contains outages that overlap [from_time, to_time). Sources are Slurm's records of node states (sacctmgr show event), and the drains and resumes that healthd confirmed. Records that overlap
-- or touch are one outage: if a drained node goes down and is then resumed, this counts once. If there is no line about the resume after a drain (a reinstalled node begins with an empty ledger), the outage ends with
-- Slurm's state of that time, if this state was read. Reservations with the flag MAINT are separate rows.
--
-- columns
--   what           outage | maintenance
--   by_whom        who began it: healthd (by its Reason or its stream) | slurm (Slurm itself) | person | unknown (the user was not read) | reservation
--   start_time, end_time   epoch seconds; end_time is empty if it has not ended
--   seconds        duration within the requested period
--   first_state, first_reason, user_name   from Slurm, at its beginning; for a reservation, first_reason is its name
--   from_slurm, from_healthd   number of records of each origin
-- source: sacctmgr(1), "show event"; docs/events.md, drain and resume; scontrol(1), reservations, MAINT

WITH told AS (
  SELECT cluster, node, stream_time, stream_id, seq, time, event, reason
  FROM lines
  WHERE event IN ('drain', 'resume') AND stage = 'confirmed'
),
ours AS (
  SELECT
    cluster, node, stream_id, seq, time, event, reason,
    lead(event) OVER (PARTITION BY cluster, node ORDER BY stream_time, stream_id, seq) AS next_event,
    lead(time) OVER (PARTITION BY cluster, node ORDER BY stream_time, stream_id, seq) AS next_time
  FROM told
),
slurms AS (
  SELECT
    cluster, node, end_time,
    row_number() OVER (PARTITION BY cluster, node ORDER BY start_time, end_time NULLS LAST) AS place
  FROM node_states
  WHERE node IS NOT NULL AND start_time IS NOT NULL
),
moments AS (
  SELECT cluster, node, start_time - 300 AS time, 1 AS of_slurm, CAST(NULL AS VARCHAR) AS stream_id, CAST(NULL AS BIGINT) AS seq
  FROM node_states
  WHERE node IS NOT NULL AND start_time IS NOT NULL
  UNION ALL
  SELECT cluster, node, time, 0, stream_id, seq
  FROM ours
  WHERE event = 'drain'
),
-- Number of Slurm states that had begun by then, which is the position of the last one. The node's clock may be a few minutes behind.
begun AS (
  SELECT
    cluster, node, stream_id, seq,
    CAST(sum(of_slurm) OVER (
      PARTITION BY cluster, node ORDER BY time, of_slurm DESC, stream_id, seq ROWS BETWEEN UNBOUNDED PRECEDING AND CURRENT ROW
    ) AS BIGINT) AS place
  FROM moments
),
drains AS (
  SELECT
    ours.cluster, ours.node, ours.time AS start_time, ours.reason,
    CASE WHEN ours.next_event <> 'resume' OR ours.next_event IS NULL
      THEN coalesce(CASE WHEN slurms.end_time >= ours.time THEN slurms.end_time END, ours.next_time)
      ELSE ours.next_time
    END AS end_time
  FROM ours
  JOIN begun
    ON begun.cluster = ours.cluster AND begun.node = ours.node AND begun.stream_id = ours.stream_id AND begun.seq = ours.seq
  LEFT JOIN slurms ON slurms.cluster = begun.cluster AND slurms.node = begun.node AND slurms.place = begun.place
  WHERE ours.event = 'drain'
),
spells AS (
  SELECT
    cluster, node, 'outage' AS what, start_time, end_time, 1 AS order_of_source, state, reason, user_name, 1 AS of_slurm, 0 AS of_healthd,
    coalesce(set_by, 'unknown') AS by_whom
  FROM node_states
  WHERE node IS NOT NULL AND start_time IS NOT NULL
  UNION ALL
  SELECT
    cluster, node, 'outage', start_time, end_time, 0, CAST(NULL AS VARCHAR), reason, CAST(NULL AS VARCHAR), 0, 1, 'healthd'
  FROM drains
  UNION ALL
  SELECT
    cluster, node, 'maintenance', start_time, end_time, 2, CAST(NULL AS VARCHAR), name, CAST(NULL AS VARCHAR), 0, 0, 'reservation'
  FROM reservations
  WHERE maintenance AND node IS NOT NULL AND start_time IS NOT NULL
),
followed AS (
  SELECT
    cluster, node, what, start_time, end_time, order_of_source, state, reason, user_name, of_slurm, of_healthd, by_whom,
    max(coalesce(end_time, 9007199254740991)) OVER (
      PARTITION BY cluster, node, what ORDER BY start_time, order_of_source, end_time NULLS LAST, reason NULLS FIRST, state NULLS FIRST
      ROWS BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING
    ) AS ended_before
  FROM spells
),
islands AS (
  SELECT
    cluster, node, what, start_time, end_time, state, reason, user_name, of_slurm, of_healthd, by_whom,
    sum(CASE WHEN start_time > ended_before THEN 1 ELSE 0 END) OVER (
      PARTITION BY cluster, node, what ORDER BY start_time, order_of_source, end_time NULLS LAST, reason NULLS FIRST, state NULLS FIRST
      ROWS BETWEEN UNBOUNDED PRECEDING AND CURRENT ROW
    ) AS island,
    row_number() OVER (
      PARTITION BY cluster, node, what ORDER BY start_time, order_of_source, end_time NULLS LAST, reason NULLS FIRST, state NULLS FIRST
    ) AS place
  FROM followed
),
firsts AS (
  SELECT
    cluster, node, what, start_time, end_time, state, reason, user_name, of_slurm, of_healthd, by_whom, island,
    row_number() OVER (PARTITION BY cluster, node, what, island ORDER BY place) AS place
  FROM islands
),
merged AS (
  SELECT
    cluster, node, what, min(start_time) AS start_time,
    CASE WHEN count(end_time) = count(*) THEN max(end_time) END AS end_time,
    max(CASE WHEN place = 1 THEN by_whom END) AS by_whom, max(CASE WHEN place = 1 THEN state END) AS first_state,
    max(CASE WHEN place = 1 THEN reason END) AS first_reason, max(CASE WHEN place = 1 THEN user_name END) AS user_name,
    CAST(sum(of_slurm) AS BIGINT) AS from_slurm, CAST(sum(of_healthd) AS BIGINT) AS from_healthd
  FROM firsts
  GROUP BY cluster, node, what, island
)
SELECT
  merged.node, merged.what, merged.by_whom, merged.start_time, merged.end_time,
  least(coalesce(merged.end_time, parameters.to_time), parameters.to_time) - greatest(merged.start_time, parameters.from_time) AS seconds,
  merged.first_reason, merged.first_state, merged.user_name, merged.from_slurm, merged.from_healthd, merged.cluster
FROM merged
CROSS JOIN parameters
WHERE merged.start_time < parameters.to_time AND coalesce(merged.end_time, parameters.to_time) > parameters.from_time
ORDER BY merged.cluster, merged.node, merged.what, merged.start_time
