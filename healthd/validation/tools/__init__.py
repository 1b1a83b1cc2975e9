"""Measuring tools, one per file: their commands and the parsers of their output."""
