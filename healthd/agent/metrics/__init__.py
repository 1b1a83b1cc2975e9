"""Prometheus metrics of the daemon, as text and as a page."""
