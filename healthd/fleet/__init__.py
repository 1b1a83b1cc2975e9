"""Fleet analysis at the centre: a store of all events and of Slurm's accounting, and its answers.

Needs the extra healthd[fleet]; nodes do not import it.
"""
