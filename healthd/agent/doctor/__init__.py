"""`healthd doctor`: what of healthd works on this node, what will not, and the command that mends it."""
