"""Waiting for conditions."""

from __future__ import annotations

import time
from collections.abc import Callable


def until(is_reached: Callable[[], object], condition: str = "it happens", seconds: float = 120.0) -> None:
    """Wait until `is_reached` returns true. `condition` describes it in the error."""
    end = time.monotonic() + seconds
    while not is_reached():
        assert time.monotonic() < end, f"not within {seconds:g} s: {condition}"
        time.sleep(0.02)
