"""How this process' memory is given out."""

from __future__ import annotations

import ctypes
from contextlib import suppress

ARENA_MAX = -8  # M_ARENA_MAX of malloc.h: mallopt(3)


def one_for_all_threads() -> None:
    """glibc gives threads that run at the same time heaps of their own, up to eight a core, and keeps them for ever:
    after a crowd at the metrics page 3 MiB. Python's threads take turns, so one serves them all. To be called before
    there is a second thread. Other libraries than glibc have no such function, and no such heaps."""
    with suppress(AttributeError):
        ctypes.CDLL(None).mallopt(ARENA_MAX, 1)
