"""What the fleet's history answers: `healthd fleet NAME`, a module each. Their SQL is DuckDB's alone."""
