"""What healthd says: status, metrics, systemd, the control socket, what people read."""
