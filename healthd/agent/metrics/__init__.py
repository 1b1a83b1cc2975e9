"""Prometheus metrics of the daemon, as text and as an HTTP page."""
