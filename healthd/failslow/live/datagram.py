"""What a rank's message says. Pure: bytes of others in, a value or nothing out.

The format is in healthd/client.py, which stands alone so that it can be copied; a test packs there and reads here.
"""

from __future__ import annotations

import math
from struct import Struct
from typing import NamedTuple

STEP = b"hfs1"
_FORM = Struct("<4siiqiddd")
MOST_BYTES = 256  # a longer one is nobody's who means well; later versions may add fields behind
MOST_SECONDS = 7 * 86400.0
LEAST_SECONDS = 1e-6
MOST_STEPS = 10**7


class Step(NamedTuple):
    """rank, local_rank: as the rank names itself, -1 = it does not. steps: how many of them it stands for. seconds: of
    one step in the mean; busy, wait: the same of its own work and of waiting, None if not told."""

    rank: int
    local_rank: int
    step: int
    steps: int
    seconds: float
    busy: float | None
    wait: float | None


def read(message: bytes) -> Step | None:
    """Return the message, or None if it is malformed or a value is out of range."""
    if message[:4] != STEP or not _FORM.size <= len(message) <= MOST_BYTES:
        return None
    _, rank, local_rank, step, steps, seconds, busy, wait = _FORM.unpack_from(message)
    # Written so that NaN is refused, too.
    if not (LEAST_SECONDS <= seconds <= MOST_SECONDS and 1 <= steps <= MOST_STEPS and rank >= -1 and local_rank >= -1):
        return None
    return Step(rank, local_rank, step, steps, seconds, _part(busy), _part(wait))


def _part(seconds: float) -> float | None:
    """A part of an iteration; it may be nothing. What cannot be is as good as not told."""
    return seconds if math.isfinite(seconds) and 0 <= seconds <= MOST_SECONDS else None
