"""The control socket: commands and queries of users, Slurm and programs."""
