"""The current state of all nodes, read from a Prometheus server. Requires no store and no optional dependencies."""
