"""Drain, requeue and resume of this node: decisions, commands and the fleet limit."""
