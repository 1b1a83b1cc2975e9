"""What a command says and how it ends: text on standard output, one sentence on standard error, an exit status."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from healthd.errors import HealthdError

if TYPE_CHECKING:
    from healthd.say.render import Page

OK, REFUSED, UNKNOWN, WRONG_USE, INTERRUPTED = 0, 1, 3, 64, 130
OF_HEALTH = {"healthy": 0, "warning": 1, "degraded": 2, "unhealthy": 2, "unknown": 3}


class Stop(HealthdError):
    """The command ends here, with one sentence for the person who typed it, and the exit status."""

    def __init__(self, sentence: str, status: int = WRONG_USE) -> None:
        super().__init__(sentence)
        self.status = status


def prepare() -> None:
    """With LANG=C print a question mark rather than a traceback. A closed standard stream becomes /dev/null, so that no
    socket gets its number."""
    for descriptor in (0, 1, 2):
        try:
            os.fstat(descriptor)
        except OSError:
            opened = os.open(os.devnull, os.O_RDWR)  # it gets the lowest free number: this one
            os.set_inheritable(opened, True)
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")


def say(text: str, status: int = OK) -> int:
    """Write to standard output, and return `status`. If nobody reads any more, end without a complaint."""
    if sys.stdout is None:
        return status
    try:
        sys.stdout.write(text)
        sys.stdout.flush()
    except OSError as error:
        # Drop what is left in the buffer, else the interpreter complains of it at its end.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if not isinstance(error, BrokenPipeError):
            raise Stop(f"healthd: standard output cannot be written: {error.strerror}", UNKNOWN) from None
    return status


def stream(texts: Iterable[str]) -> None:
    """Write the texts as they come; end when nobody reads any more."""
    for text in texts:
        try:
            sys.stdout.write(text)
            sys.stdout.flush()
        except BrokenPipeError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return
        except OSError as error:
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            raise Stop(f"healthd: standard output cannot be written: {error.strerror}", UNKNOWN) from None


def complain(sentence: str, status: int = OK) -> int:
    """Write one line to standard error, and return `status`."""
    from healthd.say.render import plain

    with suppress(OSError):  # nobody reads it: the status says it too
        print(plain(sentence), file=sys.stderr, flush=True)
    return status


def page() -> Page:
    """The page of standard output: as wide as the terminal, where long rows are folded; in colour on a terminal, unless
    NO_COLOR is set (no-color.org)."""
    import shutil

    from healthd.say.render import Page

    terminal = sys.stdout is not None and sys.stdout.isatty()
    colour = terminal and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"
    return Page(shutil.get_terminal_size((100, 24)).columns, colour, fold=terminal)


def as_json(document: Any) -> str:
    import json

    return json.dumps(document, indent=2) + "\n"
