"""Measurement of CPU time."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable

REFERENCE_SECONDS = 0.03  # time of `_reference` on an idle core


def cpu_seconds(work: Callable[[], object], limit: float) -> float:
    """Return the least CPU time of this process in three calls, in seconds.

    Costs of the first call (compiling a pattern) and garbage collections do not count. A time of `limit` or more is
    scaled to a machine as fast as REFERENCE_SECONDS, so that slow cores and shared caches do not count either.
    """
    best = float("inf")
    for _ in range(3):
        gc.disable()
        try:
            spent = _measure(work)
            if spent >= limit:
                spent /= max(1.0, _measure(_reference) / REFERENCE_SECONDS)
        finally:
            gc.enable()
        best = min(best, spent)
        if best < limit:
            break
    return best


def _measure(work: Callable[[], object]) -> float:
    start = time.process_time()
    work()
    return time.process_time() - start


def _reference() -> None:
    texts = [f"{number:x}" for number in range(120_000)]
    "".join(texts).count("7f")
    sorted(texts)
