"""The event stream: its schema, its writer and its readers."""
