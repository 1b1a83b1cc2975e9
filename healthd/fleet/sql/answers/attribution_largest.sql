-- The failed jobs by lost GPU time, largest first.
--
-- parameters
--   after_place BIGINT = 0   jobs after this place
--   page_rows BIGINT = 5000   number of jobs per page

SELECT
  failed.cluster, jobs.job_id AS job, failed.db_index, failed.state, failed.end_time, failed.gpus,
  failed.lost_gpu_seconds, failed.looked AS because
FROM attribution_failed AS failed
JOIN jobs ON jobs.cluster = failed.cluster AND jobs.db_index = failed.db_index
CROSS JOIN parameters
WHERE failed.place > parameters.after_place AND failed.place <= parameters.after_place + parameters.page_rows
ORDER BY failed.place
