"""Current state of all nodes, read from a Prometheus server. Needs neither the store nor a package extra."""
