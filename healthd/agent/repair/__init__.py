"""Repair of a drained node: which step would end its faults, and what prevents that step."""
