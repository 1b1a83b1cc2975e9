"""Repair of a drained node: which step would end its faults, what prevents the step, and how it is taken."""
