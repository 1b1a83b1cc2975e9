"""Types and functions that every package uses."""
