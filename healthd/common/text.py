"""Text from outside: a kernel line, a program, a file.

What a user may have written is read as ASCII: for Python "\\d" and int() take the digits of every script, "\\s" and
"\\w" what is blank or a letter anywhere, and "(?i)k" takes the sign of the kelvin.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cached_property

_uncompiled: set[LatePattern] = set()
_at_once = False


class LatePattern:
    """Stands for a re.Pattern[str], which is made when more than its text is asked for. A command uses few of the
    patterns that it imports, and to compile them all is a quarter of what its imports cost."""

    def __init__(self, pattern: str, flags: int) -> None:
        self.pattern, self._flags = pattern, flags
        _uncompiled.add(self)

    @cached_property
    def compiled(self) -> re.Pattern[str]:
        _uncompiled.discard(self)
        return re.compile(self.pattern, self._flags)

    def __reduce__(self) -> tuple[object, ...]:
        return regex, (self.pattern, self._flags)

    def __getattr__(self, name: str) -> object:
        found = getattr(self.compiled, name)
        setattr(self, name, found)  # the next time it costs what it does with a compiled pattern
        return found


def regex(pattern: str, flags: int = 0) -> re.Pattern[str]:
    """A pattern for text of others: its classes and its ignored case are ASCII's. Raises re.error at its first use."""
    if _at_once:
        return re.compile(pattern, flags | re.ASCII)
    return LatePattern(pattern, flags | re.ASCII)  # type: ignore[return-value]  # it behaves as one


def compile_patterns() -> int:
    """Compile those that are not yet, and from now on each where it is made: a daemon has no time for it when a line
    comes. Returns how many there were. Raises re.error."""
    global _at_once
    _at_once = True
    waited = list(_uncompiled)
    for late in waited:
        _ = late.compiled
    return len(waited)


@contextmanager
def patterns_compiled_where_made() -> Iterator[None]:
    """Meanwhile regex() compiles at once, and raises re.error: so a site's file is refused where it is imported."""
    global _at_once
    before, _at_once = _at_once, True
    try:
        yield
    finally:
        _at_once = before


def is_decimal(text: str) -> bool:
    """Whether the text is digits 0 to 9, and nothing else: what int() reads."""
    return text.isascii() and text.isdecimal()


_CLASS = regex(
    r"(?:OSError|IOError|TimeoutError|RuntimeError|ValueError|FileNotFoundError|FileExistsError|PermissionError"
    r"|NotADirectoryError|IsADirectoryError|ProcessLookupError|InterruptedError|BlockingIOError|ChildProcessError"
    r"|Connection(?:Refused|Reset|Aborted)?Error|BrokenPipeError): (?:\[Errno \d{1,4}\] )?"
)


def without_class(error: str) -> str:
    """ "TimeoutError: /bin/sh: did not end" for people: without Python's name for it, where the sentence says enough.
    A name alone, and those that hint at a mistake in a program (KeyError), stay."""
    return _CLASS.sub("", error, count=1) if _CLASS.match(error) else error


def printable(text: str) -> str:
    """The text at the same length, without characters that end a line or control a terminal."""
    return text if text.isprintable() else "".join(c if c.isprintable() else "?" for c in text)


def described(text: str) -> str:
    """A field of others in a sentence that goes into logs and mails: what times and numbers are made of is shown; of
    all else how long it is, for it may be a secret that stands in the wrong column."""
    if len(text) <= 40 and regex(r"[0-9T:.,+Z_ /-]*").fullmatch(text):
        return repr(text)
    return f"{len(text):,} characters"
