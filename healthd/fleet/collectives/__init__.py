"""Collectives of a stuck job: the records of each rank, and the rank that the others wait for."""
