"""The answers of `healthd fleet NAME`, one module each; their SQL is in `healthd/fleet/sql/answers/`."""
