"""What the ranks of a stuck job wrote of their collectives, and who waits there for whom."""
