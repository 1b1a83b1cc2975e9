"""Parses messages from ranks. These functions are pure: they take untrusted bytes and return a value or None.

healthd/client.py defines the format. It imports nothing from healthd, so that a job can copy the file. A test packs
messages with it and parses them with this module.
"""

from __future__ import annotations

import math
from struct import Struct
from typing import NamedTuple

MAGIC = b"hfs1"
_FORMAT = Struct("<4siiqiddd")
MAX_BYTES = 256  # longer messages are dropped; later versions may append fields
MAX_SECONDS = 7 * 86400.0
MIN_SECONDS = 1e-6
MAX_STEPS = 10**7


class StepMessage(NamedTuple):
    """A rank's message about its steps.

    Attributes:
        rank, local_rank: as reported by the rank, -1 if not reported.
        steps: number of steps in this message.
        seconds: mean duration of a step.
        busy, wait: mean time of the rank's own work and of waiting, or None if not reported.
    """

    rank: int
    local_rank: int
    step: int
    steps: int
    seconds: float
    busy: float | None
    wait: float | None


def parse(message: bytes) -> StepMessage | None:
    """Return the message, or None if it is malformed or a value is out of range."""
    if message[:4] != MAGIC or not _FORMAT.size <= len(message) <= MAX_BYTES:
        return None
    _, rank, local_rank, step, steps, seconds, busy, wait = _FORMAT.unpack_from(message)
    # Written so that NaN is also rejected.
    if not (MIN_SECONDS <= seconds <= MAX_SECONDS and 1 <= steps <= MAX_STEPS and rank >= -1 and local_rank >= -1):
        return None
    return StepMessage(rank, local_rank, step, steps, seconds, _optional_seconds(busy), _optional_seconds(wait))


def _optional_seconds(seconds: float) -> float | None:
    """Return the time, or None if it is not reported or out of range. 0 is valid."""
    return seconds if math.isfinite(seconds) and 0 <= seconds <= MAX_SECONDS else None
