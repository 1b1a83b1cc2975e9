"""`healthd doctor`: test everything that healthd needs on this node, and print how to fix what does not work."""
