"""Fleet analysis on a central machine: a store of all events and Slurm's accounting, and the answers from it.

Needs the extra healthd[fleet]; nodes do not import this package.
"""
