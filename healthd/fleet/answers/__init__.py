"""The answers of `healthd fleet NAME`, one module each. Their SQL is DuckDB's."""
