"""Current state of all nodes, from a Prometheus server. Needs neither the store nor an extra."""
