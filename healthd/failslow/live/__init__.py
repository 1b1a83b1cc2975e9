"""What makes jobs on this node slow, while they run: a process of its own, beside the daemon, where a site wants it."""
