"""The answers as chapters of the report: what to say of each, its tables and its charts."""
