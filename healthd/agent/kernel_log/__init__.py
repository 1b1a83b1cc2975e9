"""From a line of the kernel log to an event."""
