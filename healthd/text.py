"""Text from outside: a kernel line, a program, a file."""

from __future__ import annotations


def printable(text: str) -> str:
    """The text at the same length, without characters that end a line or control a terminal."""
    return "".join(c if c.isprintable() else "?" for c in text)
