"""Plain data (from TOML or JSON) <-> frozen dataclasses, strictly: no coercion, every error names its place.

Used for the settings, the ledger, and the messages between daemon and worker. Measured against pydantic, msgspec
and cattrs in docs/adr/0003: the two that are as quick to start accept "100" for a number or a misspelt key.
"""

from __future__ import annotations

import dataclasses
import difflib
import enum
import functools
import math
import types
import typing
from collections.abc import Iterable, Mapping
from typing import Any, TypeVar

T = TypeVar("T")


class ConvertError(ValueError):
    """One sentence that names the place and what is wrong there."""


def nearest(word: str, known: Iterable[str]) -> str:
    """A hint for a misspelt name: '; did you mean "timeout_seconds"?' or the list of what is known."""
    names = sorted(known)
    close = difflib.get_close_matches(word, names, n=1, cutoff=0.6)
    if close:
        return f'; did you mean "{close[0]}"?'
    return f"; known here: {', '.join(names)}" if names else ""


@functools.cache
def _hints(cls: type) -> dict[str, Any]:
    return typing.get_type_hints(cls)


@functools.cache
def _field_names(cls: type) -> frozenset[str]:
    return frozenset(f.name for f in dataclasses.fields(cls))


def load(cls: type[T], data: object, where: str = "") -> T:
    """Make a `cls` from plain data. `where` is the place that errors name ("checks.mount")."""
    return typing.cast(T, _load(cls, data, where))


def _load(kind: Any, data: Any, where: str) -> Any:
    origin = typing.get_origin(kind)
    if origin in (typing.Union, types.UnionType):
        return _load_union(kind, data, where)
    if dataclasses.is_dataclass(kind):
        return _load_dataclass(typing.cast(type, kind), data, where)
    if origin is tuple:
        return _load_tuple(kind, data, where)
    if origin in (frozenset, list):
        (item,) = typing.get_args(kind)
        return origin(_load(item, value, f"{where}[{i}]") for i, value in enumerate(_list(data, where)))
    if origin is dict:
        _, item = typing.get_args(kind)
        return {key: _load(item, value, _join(where, key)) for key, value in _table(data, where).items()}
    if isinstance(kind, type) and issubclass(kind, enum.Enum):
        return _load_enum(kind, data, where)
    return _load_plain(kind, data, where)


def _load_union(kind: Any, data: Any, where: str) -> Any:
    args = [a for a in typing.get_args(kind) if a is not type(None)]
    if data is None and len(args) < len(typing.get_args(kind)):
        return None
    return _load(args[0], data, where)


def _load_dataclass(cls: type, data: Any, where: str) -> Any:
    table = _table(data, where)
    names = _field_names(cls)
    for key in table:
        if key not in names:
            raise ConvertError(f'{where or "top level"}: unknown setting "{key}"{nearest(key, names)}')
    hints = _hints(cls)
    values = {key: _load(hints[key], value, _join(where, key)) for key, value in table.items()}
    try:
        return cls(**values)
    except TypeError:
        missing = [f.name for f in dataclasses.fields(cls) if f.name not in values and _required(f)]
        raise ConvertError(f"{where or 'top level'}: missing {', '.join(missing)}") from None


def _required(f: dataclasses.Field[Any]) -> bool:
    return f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING


def _load_tuple(kind: Any, data: Any, where: str) -> Any:
    items, args = _list(data, where), typing.get_args(kind)
    if len(args) == 2 and args[1] is Ellipsis:
        return tuple(_load(args[0], value, f"{where}[{i}]") for i, value in enumerate(items))
    if len(items) != len(args):
        raise ConvertError(f"{where}: must have {len(args)} items, has {len(items)}")
    return tuple(_load(a, value, f"{where}[{i}]") for i, (a, value) in enumerate(zip(args, items, strict=True)))


def _load_enum(kind: type[enum.Enum], data: Any, where: str) -> Any:
    words = {member.name.lower(): member for member in kind}
    if isinstance(data, str) and data in words:
        return words[data]
    hint = nearest(data, words) if isinstance(data, str) else f"; known here: {', '.join(words)}"
    raise ConvertError(f"{where}: {show(data)} is none of {', '.join(words)}{hint if 'mean' in hint else ''}")


def _load_plain(kind: Any, data: Any, where: str) -> Any:
    if kind is Any:
        return data
    if kind is float and isinstance(data, int) and not isinstance(data, bool):
        return float(data)
    if type(data) is kind:
        if kind is float and not math.isfinite(data):
            raise ConvertError(f"{where}: must be a finite number, is {data}")
        return data
    hint = ""
    if kind in (int, float) and isinstance(data, str):
        unit = "a plain number of seconds, like 300" if where.endswith("_seconds") else "a number without quotes"
        hint = f"; write {unit}"
    raise ConvertError(f"{where}: must be {_KINDS.get(kind, kind)}, is {show(data)}{hint}")


_KINDS = {str: "text", int: "a whole number", float: "a number", bool: "true or false"}


def show(data: object) -> str:
    """A value as a person would recognise it, short."""
    if isinstance(data, str):
        return f'"{data[:60]}"'
    if isinstance(data, Mapping):
        return "a table"
    if isinstance(data, list):
        return "a list"
    return str(data).lower() if isinstance(data, bool) else str(data)[:60]


def _table(data: Any, where: str) -> Mapping[str, Any]:
    if not isinstance(data, Mapping):
        raise ConvertError(f"{where or 'top level'}: must be a table, is {show(data)}")
    return data


def _list(data: Any, where: str) -> list[Any]:
    if not isinstance(data, list | tuple):
        raise ConvertError(f"{where}: must be a list, is {show(data)}")
    return list(data)


def _join(where: str, key: str) -> str:
    return f"{where}.{key}" if where else key


def dump(value: Any) -> Any:
    """The plain data that `load` turns back into an equal value. Fields at their default are left out."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        out = {}
        for f in dataclasses.fields(value):
            item = getattr(value, f.name)
            if _required(f) or (item != f.default if f.default is not dataclasses.MISSING else bool(item)):
                out[f.name] = dump(item)
        return out
    if isinstance(value, enum.Enum):
        return value.name.lower()
    if isinstance(value, tuple | list):
        return [dump(item) for item in value]
    if isinstance(value, frozenset):
        return [dump(item) for item in sorted(value)]
    if isinstance(value, dict):
        return {key: dump(item) for key, item in value.items()}
    return value
