"""Fail-slow detection for running jobs, in a separate process."""
