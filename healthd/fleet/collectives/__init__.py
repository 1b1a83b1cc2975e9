"""Collectives in a stuck job: each rank's records, and the rank that the others wait for."""
