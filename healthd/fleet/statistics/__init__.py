"""Statistics for the fleet's answers. Pure functions."""
