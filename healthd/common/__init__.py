"""Types and functions that all packages use."""
