"""No input ends the daemon. The reader of an input (a request, a kernel line, the worker's answer, Slurm's text, a
file) refuses a bad one in a sentence. Behind each of these boundaries stands a guard for inputs that its reader did not
think of: the one input is dropped, counted and shown, and the log gets the traceback once.
"""

from __future__ import annotations

import functools
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, ParamSpec, TypeVar

from healthd.common.text import printable

if TYPE_CHECKING:
    import logging

# The boundaries, as metrics and troubles name them.
SOCKET, KERNEL_LOG, WORKER, SLURM, LEDGER = "socket", "kernel_log", "worker", "slurm", "ledger"
HOT_UNPLUG, METRICS, STREAM, FAILSLOW, LOG = "device_removals", "metrics", "stream", "failslow", "log"
SHOWN_SECONDS = 24 * 3600.0  # a trouble is shown for so long after the last drop
MOST_TOLD = 200  # at most so many places in the program are logged; more would flood the log

P = ParamSpec("P")
R = TypeVar("R")

# Since the start of this process: how many inputs each boundary dropped, and when and why it dropped the last one.
dropped: Counter[str] = Counter()
_last: dict[str, tuple[float, str]] = {}
_told: set[tuple[str, str, str, int]] = set()


def log() -> logging.Logger:
    """The daemon's. It is loaded here since a worker, which imports this too, hardly ever has a word to say."""
    import logging

    return logging.getLogger("healthd")


def drop(boundary: str, error: Exception, what: object = "") -> None:
    """Count a mistake, show it from now on, and log it with its traceback, once for each place in the program that
    raises it. `what`: the input, for the log."""
    import traceback

    dropped[boundary] += 1
    _last[boundary] = (time.time(), words(error))
    *_, frame = traceback.extract_tb(error.__traceback__) or [traceback.FrameSummary("?", 0, "?")]
    place = (boundary, type(error).__name__, frame.filename, frame.lineno or 0)
    if place not in _told and len(_told) < MOST_TOLD:
        _told.add(place)
        about = f" with {_shown(what)}" if what else ""
        log().error("%s: left out, healthd makes a mistake%s: %s", boundary, about, words(error), exc_info=error)


@contextmanager
def at(boundary: str, what: object = "") -> Iterator[None]:
    """`with guard.at(SOCKET, request):` an exception inside drops the input."""
    try:
        yield
    except Exception as error:  # not BaseException: a signal or an exit ends the program
        drop(boundary, error, what)


def never_raises(boundary: str) -> Callable[[Callable[P, R | None]], Callable[P, R | None]]:
    """For a function whose first argument is text from outside: where it fails, it gives None as for unknown text."""

    def decorate(read: Callable[P, R | None]) -> Callable[P, R | None]:
        @functools.wraps(read)
        def guarded(*args: P.args, **kwargs: P.kwargs) -> R | None:
            try:
                return read(*args, **kwargs)
            except Exception as error:
                drop(boundary, error, args[0])
                return None

        return guarded

    return decorate


def problems(now: float) -> Iterator[str]:
    """One sentence for each boundary that dropped an input of late."""
    for boundary, (when, why) in _last.items():
        if now - when < SHOWN_SECONDS:
            count = dropped[boundary]
            things = "1 input was" if count == 1 else f"{count} inputs were"
            yield f"{boundary}: {things} dropped by a mistake in healthd, the last by {why}; its log has more"


def words(error: BaseException) -> str:
    """ "ValueError: not a number", on one line of bounded length, whatever the input put into it."""
    try:
        text = printable(str(error)[:200])
    except Exception:  # a foreign error may fail in its own __str__
        text = ""
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def _shown(what: object) -> str:
    try:
        return f"{what!r:.200}"
    except Exception:
        return f"a {type(what).__name__} that cannot be shown"
