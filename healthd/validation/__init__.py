"""What a node's parts can do now: measured by tools of others, beside floors, peers and its own history."""
