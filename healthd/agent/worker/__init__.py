"""The worker process, which runs the checks, and its client in the daemon."""
