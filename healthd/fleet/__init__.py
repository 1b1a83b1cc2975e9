"""Fleet analysis on a central machine: stores all events and Slurm's accounting data, and evaluates them.

Requires the optional dependencies `healthd[fleet]`. Nodes do not import this package.
"""
