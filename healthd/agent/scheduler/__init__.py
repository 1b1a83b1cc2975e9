"""Schedule of the checks, and the handling of their results and of kernel events."""
