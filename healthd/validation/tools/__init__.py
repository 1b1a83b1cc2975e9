"""Measuring tools, one per file: their commands, and parsers for their output."""
