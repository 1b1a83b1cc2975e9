"""From findings to conditions to a verdict, and how they are stored."""
