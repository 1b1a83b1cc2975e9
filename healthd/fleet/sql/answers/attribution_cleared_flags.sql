-- Flags that a GPU keeps for life (in its InfoROM) but that a later reading on a chosen node in [from_time, to_time) did not find. This means that the GPU was replaced.
--
-- Conditions that were cleared by "others", "unconfirmed" or "window" are left out, because the flag was not read again.

SELECT lines.cluster, lines.node, coalesce(lines.subject, '') AS subject, lines.code, lines.time
FROM lines
JOIN chosen_nodes ON chosen_nodes.cluster = lines.cluster AND chosen_nodes.node = lines.node
CROSS JOIN parameters
WHERE lines.event = 'cleared'
  AND lines.code IN (
    'gpu_row_remap/failure', 'gpu_row_remap/too_many', 'gpu_retired_pages/too_many', 'gpu_ecc/aggregate'
  )
  AND coalesce(lines.cleared_by, '') NOT IN ('others', 'unconfirmed', 'window')
  AND lines.time >= parameters.from_time AND lines.time < parameters.to_time
ORDER BY lines.cluster, lines.node, lines.time, lines.subject, lines.code
