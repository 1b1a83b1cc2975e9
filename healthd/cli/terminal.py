"""Output of a command: text on standard output, one sentence on standard error, and an exit status."""

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

# C0 and C1 controls except tab and line feed, and ESC unless it starts a colour sequence (ECMA-48, "8.3.117 SGR").
CONTROL_CHARACTERS = regex(r"[\x00-\x08\x0b-\x1a\x1c-\x1f\x7f-\x9f]|\x1b(?!\[[0-9;]{1,16}m)")

OK, REFUSED, UNKNOWN, USAGE_ERROR, INTERRUPTED = 0, 1, 3, 64, 130
HEALTH_STATUS = {"healthy": 0, "warning": 1, "degraded": 2, "unhealthy": 2, "unknown": 3}


class Stop(HealthdError):
    """Ends the command with an exit status and one sentence for the user."""

    def __init__(self, sentence: str, status: int = USAGE_ERROR) -> None:
        super().__init__(sentence)
        self.status = status


def prepare() -> None:
    """Prepare the standard streams.

    With LANG=C, characters that cannot be encoded are printed as question marks and do not cause a traceback. A closed
    standard stream is replaced by /dev/null, so that no socket gets the stream's descriptor number.
    """
    for descriptor in (0, 1, 2):
        try:
            os.fstat(descriptor)
        except OSError:
            opened = os.open(os.devnull, os.O_RDWR)  # gets the lowest free number: that of this stream
            os.set_inheritable(opened, True)
    if sys.stderr is None:  # standard error is closed; without this, errors would be printed on standard output
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115 -- open until this process ends
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")


def write_output(text: str, status: int = OK) -> int:
    """Write to standard output and return `status`. A closed output is ignored."""
    if sys.stdout is not None:
        _write(text)
    return status


def write_stream(texts: Iterable[str]) -> None:
    """Write each text as soon as it is available. Stop when the output is closed."""
    for text in texts:
        if not _write(text):
            return


def _write(text: str) -> bool:
    """Write to standard output. Return False if the output is closed."""
    try:
        sys.stdout.write(harmless(text))
        sys.stdout.flush()
        return True
    except OSError as error:
        # Discard the rest of the buffer; otherwise the interpreter reports an error when it exits.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if not isinstance(error, BrokenPipeError):
            raise Stop(f"healthd: standard output cannot be written: {error.strerror}", UNKNOWN) from None
        return False


def harmless(text: str) -> str:
    """Return the text without control characters, except line feeds, tabs and render.py's colours.

    External text should be made printable where it is rendered. This function is a safeguard for renderers that fail to
    do so.
    """
    return CONTROL_CHARACTERS.sub("?", text)


def write_error(sentence: str, status: int = OK) -> int:
    """Write one line to standard error and return `status`."""
    from healthd.common.page import plain

    with suppress(OSError):  # without a reader, the exit status is enough
        print(plain(sentence), file=sys.stderr, flush=True)
    return status


def usage(text: str) -> int:
    """Write the usage to standard error when required arguments are missing. Return USAGE_ERROR."""
    with suppress(OSError):
        print(text, end="", file=sys.stderr, flush=True)
    return USAGE_ERROR


def page() -> Page:
    """Return the page settings for standard output.

    On a terminal, the page has the terminal's width and wraps long rows. The page is in colour unless NO_COLOR is set
    (no-color.org).
    """
    from healthd.common.page import Page

    terminal = sys.stdout is not None and sys.stdout.isatty()
    colour = terminal and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"
    return Page(_columns(), colour, fold=terminal)


def _columns() -> int:
    """Return the terminal width, like shutil.get_terminal_size((100, 24)) but without importing bz2 and lzma."""
    columns = os.environ.get("COLUMNS", "")
    if is_decimal(columns) and int(columns) > 0:
        return int(columns)
    try:
        return os.get_terminal_size(sys.__stdout__.fileno()).columns or 100  # type: ignore[union-attr]
    except (AttributeError, ValueError, OSError):  # closed, or not a terminal
        return 100


def as_json(document: Any) -> str:
    import json

    return json.dumps(document, indent=2) + "\n"


PIECES_PER_BATCH = 10_000  # pieces of JSON, a few characters each


def json_pieces(document: Any) -> Iterator[str]:
    """Yield the document as JSON in pieces, so that the whole text of a large document is never in memory.

    A number that JSON cannot represent (NaN, infinity) becomes null. This also changes `document`.
    """
    import json
    from itertools import islice

    pieces = json.JSONEncoder(indent=2, allow_nan=False).iterencode(_finite(document))
    while batch := list(islice(pieces, PIECES_PER_BATCH)):
        yield "".join(batch)
    yield "\n"


def _finite(value: Any) -> Any:
    """Replace numbers that are not finite with None, in dicts and lists."""
    if isinstance(value, float):
        return value if isfinite(value) else None
    if isinstance(value, tuple):
        return tuple(_finite(item) for item in value)
    if isinstance(value, (dict, list)):
        for key, item in value.items() if isinstance(value, dict) else enumerate(value):
            value[key] = _finite(item)
    return value
