"""Fleet analysis on a central machine: a store for all events and Slurm's accounting, and answers from this store.

It needs the extra healthd[fleet]; nodes do not import this package.
"""
