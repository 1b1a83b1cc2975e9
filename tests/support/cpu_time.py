"""How long something computes."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable

REFERENCE_SECONDS = 0.03  # what `_reference` takes on a core that has nothing else to do


def cpu_seconds(work: Callable[[], object], enough: float) -> float:
    """The best of three, of this process's own time: what is done once (a pattern is compiled) does not count, nor a
    collection of all the garbage of the tests before. What takes `enough` or more is counted as on a machine as fast
    as `_reference` says: a slow one does not count either, nor neighbours who share a core's caches."""
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
