"""Read the kernel log and turn its lines into events."""
