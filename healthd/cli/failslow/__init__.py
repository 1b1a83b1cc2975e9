"""Commands of `healthd failslow`."""
