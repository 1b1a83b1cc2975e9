r"""External text: a kernel line, a program's output, a file.

Text that a user may have written is matched as ASCII. In Python's default mode, "\d" and int() accept digits of every
script, "\s" and "\w" accept blanks and letters of every script, and "(?i)k" accepts the kelvin sign.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cached_property

_uncompiled: set[LazyPattern] = set()
_compile_eagerly = False


class LazyPattern:
    """A re.Pattern[str] that is compiled at its first use.

    A command uses few of the patterns that it imports. Compiling all patterns would take a quarter of the import time.
    """

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
        setattr(self, name, found)  # later accesses are as fast as for a compiled pattern
        return found


def regex(pattern: str, flags: int = 0) -> re.Pattern[str]:
    """Return a pattern for external text, with ASCII classes and ASCII case folding.

    Raises re.error at its first use.
    """
    if _compile_eagerly:
        return re.compile(pattern, flags | re.ASCII)
    return LazyPattern(pattern, flags | re.ASCII)  # type: ignore[return-value]  # it behaves like one


def compile_patterns() -> int:
    """Compile all pending patterns and return their number. Later patterns are compiled when they are created.

    The daemon calls this at startup, so that no kernel line has to wait for compilation. Raises re.error.
    """
    global _compile_eagerly
    _compile_eagerly = True
    patterns = list(_uncompiled)
    for pattern in patterns:
        _ = pattern.compiled
    return len(patterns)


@contextmanager
def compile_patterns_eagerly() -> Iterator[None]:
    """Compile patterns when they are created. An error in a site's file is then raised while the file is imported."""
    global _compile_eagerly
    previous, _compile_eagerly = _compile_eagerly, True
    try:
        yield
    finally:
        _compile_eagerly = previous


def is_decimal(text: str) -> bool:
    """Return True if the text consists only of the digits 0 to 9."""
    return text.isascii() and text.isdecimal()


_CLASS = regex(
    r"(?:OSError|IOError|TimeoutError|RuntimeError|ValueError|FileNotFoundError|FileExistsError|PermissionError"
    r"|NotADirectoryError|IsADirectoryError|ProcessLookupError|InterruptedError|BlockingIOError|ChildProcessError"
    r"|Connection(?:Refused|Reset|Aborted)?Error|BrokenPipeError): (?:\[Errno \d{1,4}\] )?"
)


def strip_error_class(error: str) -> str:
    """Return a text such as "TimeoutError: /bin/sh: did not end" without the name of Python's class, if the rest is
    sufficient.

    A name without text, and classes that hint at a bug in a program (KeyError), are kept.
    """
    return _CLASS.sub("", error, count=1) if _CLASS.match(error) else error


def printable(text: str) -> str:
    """Return the text at the same length, with line breaks and terminal control characters replaced."""
    return text if text.isprintable() else "".join(c if c.isprintable() else "?" for c in text)


def redacted(text: str) -> str:
    """Return an external field for logs and mails.

    The result is the field's text if it has only digits and date punctuation, otherwise the text's length.

    The field may be a secret in the wrong column.
    """
    if len(text) <= 40 and regex(r"[0-9T:.,+Z_ /-]*").fullmatch(text):
        return repr(text)
    return f"{len(text):,} characters"
