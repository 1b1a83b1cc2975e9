"""Evidence of a fault: what is saved, when, and where. Almost all of it runs in a separate program."""
