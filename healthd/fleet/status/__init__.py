"""The current state of all nodes, read from a Prometheus server. It needs neither the store nor a package extra."""
