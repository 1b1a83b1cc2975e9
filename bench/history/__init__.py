"""Generate a history of a GPU cluster: the output of Slurm's programs, the nodes' event streams, and the truth.

Sizes, states and rates are those of arXiv 2410.21680 (Kokolis et al., HPCA 2025): see workload.py and causes.py.
"""
