-- Beginnings of NVLink and GPU conditions that drain, on nodes that have named their NVLink domain, in the whole store.
--
-- The codes that a switch can cause are selected afterwards (healthd/fleet/statistics/domain_faults.py).
--
-- columns
--   domain   UUID of the node's NVLink domain
--   time     first sighting of the condition; if it was milder then, the time at which it became degraded or critical

SELECT
  cluster, node, max(nvlink_domain) AS domain, code,
  coalesce(
    min(CASE WHEN event = 'worsened' AND was IN ('info', 'warning') THEN time END), min(coalesce(first_time, time))
  ) AS time
FROM lines
WHERE event IN ('opened', 'seen_again', 'worsened') AND nvlink_domain IS NOT NULL
  AND check_name IN ('gpu_nvlink', 'gpu_fabric', 'gpu_xid') AND severity IN ('degraded', 'critical')
  AND NOT coalesce(observed, TRUE) AND NOT coalesce(history, FALSE)
GROUP BY cluster, node, condition_id, code, subject
ORDER BY cluster, node, time, code, domain
