"""The files of the ledger and of the counters' past. store.py encodes and decodes their content; the worker copies the
files without it.

The live ledger is a file on tmpfs (RUNTIME_DIR/ledger.json), where a commit cannot block. Each save replaces it whole
(agent/conditions/durable_file.py), so a kill -9 leaves the last one or the new one. The worker writes a copy to
STATE_DIR, since a commit to a dying disk can hang.
"""

from __future__ import annotations

import os

from healthd.agent.conditions.durable_file import read_whole
from healthd.common.errors import HealthdError


class LedgerError(HealthdError):
    """A ledger that cannot be read, in one sentence."""


def read_text(path: str) -> str | None:
    """A file's text; None if there is none. Raises LedgerError where it cannot be read, or others may write it."""
    try:
        return read_whole(path)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise LedgerError(f"{path}: cannot be read: {error.strerror}") from None


def set_aside(path: str) -> str:
    """Move a file that cannot be read out of the way, for a person to look at. Returns its new name."""
    aside = f"{path}.unreadable"
    os.replace(path, aside)
    return aside
