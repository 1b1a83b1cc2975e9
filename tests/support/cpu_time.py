"""Measurement of CPU time."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable

REFERENCE_SECONDS = 0.03  # time of `_reference` on an idle core


def cpu_seconds(work: Callable[[], object], enough: float) -> float:
    """Return the least CPU time of this process in three calls, in seconds.

    Costs of the first call (compiling a pattern) and garbage collections do not count. A time of `enough` or more is
    scaled to a machine as fast as REFERENCE_SECONDS, so that slow cores and shared caches do not count either.
    """
    best = float("inf")
    for _ in range(3):
        gc.disable()
        try:
            spent = _spent(work)
            if spent >= enough:
                spent /= max(1.0, _spent(_reference) / REFERENCE_SECONDS)
        finally:
            gc.enable()
        best = min(best, spent)
        if best < enough:
            break
    return best


def _spent(work: Callable[[], object]) -> float:
    began = time.process_time()
    work()
    return time.process_time() - began


def _reference() -> None:
    texts = [f"{number:x}" for number in range(120_000)]
    "".join(texts).count("7f")
    sorted(texts)
