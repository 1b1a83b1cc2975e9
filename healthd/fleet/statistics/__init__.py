"""Statistics of the fleet's answers. Pure."""
