"""What happened on this node, line by line, for whoever asks later."""
