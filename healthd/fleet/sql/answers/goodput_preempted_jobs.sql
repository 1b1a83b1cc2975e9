-- Pre-empted jobs and their loss, by the requeued job that took their nodes. `after` is the job_id of this job; it is empty if the pre-emptor is not a requeue of a job in `hardware_ends`.
--
-- parameters
--   at_most_seconds DOUBLE = 1800   half of the time between two checkpoints
-- source: lost goodput in Kokolis, Kuchnik et al. (HPCA 2025, arXiv 2410.21680), second order

SELECT
  preempted.how, requeues.job_id AS after, preempted.cluster, jobs.gpus_up_to, count(*) AS jobs,
  CAST(sum(coalesce(
    jobs.gpus * least(greatest(jobs.end_time - jobs.start_time, 0), parameters.at_most_seconds), 0
  )) AS DOUBLE) AS gpu_seconds,
  CAST(coalesce(sum(jobs.gpus), 0) AS BIGINT) AS gpus
FROM preempted
JOIN chosen_jobs AS jobs ON jobs.cluster = preempted.cluster AND jobs.db_index = preempted.db_index
CROSS JOIN parameters
LEFT JOIN hardware_requeues AS requeues
  ON requeues.cluster = preempted.cluster AND requeues.db_index = preempted.preemptor_db_index
WHERE preempted.state = 'PREEMPTED'
GROUP BY preempted.how, requeues.job_id, preempted.cluster, jobs.gpus_up_to
ORDER BY preempted.cluster, requeues.job_id NULLS FIRST, preempted.how, jobs.gpus_up_to NULLS FIRST
