"""A made history of a GPU cluster, as Slurm's programs and the nodes' streams would tell it, with its truth beside it.

Sizes, states and rates are those of arXiv 2410.21680 (Kokolis et al., HPCA 2025): see workload.py and causes.py.
"""
