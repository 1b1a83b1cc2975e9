"""The tools that measure, one per file: their commands and the parsers of their output."""
