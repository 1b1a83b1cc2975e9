"""Where settings and checks come from: layers, the registry of checks."""
