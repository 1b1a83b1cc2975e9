"""Reports of the daemon: status, explanations, the log and systemd notifications."""
