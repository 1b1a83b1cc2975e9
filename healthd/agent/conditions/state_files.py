"""Files for the ledger and the counters' history. store.py encodes and decodes the files. The worker copies them
without parsing.

The live ledger is a file on tmpfs (RUNTIME_DIR/ledger.json), where a commit cannot block. Each save replaces the whole
file (agent/conditions/durable_file.py), so a kill -9 leaves either the old or the new file. The worker writes a copy to
STATE_DIR, because a commit to a failing disk can hang.
"""

from __future__ import annotations

import os

from healthd.agent.conditions.durable_file import read_whole
from healthd.common.errors import HealthdError


class LedgerError(HealthdError):
    """Raised if a ledger cannot be read. The message is one sentence."""


def read_text(path: str) -> str | None:
    """Return the text of a file, or None if it does not exist. Raises LedgerError if it is unreadable or untrusted."""
    try:
        return read_whole(path)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise LedgerError(f"{path}: cannot be read: {error.strerror}") from None


def set_aside(path: str) -> str:
    """Move an unreadable file out of the way, for later inspection. Return the new name."""
    aside = f"{path}.unreadable"
    os.replace(path, aside)
    return aside
