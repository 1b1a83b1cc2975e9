"""Guards that keep one bad input from stopping the daemon.

The reader of an input (a request, a kernel line, the worker's reply, Slurm's output, a file) rejects bad data with a
sentence. A guard around each reader catches unexpected exceptions. The input is then dropped, counted and shown in the
status, and the traceback is logged once.
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

# Names of the boundaries in metrics and in the status.
SOCKET, KERNEL_LOG, WORKER, SLURM, LEDGER = "socket", "kernel_log", "worker", "slurm", "ledger"
HOT_UNPLUG, METRICS, STREAM, FAILSLOW, LOG = "device_removals", "metrics", "stream", "failslow", "log"
HOOKS = "hooks"
EVIDENCE = "evidence"
GPU_EVENTS = "gpu_events"
DISPLAY_SECONDS = 24 * 3600.0  # how long the status shows a problem after the last drop
MAX_LOGGED_LOCATIONS = 200  # maximum number of code locations that are logged, to protect the log

P = ParamSpec("P")
R = TypeVar("R")

# Since the start of this process: each boundary's number of dropped inputs, and the time of and reason for the last
# drop.
dropped: Counter[str] = Counter()
_last_drops: dict[str, tuple[float, str]] = {}
_logged_locations: set[tuple[str, str, str, int]] = set()


def log() -> logging.Logger:
    """Return the daemon's logger. logging is imported late, because workers also import this module but rarely log."""
    import logging

    return logging.getLogger("healthd")


def drop(boundary: str, error: Exception, item: object = "") -> None:
    """Count a dropped input and show it in the status. Log the traceback once for each place in the code.

    `item` is the input, for the log message.
    """
    import traceback

    dropped[boundary] += 1
    _last_drops[boundary] = (time.time(), describe_error(error))
    *_, frame = traceback.extract_tb(error.__traceback__) or [traceback.FrameSummary("?", 0, "?")]
    location = (boundary, type(error).__name__, frame.filename, frame.lineno or 0)
    if location not in _logged_locations and len(_logged_locations) < MAX_LOGGED_LOCATIONS:
        _logged_locations.add(location)
        context = f" with {_display(item)}" if item else ""
        log().error(
            "%s: input dropped after an internal error%s: %s", boundary, context, describe_error(error), exc_info=error
        )


@contextmanager
def dropping_errors(boundary: str, item: object = "") -> Iterator[None]:
    """Drop the input if the body raises an exception. Example: `with guard.dropping_errors(SOCKET, request):`"""
    try:
        yield
    except Exception as error:  # not BaseException, because a signal or an exit must end the program
        drop(boundary, error, item)


def never_raises(boundary: str) -> Callable[[Callable[P, R | None]], Callable[P, R | None]]:
    """Decorate a parser whose first argument is external text. If the parser raises an exception, return None, as for
    unknown text.
    """

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
    """Yield a sentence for each boundary that recently dropped an input."""
    for boundary, (when, why) in _last_drops.items():
        if now - when < DISPLAY_SECONDS:
            count = dropped[boundary]
            inputs = "1 input was" if count == 1 else f"{count} inputs were"
            yield f"{boundary}: {inputs} dropped after an internal error, most recently {why}; see healthd's log"


def describe_error(error: BaseException) -> str:
    """Return any error as one line of limited length, such as "ValueError: not a number"."""
    try:
        text = printable(str(error)[:200])
    except Exception:  # an exception from a library may fail in its own __str__
        text = ""
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def _display(item: object) -> str:
    try:
        return f"{item!r:.200}"
    except Exception:
        return f"a {type(item).__name__} that cannot be shown"
