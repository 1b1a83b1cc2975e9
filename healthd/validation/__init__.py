"""Measures GPUs, links and ports, and compares them with floors, peers and their own history."""
