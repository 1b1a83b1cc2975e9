"""From findings to conditions to a verdict, and what is remembered."""
