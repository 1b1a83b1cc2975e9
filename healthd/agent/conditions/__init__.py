"""Conditions: how findings become conditions, how conditions become a verdict, and how both are stored."""
