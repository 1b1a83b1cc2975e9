"""Collectives of a stuck job: what each rank recorded, and which rank the others wait for."""
