-- How often Slurm's record of node states was ingested.

SELECT count(*) AS ingests
FROM ingests
WHERE source = 'node_states'
