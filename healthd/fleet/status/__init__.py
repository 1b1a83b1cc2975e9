"""All nodes as they are now, from a Prometheus server. Needs neither the store nor an extra."""
