"""The control socket: commands and queries from users, Slurm and programs."""
