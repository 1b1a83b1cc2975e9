"""Statistics for the fleet's answers. All functions are pure."""
