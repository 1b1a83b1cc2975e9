"""All nodes as they are now, from a Prometheus server. It needs nothing but healthd: no store, no extra."""
