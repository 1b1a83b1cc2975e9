"""`healthd scan`: find faults in a kernel log of any machine."""
