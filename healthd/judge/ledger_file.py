"""The ledger and the counters' past as text, and their files.

The live ledger is a file on tmpfs (RUNTIME_DIR/ledger.json), where a commit cannot block. Each save replaces it whole,
so a kill -9 leaves the last one or the new one. The worker writes a copy to STATE_DIR, since a commit to a dying disk
can hang.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping

from healthd.convert import dump, load
from healthd.errors import HealthdError
from healthd.judge.ledger import VERSION, Ledger
from healthd.past import decode as decode_store

FILE = "ledger.json"
PAST_FILE = "past.json"


class LedgerError(HealthdError):
    """A ledger that cannot be read, in one sentence."""


def encode(ledger: Ledger) -> str:
    return json.dumps(dump(ledger), separators=(",", ":"))


def decode(text: str, where: str) -> Ledger:
    """Raises LedgerError in one sentence."""
    try:
        data = json.loads(text)
        if isinstance(data, dict) and data.get("version", VERSION) != VERSION:
            raise LedgerError(f"{where}: is of version {data['version']}, this healthd reads version {VERSION}")
        return load(Ledger, data)
    except (ValueError, OverflowError, RecursionError) as error:  # ConvertError is a ValueError
        raise LedgerError(f"{where}: is not a ledger: {error}") from None


def encode_past(past: Mapping[str, str]) -> str:
    """`past`: check -> its store of counters, as the worker encoded it (past.py)."""
    return json.dumps(past, separators=(",", ":"))


def decode_past(text: str, where: str) -> dict[str, str]:
    """Raises LedgerError also for a store in it that the worker could not read."""
    try:
        past = json.loads(text)
        if not isinstance(past, dict) or not all(isinstance(store, str) for store in past.values()):
            raise ValueError("must be a table of texts")
        for store in past.values():
            decode_store(store)
    except (ValueError, RecursionError) as error:
        raise LedgerError(f"{where}: is not a store of counters: {error}") from None
    return past


def read_text(path: str) -> str | None:
    """A file's text; None if there is none. Raises LedgerError where it cannot be read."""
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            return file.read()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise LedgerError(f"{path}: cannot be read: {error.strerror}") from None


def set_aside(path: str) -> str:
    """Move a file that cannot be read out of the way, for a person to look at. Returns its new name."""
    aside = f"{path}.unreadable"
    os.replace(path, aside)
    return aside
