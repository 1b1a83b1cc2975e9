-- A page of `attribution_conditions`, sorted by job. A large fleet has 100,000 rows per year, which are too many to keep in memory.
--
-- parameters
--   chance BIGINT = 0   1 for conditions found by chance
--   after_place BIGINT = 0   rows after this place
--   page_rows BIGINT = 5000   number of conditions per page

SELECT
  seen.place, seen.cluster, seen.db_index, seen.job_id, seen.array_job_id, seen.array_task_id, seen.state,
  seen.start_time, seen.end_time, seen.nodes, seen.node, seen.code, seen.subject, seen.check_name, seen.severity,
  seen.kind, seen.first_seen, seen.last_seen, seen.from_events, seen.jobs, seen.gpus, seen.looked, seen.gpu_seconds,
  seen.lost_gpu_seconds
FROM attribution_conditions AS seen
CROSS JOIN parameters
WHERE seen.by_chance = parameters.chance AND seen.place > parameters.after_place
  AND seen.place <= parameters.after_place + parameters.page_rows
ORDER BY seen.place, seen.jobs
