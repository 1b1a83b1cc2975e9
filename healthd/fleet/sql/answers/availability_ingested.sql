-- Number of ingests of Slurm's node states.

SELECT count(*) AS ingests
FROM ingests
WHERE source = 'node_states'
