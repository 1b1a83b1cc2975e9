"""When this node's prolog refused jobs because of our verdict, as it wrote down, without asking Slurm.

RUNTIME_DIR/refused holds one line for each refusal, "EPOCH_SECONDS JOB", the last some dozens of them.
"""

from __future__ import annotations

import os

from healthd.common import ownership
from healthd.common.text import is_decimal

FILE = "refused"
LINES = 64  # the prolog keeps fewer
MOST_BYTES = 16 << 10


def told_by_prolog(runtime_dir: str) -> tuple[float, ...]:
    """Epoch seconds; none of a file that is not there, or that others could change."""
    try:
        with ownership.opened(os.path.join(runtime_dir, FILE)) as descriptor:
            return _times(os.read(descriptor, MOST_BYTES).decode("ascii", "replace"))
    except OSError:
        return ()


def _times(text: str) -> tuple[float, ...]:
    words = [line.partition(" ")[0] for line in text.split("\n")[-LINES:]]
    return tuple(float(word) for word in words if is_decimal(word) and len(word) <= 12)
