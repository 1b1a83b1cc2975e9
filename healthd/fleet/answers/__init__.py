"""Answers of `healthd fleet NAME`, one module each. Their SQL is in `healthd/fleet/sql/answers/`."""
