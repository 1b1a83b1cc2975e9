"""Settings: types, defaults, files and effective values, and the registry of checks."""
