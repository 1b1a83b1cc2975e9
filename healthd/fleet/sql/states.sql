-- Outcome of the jobs: their number and GPU-seconds, by state and size.
--
-- Contains jobs that ended in [from_time, to_time). A requeue has its own row in Slurm's accounting and here, with the same job_id and a new db_index. A job that never ran has
-- no GPU-seconds. Suspended time is included, because no other job had the job's GPUs.
--
-- columns
--   gpus_up_to    the size class: jobs with at most this many GPUs and more than half that number; 0 without GPUs; empty if unknown
--   gpu_seconds   GPUs x (end - start), for the whole job, including time before from_time
-- source: the states and sizes of Kokolis, Kuchnik et al., "Revisiting Reliability in Large-Scale Machine Learning Research Clusters" (HPCA 2025, arXiv 2410.21680)

WITH ended AS (
  SELECT
    jobs.cluster, jobs.state,
    CASE
      WHEN jobs.gpus <= 0 THEN 0 WHEN jobs.gpus <= 1 THEN 1 WHEN jobs.gpus <= 2 THEN 2 WHEN jobs.gpus <= 4 THEN 4
      WHEN jobs.gpus <= 8 THEN 8 WHEN jobs.gpus <= 16 THEN 16 WHEN jobs.gpus <= 32 THEN 32 WHEN jobs.gpus <= 64 THEN 64
      WHEN jobs.gpus <= 128 THEN 128 WHEN jobs.gpus <= 256 THEN 256 WHEN jobs.gpus <= 512 THEN 512
      WHEN jobs.gpus <= 1024 THEN 1024 WHEN jobs.gpus <= 2048 THEN 2048 WHEN jobs.gpus <= 4096 THEN 4096
      WHEN jobs.gpus <= 8192 THEN 8192 WHEN jobs.gpus <= 16384 THEN 16384 WHEN jobs.gpus <= 32768 THEN 32768
      WHEN jobs.gpus <= 65536 THEN 65536 WHEN jobs.gpus > 65536 THEN 131072
    END AS gpus_up_to,
    jobs.gpus * greatest(jobs.end_time - jobs.start_time, 0) AS gpu_seconds
  FROM jobs
  CROSS JOIN parameters
  WHERE jobs.end_time >= parameters.from_time AND jobs.end_time < parameters.to_time
)
SELECT
  state, CAST(gpus_up_to AS BIGINT) AS gpus_up_to, count(*) AS jobs, CAST(coalesce(sum(gpu_seconds), 0) AS BIGINT) AS gpu_seconds, cluster
FROM ended
GROUP BY cluster, state, gpus_up_to
ORDER BY cluster, state, gpus_up_to
