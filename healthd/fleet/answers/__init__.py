"""The answers that `healthd fleet NAME` gives, one module each. Their SQL is in `healthd/fleet/sql/answers/`."""
