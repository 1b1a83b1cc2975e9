"""What healthd does in Slurm: decides, words it, and runs the commands."""
