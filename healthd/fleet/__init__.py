"""The fleet, at the centre: a store of all events and of Slurm's accounting, and its answers.

It needs the extra healthd[fleet]; no node imports it.
"""
