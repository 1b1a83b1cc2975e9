-- GPU time of the chosen jobs in each week (from Monday, UTC) of [from_time, to_time). A job without an end is counted until `known_until` of its cluster.

WITH ran AS (
  SELECT
    greatest(jobs.start_time, parameters.from_time) AS begin_time,
    least(coalesce(jobs.end_time, jobs_known.known_until), parameters.to_time) AS end_time, jobs.gpus
  FROM chosen_jobs AS jobs
  JOIN jobs_known ON jobs_known.cluster = jobs.cluster
  CROSS JOIN parameters
  WHERE jobs.gpus > 0 AND jobs.start_time < parameters.to_time
    AND coalesce(jobs.end_time, jobs_known.known_until) > parameters.from_time
),
marked AS (
  SELECT
    begin_time, end_time, gpus, begin_time - (begin_time - 345600) % 604800 AS first_week,
    (end_time - 1) - (end_time - 1 - 345600) % 604800 AS last_week
  FROM ran
  WHERE end_time > begin_time
),
-- Most jobs are within one week.
split AS (
  SELECT begin_time, end_time, gpus, first_week AS week
  FROM marked
  WHERE first_week = last_week
  UNION ALL
  SELECT longer.begin_time, longer.end_time, longer.gpus, longer.first_week + numbers.n * 604800 AS week
  FROM (SELECT begin_time, end_time, gpus, first_week, last_week FROM marked WHERE first_week < last_week) AS longer
  CROSS JOIN numbers
  WHERE numbers.n <= (longer.last_week - longer.first_week) / 604800e0
)
SELECT
  week, CAST(sum(gpus * (least(end_time, week + 604800) - greatest(begin_time, week))) AS BIGINT) AS gpu_seconds
FROM split
GROUP BY week
ORDER BY week
