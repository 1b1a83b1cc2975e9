-- Conditions on the nodes of the chosen failed jobs around their end, and conditions that the same rule finds by chance.
--
-- There is a row for each condition on a job's nodes. A condition whose source names jobs has a row for each distinct list of jobs.
--
-- columns
--   by_chance     0: from `seen_with_failures`; 1: from `seen_by_chance`
--   place         number of the condition, in the order of the jobs; equal in all rows of one condition
--   from_events   number of moments that healthd's own stream reported
--   jobs          names of jobs, separated by blanks; empty if the source names none or a list was truncated
--   gpus, looked, gpu_seconds, lost_gpu_seconds   values of the job, as in `attribution_failed`

WITH every AS (
  SELECT
    0 AS by_chance, cluster, db_index, job_id, state, end_time, nodes, node, code, subject, check_name, severity, kind,
    first_seen, last_seen, from_events
  FROM seen_with_failures
  UNION ALL
  SELECT
    1, cluster, db_index, job_id, state, end_time, nodes, node, code, subject, check_name, severity, kind,
    first_seen, last_seen, from_events
  FROM seen_by_chance
),
wanted AS (
  SELECT
    every.by_chance, every.cluster, every.db_index, every.job_id, chosen_jobs.array_job_id, chosen_jobs.array_task_id,
    every.state, chosen_jobs.start_time, every.end_time, every.nodes, every.node, every.code, every.subject,
    every.check_name, every.severity, every.kind, every.first_seen, every.last_seen, every.from_events,
    failed.gpus, failed.looked, failed.gpu_seconds, failed.lost_gpu_seconds,
    row_number() OVER (
      PARTITION BY every.by_chance
      ORDER BY every.cluster, every.end_time, every.db_index, every.node, every.code, every.subject
    ) AS place
  FROM every
  JOIN chosen_jobs ON chosen_jobs.cluster = every.cluster AND chosen_jobs.db_index = every.db_index
  JOIN attribution_failed AS failed ON failed.cluster = every.cluster AND failed.db_index = every.db_index
),
naming AS (
  SELECT
    lines.cluster, lines.node, lines.code, lines.subject, coalesce(lines.first_time, lines.time) AS first_time,
    coalesce(lines.last_time, lines.time) AS last_time, events.jobs,
    CASE WHEN events.rest LIKE '%"jobs_more"%' THEN 1 ELSE 0 END AS cut
  FROM lines
  JOIN events ON events.node = lines.node AND events.stream_id = lines.stream_id AND events.seq = lines.seq
  WHERE lines.code IS NOT NULL AND events.jobs <> ''
),
matched AS (
  SELECT
    wanted.by_chance, wanted.place, naming.jobs, max(naming.cut) OVER (PARTITION BY wanted.by_chance, wanted.place) AS cut
  FROM wanted
  JOIN naming
    ON naming.cluster = wanted.cluster AND naming.node = wanted.node AND naming.code = wanted.code
    AND naming.subject IS NOT DISTINCT FROM wanted.subject
  WHERE naming.first_time <= wanted.last_seen AND naming.last_time >= wanted.first_seen
),
named AS (SELECT DISTINCT by_chance, place, jobs FROM matched WHERE cut = 0)
SELECT
  wanted.by_chance, wanted.place, wanted.cluster, wanted.db_index, wanted.job_id, wanted.array_job_id,
  wanted.array_task_id, wanted.state, wanted.start_time, wanted.end_time, coalesce(wanted.nodes, 0) AS nodes,
  wanted.node, wanted.code, coalesce(wanted.subject, '') AS subject, coalesce(wanted.check_name, '') AS check_name,
  wanted.severity, wanted.kind, wanted.first_seen, wanted.last_seen, wanted.from_events,
  coalesce(named.jobs, '') AS jobs, wanted.gpus, wanted.looked, wanted.gpu_seconds, wanted.lost_gpu_seconds
FROM wanted
LEFT JOIN named ON named.by_chance = wanted.by_chance AND named.place = wanted.place
