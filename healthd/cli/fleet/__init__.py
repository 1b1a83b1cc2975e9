"""Commands of `healthd fleet`."""
