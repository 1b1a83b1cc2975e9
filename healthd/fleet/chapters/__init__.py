"""The answers as chapters of the report: text, tables and charts."""
