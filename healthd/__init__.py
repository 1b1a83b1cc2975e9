"""healthd: the node health daemon for GPU clusters run by Slurm."""

__version__ = "0.1.0"
