"""The worker process, which runs the checks, and the daemon's side of it."""
