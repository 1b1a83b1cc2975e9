-- The times of which Slurm's record of node states was read.

SELECT cluster, from_time, to_time
FROM sources_coverage
WHERE source = 'node_states' AND from_time IS NOT NULL
ORDER BY cluster, from_time
