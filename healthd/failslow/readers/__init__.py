"""Readers for files with iteration times or operations."""
