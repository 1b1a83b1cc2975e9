"""The answers of `healthd fleet NAME`, one module per answer. Their SQL is in `healthd/fleet/sql/answers/`."""
