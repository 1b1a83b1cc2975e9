"""`healthd scan`: what another machine's log tells."""
