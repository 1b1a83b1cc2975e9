"""Generate a history of a GPU cluster as the output of Slurm's programs and the nodes' streams, with its truth.

Sizes, states and rates are those of arXiv 2410.21680 (Kokolis et al., HPCA 2025): see workload.py and causes.py.
"""
