"""`healthd doctor`: test what healthd needs on this node and print how to fix the rest."""
