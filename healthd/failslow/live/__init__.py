"""Fail-slow detection for running jobs: a process beside the daemon."""
