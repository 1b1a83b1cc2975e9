"""Text that comes from elsewhere: a kernel line, a program, a file."""

from __future__ import annotations


def printable(text: str) -> str:
    """The same length, and nothing in it that ends a line or steers a terminal."""
    return "".join(c if c.isprintable() else "?" for c in text)
