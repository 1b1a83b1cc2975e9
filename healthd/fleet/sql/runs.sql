-- Jobs that form one run: requeues, and successive jobs with the same name.
--
-- Contains runs with an attempt that was queued or ran in [from_time, to_time), with all their attempts. Jobs with the same run_key are a chain. Jobs without a run_key, and array tasks, are a chain only with the requeues of their job_id.
-- An attempt that was submitted more than gap_seconds after all previous attempts had ended begins another run, because names are reused. If attempts ran at the same time
-- (overlapping > 0), the jobs may be a family instead of a chain; only a person can decide this.
--
-- columns
--   run              the job_id of its first attempt
--   chained_by       run_key | job_id
--   attempts, jobs   rows in the accounting, and distinct job_ids
--   runtime_seconds, gpu_seconds   sums over all attempts; running attempts count until to_time, or until they were last read (`jobs_known`) if that is earlier
--   queued_seconds   time from when an attempt was eligible until it started, summed over all attempts
--   last_state       state of the attempt that was submitted last
-- parameters
--   gap_seconds BIGINT = 86400   maximum time between the end of an attempt and the next submission
-- source: "job run" in Kokolis, Kuchnik et al. (HPCA 2025, arXiv 2410.21680); the rule for chains and the gap are healthd's

WITH attempts AS (
  SELECT
    jobs.cluster, jobs.db_index, jobs.job_id, jobs.state, jobs.gpus, jobs.submit_time, jobs.eligible_time, jobs.start_time,
    coalesce(jobs.end_time, least(jobs_known.known_until, parameters.to_time)) AS end_time,
    CASE WHEN jobs.run_key IS NOT NULL AND jobs.array_task_id IS NULL THEN 'run_key' ELSE 'job_id' END AS chained_by,
    CASE WHEN jobs.run_key IS NOT NULL AND jobs.array_task_id IS NULL THEN jobs.run_key ELSE CAST(jobs.job_id AS VARCHAR) END AS chain
  FROM jobs
  JOIN jobs_known ON jobs_known.cluster = jobs.cluster
  CROSS JOIN parameters
  WHERE jobs.submit_time IS NOT NULL
),
-- Number each chain. The windows below sort all attempts, and sorting numbers takes two thirds of the time of sorting texts.
chains AS (
  SELECT cluster, chained_by, chain, min(db_index) AS chain_id
  FROM attempts
  GROUP BY cluster, chained_by, chain
),
told AS (
  SELECT
    attempts.cluster, attempts.db_index, attempts.job_id, attempts.state, attempts.gpus, attempts.submit_time, attempts.eligible_time,
    attempts.start_time, attempts.end_time, attempts.chained_by, chains.chain_id AS chain
  FROM attempts
  JOIN chains ON chains.cluster = attempts.cluster AND chains.chained_by = attempts.chained_by AND chains.chain = attempts.chain
),
followed AS (
  SELECT
    cluster, db_index, job_id, state, gpus, submit_time, eligible_time, start_time, end_time, chained_by, chain,
    max(end_time) OVER (
      PARTITION BY cluster, chain ORDER BY submit_time, start_time NULLS LAST, db_index
      ROWS BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING
    ) AS ended_before,
    lead(submit_time) OVER (PARTITION BY cluster, chain ORDER BY submit_time, start_time NULLS LAST, db_index) AS next_submit_time
  FROM told
),
placed AS (
  SELECT
    followed.cluster, followed.db_index, followed.job_id, followed.state, followed.gpus, followed.submit_time, followed.eligible_time,
    followed.start_time, followed.end_time, followed.chained_by, followed.chain, followed.ended_before,
    followed.ended_before IS NULL OR followed.submit_time > followed.ended_before + parameters.gap_seconds AS is_first,
    followed.next_submit_time IS NULL
    OR followed.next_submit_time > greatest(followed.end_time, coalesce(followed.ended_before, followed.end_time)) + parameters.gap_seconds AS is_last
  FROM followed
  CROSS JOIN parameters
),
-- Most runs have one attempt and need no sum.
alone AS (
  SELECT
    cluster, chained_by, job_id AS run, 1 AS attempts, 1 AS jobs, submit_time, start_time, end_time, state AS last_state, gpus,
    greatest(end_time - start_time, 0) AS runtime_seconds, gpus * greatest(end_time - start_time, 0) AS gpu_seconds,
    greatest(start_time - coalesce(eligible_time, submit_time), 0) AS queued_seconds, 0 AS overlapping,
    CASE WHEN state = 'NODE_FAIL' THEN 1 ELSE 0 END AS node_fails, CASE WHEN state = 'FAILED' THEN 1 ELSE 0 END AS failed,
    CASE WHEN state = 'PREEMPTED' THEN 1 ELSE 0 END AS preempted
  FROM placed WHERE is_first AND is_last
),
cut AS (
  SELECT
    cluster, job_id, state, gpus, submit_time, eligible_time, start_time, end_time, chained_by, chain, ended_before, is_first, is_last,
    sum(CASE WHEN is_first THEN 1 ELSE 0 END) OVER (
      PARTITION BY cluster, chain ORDER BY submit_time, start_time NULLS LAST, db_index
      ROWS BETWEEN UNBOUNDED PRECEDING AND CURRENT ROW
    ) AS piece
  FROM placed WHERE NOT (is_first AND is_last)
),
-- Make a row for each job_id first, then a row for each run. count(DISTINCT ...) would keep all attempts in memory twice.
jobs_of_runs AS (
  SELECT
    cluster, chained_by, chain, piece, job_id, count(*) AS attempts, max(CASE WHEN is_first THEN job_id END) AS run,
    min(submit_time) AS submit_time, min(start_time) AS start_time, max(end_time) AS end_time,
    max(CASE WHEN is_last THEN state END) AS last_state, max(gpus) AS gpus,
    sum(greatest(end_time - start_time, 0)) AS runtime_seconds, sum(gpus * greatest(end_time - start_time, 0)) AS gpu_seconds,
    sum(greatest(start_time - coalesce(eligible_time, submit_time), 0)) AS queued_seconds,
    count(CASE WHEN NOT is_first AND start_time < ended_before THEN 1 END) AS overlapping,
    count(CASE WHEN state = 'NODE_FAIL' THEN 1 END) AS node_fails, count(CASE WHEN state = 'FAILED' THEN 1 END) AS failed,
    count(CASE WHEN state = 'PREEMPTED' THEN 1 END) AS preempted
  FROM cut
  GROUP BY cluster, chained_by, chain, piece, job_id
),
summed AS (
  SELECT
    cluster, chained_by, run, attempts, jobs, submit_time, start_time, end_time, last_state, gpus, runtime_seconds, gpu_seconds,
    queued_seconds, overlapping, node_fails, failed, preempted
  FROM alone
  UNION ALL
  SELECT
    cluster, chained_by, max(run), sum(attempts), count(*), min(submit_time), min(start_time), max(end_time), max(last_state), max(gpus),
    sum(runtime_seconds), sum(gpu_seconds), sum(queued_seconds), sum(overlapping), sum(node_fails), sum(failed), sum(preempted)
  FROM jobs_of_runs
  GROUP BY cluster, chained_by, chain, piece
)
SELECT
  summed.run, summed.chained_by, CAST(summed.attempts AS BIGINT) AS attempts, CAST(summed.jobs AS BIGINT) AS jobs, summed.submit_time, summed.start_time, summed.end_time,
  summed.last_state, summed.gpus, CAST(coalesce(summed.runtime_seconds, 0) AS BIGINT) AS runtime_seconds,
  CAST(coalesce(summed.gpu_seconds, 0) AS BIGINT) AS gpu_seconds, CAST(coalesce(summed.queued_seconds, 0) AS BIGINT) AS queued_seconds,
  CAST(summed.overlapping AS BIGINT) AS overlapping, CAST(summed.node_fails AS BIGINT) AS node_fails, CAST(summed.failed AS BIGINT) AS failed,
  CAST(summed.preempted AS BIGINT) AS preempted, summed.cluster
FROM summed
CROSS JOIN parameters
WHERE summed.submit_time < parameters.to_time AND summed.end_time >= parameters.from_time
ORDER BY summed.cluster, summed.submit_time, summed.run, summed.chained_by
