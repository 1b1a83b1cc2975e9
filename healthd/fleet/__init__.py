"""Fleet analysis on a central machine: a store for all events and Slurm's accounting, and answers from this store.

Requires the optional dependencies `healthd[fleet]`. Nodes do not import this package.
"""
