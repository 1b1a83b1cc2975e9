"""What the worker does and when, and what its answers become."""
