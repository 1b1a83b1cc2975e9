"""Measure GPUs, links and ports and compare them with floors, peers and their own history."""
