"""What does not happen at once."""

from __future__ import annotations

import time
from collections.abc import Callable


def until(reached: Callable[[], object], what: str = "it happens", seconds: float = 120.0) -> None:
    """Wait until it is reached. `what`: said of what was not."""
    end = time.monotonic() + seconds
    while not reached():
        assert time.monotonic() < end, f"not within {seconds:g} s: {what}"
        time.sleep(0.02)
