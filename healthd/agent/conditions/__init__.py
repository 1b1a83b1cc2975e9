"""Conditions: how findings become conditions, how conditions lead to a verdict, and how both are stored."""
