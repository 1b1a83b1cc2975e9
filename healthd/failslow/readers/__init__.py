"""Readers for files of iteration times and operations."""
