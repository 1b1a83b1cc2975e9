"""What people, Slurm and programs ask of the running daemon, and tell it, over its socket."""
