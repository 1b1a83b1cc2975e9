"""JSON text of the ledger and of the counters' past. state_files.py reads and writes the files."""

from __future__ import annotations

from collections.abc import Mapping

from msgspec import Struct

from healthd.agent.conditions.ledger import VERSION, Ledger
from healthd.agent.conditions.state_files import LedgerError
from healthd.common import history, values
from healthd.common.values import DecodeError

FILE = "ledger.json"
PAST_FILE = "past.json"


class _Version(Struct):
    version: int = VERSION


def encode(ledger: Ledger) -> bytes:
    return values.encode(ledger)


def decode(text: str | bytes, where: str) -> Ledger:
    """Raises LedgerError in one sentence."""
    try:
        if (version := values.decode(_Version, text).version) != VERSION:
            raise LedgerError(f"{where}: is of version {version}, this healthd reads version {VERSION}")
        return values.decode(Ledger, text)
    except DecodeError as error:
        raise LedgerError(f"{where}: is not a ledger: {error}") from None


def encode_past(past: Mapping[str, str]) -> bytes:
    """`past`: check -> its store of counters, as the worker encoded it (history.py)."""
    return values.encode(past)


def decode_past(text: str | bytes, where: str) -> dict[str, str]:
    """Raises LedgerError, also for a store that the worker could not read."""
    try:
        past = values.decode(dict[str, str], text)
        for store in past.values():
            history.decode(store)
    except DecodeError as error:
        raise LedgerError(f"{where}: is not a store of counters: {error}") from None
    return past
