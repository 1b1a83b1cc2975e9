"""Output of a command: text on standard output, one sentence on standard error, an exit status."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Iterator
from contextlib import suppress
from math import isfinite
from typing import TYPE_CHECKING, Any

from healthd.common.errors import HealthdError
from healthd.common.text import is_decimal, regex

if TYPE_CHECKING:
    from healthd.common.page import Page

# C0 and C1 without tab and line feed, and ESC unless it begins a colour: ECMA-48, "8.3.117 SGR".
CONTROL_CHARACTERS = regex(r"[\x00-\x08\x0b-\x1a\x1c-\x1f\x7f-\x9f]|\x1b(?!\[[0-9;]{1,16}m)")

OK, REFUSED, UNKNOWN, USAGE_ERROR, INTERRUPTED = 0, 1, 3, 64, 130
HEALTH_STATUS = {"healthy": 0, "warning": 1, "degraded": 2, "unhealthy": 2, "unknown": 3}


class Stop(HealthdError):
    """End of the command, with one sentence for the user and the exit status."""

    def __init__(self, sentence: str, status: int = USAGE_ERROR) -> None:
        super().__init__(sentence)
        self.status = status


def prepare() -> None:
    """Prepare the standard streams.

    With LANG=C print a question mark rather than a traceback. A closed standard stream becomes /dev/null, so that no
    socket gets its number.
    """
    for descriptor in (0, 1, 2):
        try:
            os.fstat(descriptor)
        except OSError:
            opened = os.open(os.devnull, os.O_RDWR)  # it gets the lowest free number: this one
            os.set_inheritable(opened, True)
    if sys.stderr is None:  # it was closed; otherwise errors would be printed to standard output
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115 -- open until this process ends
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")


def write_output(text: str, status: int = OK) -> int:
    """Write to standard output, and return `status`. Without a reader, end silently."""
    if sys.stdout is not None:
        _write(text)
    return status


def write_stream(texts: Iterable[str]) -> None:
    """Write the texts as they come; end when the reader is gone."""
    for text in texts:
        if not _write(text):
            return


def _write(text: str) -> bool:
    """Write to standard output. Return False if the reader is gone."""
    try:
        sys.stdout.write(harmless(text))
        sys.stdout.flush()
        return True
    except OSError as error:
        # Discard the rest of the buffer; otherwise the interpreter reports an error at its exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if not isinstance(error, BrokenPipeError):
            raise Stop(f"healthd: standard output cannot be written: {error.strerror}", UNKNOWN) from None
        return False


def harmless(text: str) -> str:
    """Return the text without control sequences, except line ends, tabs and the colours of render.py.

    External text is made printable where it is rendered; this protects against a forgotten case.
    """
    return CONTROL_CHARACTERS.sub("?", text)


def write_error(sentence: str, status: int = OK) -> int:
    """Write one line to standard error, and return `status`."""
    from healthd.common.page import plain

    with suppress(OSError):  # without a reader, the exit status is sufficient
        print(plain(sentence), file=sys.stderr, flush=True)
    return status


def usage(text: str) -> int:
    """Write the usage to standard error after a call without required arguments. Return USAGE_ERROR."""
    with suppress(OSError):
        print(text, end="", file=sys.stderr, flush=True)
    return USAGE_ERROR


def page() -> Page:
    """Return the page of standard output.

    It is as wide as the terminal, where long rows are folded; in colour on a terminal, unless NO_COLOR is set
    (no-color.org).
    """
    from healthd.common.page import Page

    terminal = sys.stdout is not None and sys.stdout.isatty()
    colour = terminal and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"
    return Page(_columns(), colour, fold=terminal)


def _columns() -> int:
    """Return the width, like shutil.get_terminal_size((100, 24)), which would import bz2 and lzma."""
    columns = os.environ.get("COLUMNS", "")
    if is_decimal(columns) and int(columns) > 0:
        return int(columns)
    try:
        return os.get_terminal_size(sys.__stdout__.fileno()).columns or 100  # type: ignore[union-attr]
    except (AttributeError, ValueError, OSError):  # it is closed, or no terminal
        return 100


def as_json(document: Any) -> str:
    import json

    return json.dumps(document, indent=2) + "\n"


PIECES_PER_BATCH = 10_000  # of JSON, a few characters each


def json_pieces(document: Any) -> Iterator[str]:
    """Yield the document as JSON in pieces, so that a large one is never whole in memory.

    A number without a JSON form (NaN, an infinity) becomes null, in the document too.
    """
    import json
    from itertools import islice

    pieces = json.JSONEncoder(indent=2, allow_nan=False).iterencode(_finite(document))
    while batch := list(islice(pieces, PIECES_PER_BATCH)):
        yield "".join(batch)
    yield "\n"


def _finite(value: Any) -> Any:
    """Replace numbers that are not finite by None in dicts and lists."""
    if isinstance(value, float):
        return value if isfinite(value) else None
    if isinstance(value, tuple):
        return tuple(_finite(item) for item in value)
    if isinstance(value, (dict, list)):
        for key, item in value.items() if isinstance(value, dict) else enumerate(value):
            value[key] = _finite(item)
    return value
