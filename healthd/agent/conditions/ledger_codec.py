"""JSON text of the ledger and of the counters' past. state_files.py reads and writes the files."""

from __future__ import annotations

import itertools
import json
import operator
from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields, replace
from typing import Any, TypeAlias

from healthd.agent.conditions.ledger import VERSION, Ledger
from healthd.agent.conditions.state_files import LedgerError
from healthd.common.codec import dump, load
from healthd.common.history import decode as decode_store
from healthd.events.emitted import Told, ToldCondition
from healthd.events.outbox import Outbox

FILE = "ledger.json"
PAST_FILE = "past.json"

# What a damaged text may raise: valid JSON may have any value in any place. ConvertError is a ValueError.
_DAMAGED = (ValueError, OverflowError, RecursionError, TypeError, LookupError, AttributeError)

# Fields with many items, of which few change between two saves.
MANY = ("conditions", "cleared", "events")
PARTS_A_PIECE = 64


class Kept:
    """Texts of the values that were in the ledger when it was encoded last, about as large as the file.

    The values are kept beside their texts, so that an id in use here cannot belong to a newer value.
    """

    def __init__(self) -> None:
        self._of: dict[str, tuple[tuple[Any, ...], list[bytes]]] = {}

    def texts(self, field: str, values: tuple[Any, ...], text: Callable[[Any], bytes]) -> list[bytes]:
        """Return `text(value)` for each of the immutable values of a field."""
        before, texts = self._of.get(field, ((), []))
        begin = _alike(before, values)
        end = min(_alike(before[::-1], values[::-1]), len(before) - begin, len(values) - begin)
        known = dict(zip(map(id, before[begin : len(before) - end]), texts[begin:], strict=False))
        between = values[begin : len(values) - end]
        texts = [
            *texts[:begin],
            *(known[id(value)] if id(value) in known else text(value) for value in between),
            *texts[len(before) - end :],
        ]
        self._of[field] = (values, texts)
        return texts


def _alike(one: tuple[Any, ...], other: tuple[Any, ...]) -> int:
    """How many of the first items are the same objects."""
    same = [*map(operator.is_, one, other), False]
    return same.index(False)


def encode(ledger: Ledger) -> str:
    return b"".join(in_pieces(ledger, Kept())).decode()


def in_pieces(ledger: Ledger, kept: Kept) -> Iterator[bytes]:
    """Yield the text of the ledger, encoding again only what changed since `kept` was used last.

    The text comes in pieces because filling a new megabyte takes longer than everything else here.
    """
    texts = {
        name: _joined(kept.texts(name, getattr(ledger, name), lambda item: b"," + _text(dump(item))))
        for name in MANY
        if getattr(ledger, name)
    }
    texts |= {"outbox": _outbox(ledger.outbox, kept), "told": _told(ledger.told, kept)}
    return _pieces(_table(_fields(ledger, _dump_without(ledger, *texts), texts)))


def _outbox(outbox: Outbox, kept: Kept) -> Parts:
    lines = kept.texts("lines", outbox.lines, lambda line: b"," + _text(line))
    return _table(_fields(outbox, _dump_without(outbox, "lines"), {"lines": _joined(lines)} if lines else {}))


def _told(told: Told, kept: Kept) -> Parts:
    said = kept.texts("told", tuple(itertools.chain.from_iterable(told.conditions.items())), _name_or_told)
    conditions = {"conditions": _joined(said, b"{}")} if said else {}
    return _table(_fields(told, _dump_without(told, "conditions"), conditions))


def _name_or_told(item: str | ToldCondition) -> bytes:
    return b",%s:" % _text(item) if isinstance(item, str) else _text(dump(item))


def _dump_without(value: Any, *names: str) -> Any:
    """The plain data of a dataclass without some of its fields."""
    data = dump(replace(value, **{name: type(getattr(value, name))() for name in names}))
    return {name: item for name, item in data.items() if name not in names}


# A text in parts, which are put together as late as can be.
Parts: TypeAlias = "list[bytes]"


def _fields(value: Any, rest: Mapping[str, Any], many: Mapping[str, Parts]) -> dict[str, Parts]:
    """The text of each field of a dataclass, in their order. `rest`: what `dump` gave; `many` have their text."""
    names = [f.name for f in fields(value) if f.name in many or f.name in rest]
    return {name: many[name] if name in many else [_text(rest[name])] for name in names}


def _joined(texts: Parts, brackets: bytes = b"[]") -> Parts:
    """What stands in brackets; each of the texts begins with a comma."""
    return [brackets[:1], *[text[1:] for text in texts[:1]], *texts[1:], brackets[1:]]


def _table(texts: Mapping[str, Parts]) -> Parts:
    parts: Parts = []
    for name, text in texts.items():
        parts.append(b",%s:" % _text(name))
        parts += text
    return _joined(parts, b"{}")


def _pieces(parts: Parts) -> Iterator[bytes]:
    for begin in range(0, len(parts), PARTS_A_PIECE):
        yield b"".join(parts[begin : begin + PARTS_A_PIECE])


def _text(data: Any) -> bytes:
    return json.dumps(data, separators=(",", ":")).encode()  # ASCII


def decode(text: str, where: str) -> Ledger:
    """Raises LedgerError in one sentence."""
    try:
        data = json.loads(text)
        if isinstance(data, dict) and data.get("version", VERSION) != VERSION:
            raise LedgerError(f"{where}: is of version {data['version']}, this healthd reads version {VERSION}")
        return load(Ledger, data)
    except _DAMAGED as error:
        raise LedgerError(f"{where}: is not a ledger: {error}") from None


def encode_past(past: Mapping[str, str]) -> str:
    """`past`: check -> its store of counters, as the worker encoded it (history.py)."""
    return json.dumps(past, separators=(",", ":"))


def decode_past(text: str, where: str) -> dict[str, str]:
    """Raises LedgerError also for a store in it that the worker could not read."""
    try:
        past = json.loads(text)
        if not isinstance(past, dict) or not all(isinstance(store, str) for store in past.values()):
            raise ValueError("must be a table of texts")
        for store in past.values():
            decode_store(store)
    except _DAMAGED as error:
        raise LedgerError(f"{where}: is not a store of counters: {error}") from None
    return past
