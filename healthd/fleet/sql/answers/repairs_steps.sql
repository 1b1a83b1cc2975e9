-- Stages of the repairs that healthd took itself on the chosen nodes, in the whole store. The fields of the event are JSON in `rest`.

SELECT lines.cluster, lines.node, lines.time, lines.stage, coalesce(events.rest, '') AS rest
FROM lines
JOIN events
  ON events.node = lines.node AND events.stream_id = lines.stream_id AND events.seq = lines.seq
JOIN chosen_nodes ON chosen_nodes.cluster = lines.cluster AND chosen_nodes.node = lines.node
WHERE lines.event = 'repair' AND lines.stage IN ('claimed', 'refused', 'taken', 'failed', 'succeeded', 'gave_up', 'stopped')
ORDER BY lines.cluster, lines.node, lines.time, lines.stream_id, lines.seq
