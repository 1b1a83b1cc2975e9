-- Periods for which Slurm's node states were read.

SELECT cluster, from_time, to_time
FROM sources_coverage
WHERE source = 'node_states' AND from_time IS NOT NULL
ORDER BY cluster, from_time
