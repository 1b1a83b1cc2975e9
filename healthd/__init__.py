"""healthd: node health daemon for GPU clusters with Slurm."""

__version__ = "0.1.0"
