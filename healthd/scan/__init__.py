"""`healthd scan`: find faults in a kernel log from any machine."""
