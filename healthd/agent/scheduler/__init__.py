"""Scheduling of checks, and handling of their results and of kernel events."""
