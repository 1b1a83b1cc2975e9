"""Plain data (from TOML or JSON) <-> frozen dataclasses, strictly: no coercion, every error names its place.

The settings, the ledger, and the messages between daemon and worker go through it. docs/adr/0003 compares it with
pydantic, msgspec and cattrs: the two that start as quickly accept "100" for a number or a misspelt key.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import math
import types
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

from healthd.common.errors import HealthdError
from healthd.common.values import dataclass, type_hints

T = TypeVar("T")


class ConvertError(HealthdError, ValueError):
    """One sentence that names the place and what is wrong there.

    every: all mistakes that were found, this one first; more than one only of a table with several.
    """

    def __init__(self, sentence: str, every: Sequence[str] = ()) -> None:
        super().__init__(sentence)
        self.every = tuple(every) or (sentence,)


@dataclass(frozen=True, slots=True)
class Rule:
    """A limit on a value beyond its type, declared with the type: Annotated[float, Rule(problem)]. problem: what is
    wrong with a value of the type ("must be 0 to 64, got -1"); "" = nothing. least, most: of a number, if it has
    such."""

    problem: Callable[[Any], str]
    least: float | None = None
    most: float | None = None


MOST_LISTED = 100  # names; more are no answer


def nearest(word: str, known: Iterable[str]) -> str:
    """A hint for a misspelt name: '; did you mean "timeout_seconds"?' or the list of what is known, if it is short."""
    import difflib

    names = sorted(known)
    close = difflib.get_close_matches(word, names, n=1, cutoff=0.6)
    if close:
        return f'; did you mean "{close[0]}"?'
    return f"; known here: {', '.join(names)}" if 0 < len(names) <= MOST_LISTED else ""


def load(cls: type[T], data: object, where: str = "") -> T:
    """Make a `cls` from plain data. `where` is the place that errors name ("checks.mount").

    Building the places costs more than everything else: it is done only when something is wrong.
    """
    loader = _loader(typing.cast(Any, cls))
    try:
        return typing.cast(T, loader(data, None))
    except ConvertError:
        return typing.cast(T, loader(data, where))


Loader = Callable[[Any, "str | None"], Any]  # the place is None until it is needed


@functools.cache
def _loader(kind: Any) -> Loader:
    """The function that turns plain data into a `kind`, built once per type: a round converts hundreds of values."""
    origin = typing.get_origin(kind)
    if origin in (typing.Union, types.UnionType):
        return _union_loader(kind)
    if origin is typing.Annotated:
        return _ruled_loader(kind)
    if dataclasses.is_dataclass(kind):
        return _dataclass_loader(typing.cast(type, kind))
    if origin is tuple:
        return _tuple_loader(kind)
    if origin in (frozenset, list):
        return _sequence_loader(origin, typing.get_args(kind)[0])
    if origin is dict:
        return _dict_loader(typing.get_args(kind)[1])
    if isinstance(kind, type) and issubclass(kind, enum.Enum):
        return _enum_loader(kind)
    return _plain_loader(kind)


def _union_loader(kind: Any) -> Loader:
    args = typing.get_args(kind)
    kinds = [arg for arg in args if arg is not type(None)]
    if len(kinds) == 2 and _is_list(kinds[1]):  # one, or several
        one, several = map(_loader, kinds)
        return lambda data, where: several(data, where) if isinstance(data, list | tuple) else one(data, where)
    if len(kinds) != 1:
        raise TypeError(f"{kind} is neither one type nor one and None, nor one and several")
    some = _loader(kinds[0])
    return lambda data, where: None if data is None and type(None) in args else some(data, where)


def _is_list(kind: Any) -> bool:
    plain = typing.get_args(kind)[0] if typing.get_origin(kind) is typing.Annotated else kind
    return typing.get_origin(plain) in (tuple, list)


def _ruled_loader(kind: Any) -> Loader:
    plain, *notes = typing.get_args(kind)
    one = _loader(plain)
    rules = [note for note in notes if isinstance(note, Rule)]  # a moment's note, or one of a site's check, is none
    if not rules:
        return one

    def load_ruled(data: Any, where: str | None) -> Any:
        value = one(data, where)
        for rule in rules:
            if problem := rule.problem(value):
                raise ConvertError(f"{where}: {problem}")
        return value

    return load_ruled


def _dataclass_loader(cls: type) -> Loader:
    hints = type_hints(cls)
    required = {f.name for f in dataclasses.fields(cls) if _required(f)}
    loaders: dict[str, Loader] = {}

    def load_dataclass(data: Any, where: str | None) -> Any:
        if not loaders:  # built at the first use: a class may contain itself
            loaders.update({f.name: _loader(hints[f.name]) for f in dataclasses.fields(cls)})
        table = _table(data, where)
        if where is None:
            if not table.keys() <= loaders.keys():
                raise ConvertError("an unknown setting")
            values = {key: loaders[key](value, None) for key, value in table.items()}
        else:
            values = _each_value(table, where, loaders)
        if not values.keys() >= required:
            missing = [f.name for f in dataclasses.fields(cls) if f.name in required - values.keys()]
            raise ConvertError(f"{where or 'top level'}: missing {', '.join(missing)}")
        return cls(**values)

    return load_dataclass


def _each_value(table: Mapping[str, Any], where: str, loaders: Mapping[str, Loader]) -> dict[str, Any]:
    """Return the values of a table. Raises one ConvertError for all that is wrong in it."""
    values, mistakes = {}, []
    for key, value in table.items():
        if key not in loaders:
            mistakes.append(f'{where or "top level"}: unknown setting "{key}"{nearest(key, loaders)}')
            continue
        try:
            values[key] = loaders[key](value, _below(where, key))
        except ConvertError as error:
            mistakes += error.every
    if mistakes:
        mistakes.sort(key=lambda mistake: ": unknown setting " not in mistake)  # a misspelt name first
        raise ConvertError(mistakes[0], mistakes)
    return values


def _required(f: dataclasses.Field[Any]) -> bool:
    return f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING


def _tuple_loader(kind: Any) -> Loader:
    args = typing.get_args(kind)
    if len(args) == 2 and args[1] is Ellipsis:
        return _sequence_loader(tuple, args[0])
    loaders = [_loader(arg) for arg in args]
    is_exact = all(arg in (str, int, bool) for arg in args)

    def load_tuple(data: Any, where: str | None) -> Any:
        items = _list(data, where)
        if len(items) != len(loaders):
            raise ConvertError(f"{where}: must have {len(loaders)} items, has {len(items)}")
        if where is None and is_exact and tuple(map(type, items)) == args:
            return tuple(items)  # fast path: the labels of hundreds of observations
        if where is None:
            return tuple([one(value, None) for one, value in zip(loaders, items, strict=True)])
        pairs = zip(loaders, items, strict=True)
        return tuple(one(value, f"{where}[{i}]") for i, (one, value) in enumerate(pairs))

    return load_tuple


def _sequence_loader(container: Any, item: Any) -> Loader:
    one = _loader(item)

    def load_sequence(data: Any, where: str | None) -> Any:
        items = _list(data, where)
        if where is None:
            return container([one(value, None) for value in items])
        return container([one(value, f"{where}[{i}]") for i, value in enumerate(items)])

    return load_sequence


def _dict_loader(item: Any) -> Loader:
    one = _loader(item)
    return lambda data, where: {
        key: one(value, None if where is None else _below(where, key)) for key, value in _table(data, where).items()
    }


def _enum_loader(kind: type[enum.Enum]) -> Loader:
    words = {member.name.lower(): member for member in kind}

    def load_enum(data: Any, where: str | None) -> Any:
        if isinstance(data, str) and data in words:
            return words[data]
        hint = nearest(data, words) if isinstance(data, str) else ""
        raise ConvertError(f"{where}: {show(data)} is none of {', '.join(words)}{hint if 'mean' in hint else ''}")

    return load_enum


def _plain_loader(kind: Any) -> Loader:
    def load_plain(data: Any, where: str | None) -> Any:
        found = type(data)
        if found is kind or kind is Any:
            if found is str and not data.isascii():
                _must_be_text(data, where)
            if found is float and not math.isfinite(data):
                raise ConvertError(f"{where}: must be a finite number, got {data}")
            if found is int and data.bit_length() > 64:  # computing with it would raise elsewhere
                raise ConvertError(f"{where}: must be a number of at most 64 bits, got {show(data)}")
            return data
        if kind is float and found is int:
            try:
                return float(data)
            except OverflowError:
                raise ConvertError(f"{where}: must be a finite number, got {show(data)}") from None
        hint = ""
        if kind in (int, float) and found is str:
            hint = f"; write {_unit(where)}"
        raise ConvertError(f"{where}: must be {_KINDS.get(kind, kind)}, got {show(data)}{hint}")

    return load_plain


def _unit(where: str | None) -> str:
    """Return how to write the number of a setting: its name ends in the unit."""
    name = (where or "").rpartition(".")[2]
    if name.endswith("_seconds"):
        return "a plain number of seconds, like 300"
    if name.endswith("_bytes"):
        return "a plain number of bytes, like 2199023255552 (2 TiB)"
    return "a number without quotes"


def _must_be_text(data: str, where: str | None) -> None:
    """JSON can name half a character (\\ud800), which nothing can write. The half characters that os.fsdecode makes of
    a path's bytes that are no UTF-8 can be written back."""
    try:
        data.encode("utf-8", "surrogateescape")
    except UnicodeEncodeError:
        raise ConvertError(f"{where}: must be text, has half of a UTF-16 pair in it") from None


_KINDS = {str: "text", int: "a whole number", float: "a number", bool: "true or false"}


def show(data: object) -> str:
    """A value as a person would recognise it, short."""
    if isinstance(data, str):
        return f'"{data[:60]}"'
    if isinstance(data, Mapping):
        return "a table"
    if isinstance(data, list):
        return "a list"
    if isinstance(data, int) and data.bit_length() > 200:
        return "a number of that size"  # written out it may have more digits than Python writes
    return str(data).lower() if isinstance(data, bool) else str(data)[:60]


def number(value: float) -> str:
    """The number as a person would write it: 30 for 30.0."""
    return f"{value:g}" if isinstance(value, float) else show(value)


def _below(where: str, key: str) -> str:
    return f"{where}.{key}" if where else key


def _table(data: Any, where: str | None) -> Mapping[str, Any]:
    if type(data) is not dict and not isinstance(data, Mapping):
        raise ConvertError(f"{where or 'top level'}: must be a table, got {show(data)}")
    return data


def _list(data: Any, where: str | None) -> list[Any]:
    if not isinstance(data, list | tuple):
        hint = f": [{show(data)}]" if isinstance(data, str | int | float) else f", got {show(data)}"
        raise ConvertError(f"{where}: must be a list{hint}")
    return data if type(data) is list else list(data)


Dumper = Callable[[Any], Any]
PLAIN = (str, int, float, bool, type(None))


def dump(value: Any) -> Any:
    """The plain data that `load` turns back into an equal value. Fields at their default are left out."""
    kind: Any = type(value)
    return value if kind in PLAIN else _dumper(kind)(value)


@functools.cache
def _dumper(cls: Any) -> Dumper:
    """The function that turns a value of exactly this class into plain data, built once per class like the loaders."""
    if issubclass(cls, enum.Enum):
        return lambda value: value.name.lower()
    if dataclasses.is_dataclass(cls):
        return _dataclass_dumper(cls)
    if issubclass(cls, tuple | list):
        return lambda value: [dump(item) for item in value]
    if issubclass(cls, frozenset):
        return lambda value: [dump(item) for item in sorted(value)]
    if issubclass(cls, dict):
        return lambda value: {key: dump(item) for key, item in value.items()}
    return lambda value: value


def _dataclass_dumper(cls: Any) -> Dumper:
    always = [f.name for f in dataclasses.fields(cls) if _required(f)]
    unless = [(f.name, f.default) for f in dataclasses.fields(cls) if not _required(f)]

    def dump_dataclass(value: Any) -> Any:
        out = {}
        for name in always:
            item = getattr(value, name)
            out[name] = dump(item)
        for name, default in unless:
            item = getattr(value, name)
            if item != default if default is not dataclasses.MISSING else item:
                out[name] = dump(item)
            elif default is True and item is not True:
                out[name] = dump(item)  # 1 equals True, and is the setting of a node with one GPU
        return out

    return dump_dataclass
