"""A node as a file: what was asked and answered."""
