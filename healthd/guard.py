"""No input ends the daemon. What comes from outside (a request, a kernel line, the worker's answer, Slurm's text, a
file) is refused in a sentence by whoever reads it. A guard stands behind each of these boundaries for what its reader
did not think of: that one thing is dropped, counted and shown, and the log gets the traceback once.
"""

from __future__ import annotations

import functools
import logging
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import ParamSpec, TypeVar

from healthd.text import printable

log = logging.getLogger("healthd")

# What a person may meet in metrics and troubles.
SOCKET, KERNEL_LOG, WORKER, SLURM, LEDGER = "socket", "kernel_log", "worker", "slurm", "ledger"
HOT_UNPLUG, METRICS = "device_removals", "metrics"
SHOWN_SECONDS = 24 * 3600.0  # a trouble stands for so long after the last one was dropped
MOST_TOLD = 200  # places in the program whose mistake was written down; more would be a log of its own

P = ParamSpec("P")
R = TypeVar("R")

# Of this process since its start, like its log: by boundary how many, and when and why the last one.
dropped: Counter[str] = Counter()
_last: dict[str, tuple[float, str]] = {}
_told: set[tuple[str, str, str, int]] = set()


def drop(boundary: str, error: Exception, what: object = "") -> None:
    """Count a mistake, show it from now on, and log it with its traceback: once for each place in the program that
    raises. `what`: the input, for the log."""
    dropped[boundary] += 1
    _last[boundary] = (time.time(), words(error))
    *_, frame = traceback.extract_tb(error.__traceback__) or [traceback.FrameSummary("?", 0, "?")]
    place = (boundary, type(error).__name__, frame.filename, frame.lineno or 0)
    if place not in _told and len(_told) < MOST_TOLD:
        _told.add(place)
        about = f" with {_shown(what)}" if what else ""
        log.error("%s: left out, healthd makes a mistake%s: %s", boundary, about, words(error), exc_info=error)


@contextmanager
def at(boundary: str, what: object = "") -> Iterator[None]:
    """`with guard.at(SOCKET, request):` what raises in it is dropped."""
    try:
        yield
    except Exception as error:  # not what is meant to end the program: a signal, an exit
        drop(boundary, error, what)


def never_raises(boundary: str) -> Callable[[Callable[P, R | None]], Callable[P, R | None]]:
    """For a function that reads text of others, the first argument: what it stumbles over is nothing that it knows."""

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


def troubles(now: float) -> Iterator[str]:
    """One sentence for each boundary at which something was dropped of late."""
    for boundary, (when, why) in _last.items():
        if now - when < SHOWN_SECONDS:
            count = dropped[boundary]
            things = "1 input was" if count == 1 else f"{count} inputs were"
            yield f"{boundary}: {things} dropped by a mistake in healthd, the last by {why}; its log has more"


def words(error: BaseException) -> str:
    """ "ValueError: not a number", on one line of bounded length, whatever the input put into it."""
    try:
        text = printable(str(error)[:200])
    except Exception:  # an error of others may fail to tell itself
        text = ""
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def _shown(what: object) -> str:
    try:
        return f"{what!r:.200}"
    except Exception:
        return f"a {type(what).__name__} that cannot be shown"
