"""The fleet's history, at the centre: what every node told and what Slurm accounted, in one store.

It needs the extra healthd[fleet]; no node imports it.
"""
