-- What a GPU keeps for its life (in its InfoROM) and a later look did not find: another GPU is in its place. Of the chosen nodes in [from_time, to_time).
--
-- cleared_by others, unconfirmed, window: nothing was seen to be gone.

SELECT lines.cluster, lines.node, coalesce(lines.subject, '') AS subject, lines.code, lines.time
FROM lines
JOIN chosen_nodes ON chosen_nodes.cluster = lines.cluster AND chosen_nodes.node = lines.node
CROSS JOIN asked
WHERE lines.event = 'cleared'
  AND lines.code IN (
    'gpu_row_remap/failure', 'gpu_row_remap/too_many', 'gpu_retired_pages/too_many', 'gpu_ecc/aggregate'
  )
  AND coalesce(lines.cleared_by, '') NOT IN ('others', 'unconfirmed', 'window')
  AND lines.time >= asked.from_time AND lines.time < asked.to_time
ORDER BY lines.cluster, lines.node, lines.time, lines.subject, lines.code
