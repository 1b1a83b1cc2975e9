"""Readers for files that contain iteration times or operations."""
