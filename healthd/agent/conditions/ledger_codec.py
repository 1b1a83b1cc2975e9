"""The ledger and the counters' past as text. Their files: state_files.py.

An older healthd, which is started after a rollback, refuses a ledger with a field that it does not know. What the first
format did not have is therefore written beside the cursors, of which each version reads only those that it knows:

    "cursors": {"kmsg": ..., "newer_fields": {"of": CHECKSUM, "fields": [[["slurm", "drained_at"], 1800000000.0], ...]}}

An older one keeps that as it is. Its next save changes the rest, and with it the checksum: then it is no longer true.
"""

from __future__ import annotations

import itertools
import json
import operator
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields, replace
from functools import partial
from typing import Any, TypeAlias, TypeVar

from healthd.agent.conditions.ledger import VERSION, Ledger
from healthd.agent.conditions.state_files import LedgerError
from healthd.common.codec import dump, load
from healthd.common.history import decode as decode_store
from healthd.common.values import dataclass
from healthd.events.emitted import Told, ToldCondition
from healthd.events.outbox import Outbox

FILE = "ledger.json"
PAST_FILE = "past.json"
NEWER = "newer_fields"

# What a damaged text may raise: valid JSON may have any value in any place. ConvertError is a ValueError.
_DAMAGED = (ValueError, OverflowError, RecursionError, TypeError, LookupError, AttributeError)

T = TypeVar("T")
Fields: TypeAlias = "Mapping[str, Fields | None]"
Place: TypeAlias = "tuple[str | int, ...]"

_CONDITION: Fields = {"observed": None, "slowness": None, "ending": None}
# Of what may be many, and changes one at a time.
MANY: Mapping[str, Fields] = {"conditions": _CONDITION, "cleared": _CONDITION, "events": {"observed": None}}
# What came after the first format; None: the field, whatever is in it. Only fields with a default can be added.
NEWER_FIELDS: Fields = {
    **MANY,
    "slurm": {
        **dict.fromkeys(("stamp", "earlier", "drained_at", "own_hardware", "clean_since", "clean_seconds")),
        **dict.fromkeys(("resumed", "spared", "refused", "unsaved", "counted", "uncounted_since", "uncounted_at")),
        "lifted": {"controller": None},
    },
    "inventory": {"gpus": {"mig": None}},
    **dict.fromkeys(("whole_gpus", "outbox", "told")),
}
PARTS_A_PIECE = 64


class Kept:
    """The text of each value that stood in the ledger when it was encoded last. The values are held with it: an id is
    that of one of them, then, and of nothing that was made since. All of it is about as large as the file."""

    def __init__(self) -> None:
        self._of: dict[str, tuple[tuple[Any, ...], list[Any]]] = {}

    def texts(self, of: str, values: tuple[Any, ...], text: Callable[[Any], T]) -> list[T]:
        """`text` of each of the values, which are never changed in place. `of`: where they stand."""
        before, texts = self._of.get(of, ((), []))
        begin = _alike(before, values)
        end = min(_alike(before[::-1], values[::-1]), len(before) - begin, len(values) - begin)
        known = dict(zip(map(id, before[begin : len(before) - end]), texts[begin:], strict=False))
        between = values[begin : len(values) - end]
        texts = [
            *texts[:begin],
            *(known[id(value)] if id(value) in known else text(value) for value in between),
            *texts[len(before) - end :],
        ]
        self._of[of] = (values, texts)
        return texts


def _alike(one: tuple[Any, ...], other: tuple[Any, ...]) -> int:
    """How many of the first items are the same objects."""
    same = [*map(operator.is_, one, other), False]
    return same.index(False)


def encode(ledger: Ledger) -> str:
    return b"".join(in_pieces(ledger, Kept())).decode()


def in_pieces(ledger: Ledger, kept: Kept) -> Iterator[bytes]:
    """The same text, of which only what changed is made anew. In pieces: to fill a new megabyte takes longer than all
    else."""
    many = {name: kept.texts(name, getattr(ledger, name), partial(_item, newer)) for name, newer in MANY.items()}
    rest = _dump_without(ledger, *MANY, "outbox", "told")
    beside = [
        b',[["%s",%d,%s' % (name, number, field)
        for name, items in zip(map(str.encode, MANY), many.values(), strict=True)
        for number, (_, taken) in enumerate(items)
        for field in taken
    ]
    beside += [b"," + _text(field) for field in _taken(rest, NEWER_FIELDS)]
    beside += [b',[["outbox"],', *_outbox(ledger.outbox, kept), b'],[["told"],', *_told(ledger.told, kept), b"]"]

    table = _fields(ledger, rest, {name: _joined([text for text, _ in items]) for name, items in many.items() if items})
    cursors = {name: [_text(value)] for name, value in rest.get("cursors", {}).items()}
    checksum = 0
    for piece in _pieces(_table({name: parts for name, parts in table.items() if name != "cursors"})):
        checksum = zlib.crc32(piece, checksum)
    cursors[NEWER] = _table({"of": [_text(checksum)], "fields": _joined(beside)})
    return _pieces(_table(table | {"cursors": _table(cursors)}))


def _item(newer: Fields, value: Any) -> tuple[bytes, list[bytes]]:
    """One of many: its text, and the newer fields that were taken out of it, each from its name on."""
    data = dump(value)
    taken = [_text(field).removeprefix(b"[[") for field in _taken(data, newer)]
    return b"," + _text(data), taken


def _outbox(outbox: Outbox, kept: Kept) -> list[bytes]:
    lines = kept.texts("lines", outbox.lines, lambda line: b"," + _text(line))
    return _table(_fields(outbox, _dump_without(outbox, "lines"), {"lines": _joined(lines)} if lines else {}))


def _told(told: Told, kept: Kept) -> list[bytes]:
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


def _checksum(data: Mapping[str, Any]) -> int:
    """Of all but the cursors."""
    return zlib.crc32(_text({key: value for key, value in data.items() if key != "cursors"}))


def _taken(data: Any, fields: Fields, at: Place = ()) -> Iterator[tuple[Place, Any]]:
    """Takes the fields out of the data. Each with the place where it was."""
    if isinstance(data, list):
        for number, item in enumerate(data):
            yield from _taken(item, fields, (*at, number))
        return
    if data is None:
        return
    for name, below in fields.items():
        if name not in data:
            continue
        if below is None:
            yield (*at, name), data.pop(name)
        else:
            yield from _taken(data[name], below, (*at, name))


@dataclass(frozen=True, slots=True)
class _Newer:
    """of: the checksum of the rest when the fields were taken out of it."""

    of: int
    fields: tuple[tuple[tuple[Any, ...], Any], ...]


def _put_back(data: dict[str, Any]) -> None:
    """What `encode` took out. Raises ValueError where that is not what it wrote."""
    cursors = data.get("cursors")
    if not isinstance(cursors, dict) or NEWER not in cursors:
        return
    newer = load(_Newer, cursors.pop(NEWER), f"cursors.{NEWER}")
    if newer.of != _checksum(data):
        return
    for place, value in newer.fields:
        table: Any = data
        try:
            *above, name = place
            for step in above:
                table = table[step]
            table[name] = value
        except (LookupError, TypeError, ValueError):
            raise ValueError(f"cursors.{NEWER}: names a place that is not there") from None


def decode(text: str, where: str) -> Ledger:
    """Raises LedgerError in one sentence."""
    try:
        data = json.loads(text)
        if isinstance(data, dict) and data.get("version", VERSION) != VERSION:
            raise LedgerError(f"{where}: is of version {data['version']}, this healthd reads version {VERSION}")
        if isinstance(data, dict):
            _put_back(data)
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
