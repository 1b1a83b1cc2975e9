"""What the daemon reports: status, explanations, log, systemd."""
