"""Strict conversion between plain data (TOML, JSON) and Structs or dataclasses. Types are not coerced, and all errors
contain the value's place.

msgspec (values.py) stops at the first error and allows unknown keys in a dataclass. Settings are written by hand, so
this module walks the fields itself. It reports all errors in a table at once, and suggests a name for a misspelt key.
"""

from __future__ import annotations

import enum
import functools
import math
import types
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

from msgspec import NODEFAULT, Struct, field

from healthd.common.errors import HealthdError
from healthd.common.values import Value, type_hints

T = TypeVar("T")


class ConvertError(HealthdError, ValueError):
    """An invalid value. The message is one sentence with the place and the problem.

    `mistakes` contains all mistakes that were found, starting with this one. Only a table can have more than one.
    """

    def __init__(self, sentence: str, mistakes: Sequence[str] = ()) -> None:
        super().__init__(sentence)
        self.mistakes = tuple(mistakes) or (sentence,)


class Rule(Value, frozen=True):
    """A limit on a value beyond its type, declared with the type: Annotated[float, Rule(problem)].

    `problem` returns the problem with a value of the type ("must be 0 to 64, got -1"), or "". `minimum` and `maximum`
    are the limits for a number.
    """

    problem: Callable[[Any], str]
    minimum: float | None = None
    maximum: float | None = None


class _WithFactory(Struct):
    items: list[int] = field(default_factory=list)


_FACTORY = type(_WithFactory.__struct_defaults__[0])  # msgspec has no public name for it


class Field(NamedTuple):
    """A field of a Struct or dataclass. `default` is NODEFAULT if there is no default, or if each value gets a new
    default.
    """

    name: str
    default: Any
    required: bool


def fields_of(kind: Any) -> tuple[Field, ...]:
    """Return the fields of a Struct or dataclass, or () for any other type."""
    return _fields_of(kind)


@functools.cache
def _fields_of(kind: Any) -> tuple[Field, ...]:
    if issubclass(kind, Struct):
        names, defaults = kind.__struct_fields__, kind.__struct_defaults__
        padded_defaults = (*[NODEFAULT] * (len(names) - len(defaults)), *defaults)
        optional = len(names) - len(defaults)
        return tuple(
            Field(name, NODEFAULT if isinstance(default, _FACTORY) else default, position < optional)
            for position, (name, default) in enumerate(zip(names, padded_defaults, strict=True))
        )
    if not _is_dataclass(kind):
        return ()
    from dataclasses import MISSING, fields  # takes 0.8 MiB (it imports inspect), so import it only for a site's check

    return tuple(
        Field(
            f.name,
            NODEFAULT if f.default is MISSING else f.default,
            f.default is MISSING and f.default_factory is MISSING,
        )
        for f in fields(kind)
    )


def _is_dataclass(kind: type) -> bool:
    return hasattr(kind, "__dataclass_fields__")


MAX_LISTED = 100  # maximum number of names; a longer list does not help


def spelling_hint(word: str, candidates: Iterable[str]) -> str:
    """Return a hint for a misspelt name, such as '; did you mean "timeout_seconds"?', or all candidates if there are
    few."""
    import difflib

    names = sorted(candidates)
    close = difflib.get_close_matches(word, names, n=1, cutoff=0.62)
    if close:
        return f'; did you mean "{close[0]}"?'
    return f"; valid names: {', '.join(names)}" if 0 < len(names) <= MAX_LISTED else ""


def load(cls: type[T], data: object, where: str = "") -> T:
    """Convert plain data to a `cls`. `where` is the data's place in errors ("checks.mount"). Raises ConvertError."""
    return typing.cast(T, _loader(typing.cast(Any, cls))(data, where))


Loader = Callable[[Any, str], Any]


@functools.cache
def _loader(kind: Any) -> Loader:
    """Return the function that turns plain data into a `kind`."""
    origin = typing.get_origin(kind)
    if origin in (typing.Union, types.UnionType):
        return _union_loader(kind)
    if origin is typing.Annotated:
        return _ruled_loader(kind)
    if origin is tuple:
        return _tuple_loader(kind)
    if origin in (frozenset, list):
        return _sequence_loader(origin, typing.get_args(kind)[0])
    if origin is dict:
        return _dict_loader(typing.get_args(kind)[1])
    if isinstance(kind, type) and issubclass(kind, enum.Enum):
        return _enum_loader(kind)
    if isinstance(kind, type) and (issubclass(kind, Struct) or _is_dataclass(kind)):
        return _table_loader(kind)
    return _plain_loader(kind)


def _union_loader(kind: Any) -> Loader:
    args = typing.get_args(kind)
    kinds = [arg for arg in args if arg is not type(None)]
    if len(kinds) == 2 and _is_list(kinds[1]):  # a single value or a list
        load_single, load_sequence = map(_loader, kinds)
        return lambda data, where: (
            load_sequence(data, where) if isinstance(data, list | tuple) else load_single(data, where)
        )
    if kinds == [int, str]:  # a number, or text such as a percentage
        load_number, load_text = map(_loader, kinds)
        return lambda data, where: load_text(data, where) if isinstance(data, str) else load_number(data, where)
    if len(kinds) != 1:
        raise TypeError(f"{kind} is not a supported type: use T, T | None, T | list, or int | str")
    load_value = _loader(kinds[0])
    return lambda data, where: None if data is None and type(None) in args else load_value(data, where)


def _is_list(kind: Any) -> bool:
    plain = typing.get_args(kind)[0] if typing.get_origin(kind) is typing.Annotated else kind
    return typing.get_origin(plain) in (tuple, list)


def _ruled_loader(kind: Any) -> Loader:
    plain, *notes = typing.get_args(kind)
    load_plain = _loader(plain)
    rules = [note for note in notes if isinstance(note, Rule)]  # other metadata: moments, or a site's own

    def load_ruled(data: Any, where: str) -> Any:
        value = load_plain(data, where)
        for rule in rules:
            if problem := rule.problem(value):
                raise ConvertError(f"{where}: {problem}")
        return value

    return load_ruled


def _table_loader(cls: Any) -> Loader:
    """Return the loader for a Struct or dataclass. The loader raises a single ConvertError with all mistakes in a
    table.
    """
    hints = {f.name: type_hints(cls)[f.name] for f in fields_of(cls)}

    def load_table(data: Any, where: str) -> Any:
        loaders = {name: _loader(hint) for name, hint in hints.items()}  # resolved late: a class may contain itself
        values, mistakes = {}, []
        for key, value in _table(data, where).items():
            if key not in loaders:
                mistakes.append(f'{where or "top level"}: unknown setting "{key}"{spelling_hint(key, loaders)}')
                continue
            try:
                values[key] = loaders[key](value, _join_path(where, key))
            except ConvertError as error:
                mistakes += error.mistakes
        if missing := [f.name for f in fields_of(cls) if f.required and f.name not in data]:
            mistakes.append(f"{where or 'top level'}: missing {', '.join(missing)}")
        mistakes.sort(key=lambda mistake: ": unknown setting " not in mistake)  # misspelt names first
        raise_mistakes(mistakes)
        return cls(**values)

    return load_table


def _tuple_loader(kind: Any) -> Loader:
    args = typing.get_args(kind)
    if len(args) == 2 and args[1] is Ellipsis:
        return _sequence_loader(tuple, args[0])
    loaders = [_loader(arg) for arg in args]

    def load_tuple(data: Any, where: str) -> Any:
        items = _list(data, where)
        if len(items) != len(loaders):
            raise ConvertError(f"{where}: must have {len(loaders)} items, but has {len(items)}")
        pairs = zip(loaders, items, strict=True)
        return tuple(_load_each((load_item, value, f"{where}[{i}]") for i, (load_item, value) in enumerate(pairs)))

    return load_tuple


def _sequence_loader(container: Any, item: Any) -> Loader:
    load_item = _loader(item)
    return lambda data, where: container(
        _load_each((load_item, value, f"{where}[{i}]") for i, value in enumerate(_list(data, where)))
    )


def _dict_loader(item: Any) -> Loader:
    load_item = _loader(item)

    def load_dict(data: Any, where: str) -> Any:
        table = _table(data, where)
        values = _load_each((load_item, value, _join_path(where, key)) for key, value in table.items())
        return dict(zip(table, values, strict=True))

    return load_dict


def _load_each(items: Iterable[tuple[Loader, Any, str]]) -> list[Any]:
    """Load a list of (loader, data, place). Raises a single ConvertError for all invalid items."""
    values: list[Any] = []
    mistakes: list[str] = []
    for load_item, data, where in items:
        try:
            values.append(load_item(data, where))
        except ConvertError as error:
            mistakes += error.mistakes
    raise_mistakes(mistakes)
    return values


def raise_mistakes(mistakes: Sequence[str]) -> None:
    """Raise a single ConvertError with these mistakes, if there are any."""
    if mistakes:
        raise ConvertError(mistakes[0], mistakes)


def _enum_loader(kind: type[enum.Enum]) -> Loader:
    members = {member.name.lower(): member for member in kind}

    def load_enum(data: Any, where: str) -> Any:
        if isinstance(data, str) and data in members:
            return members[data]
        hint = spelling_hint(data, members) if isinstance(data, str) else ""
        raise ConvertError(f"{where}: {show(data)} is not one of {', '.join(members)}{hint if 'mean' in hint else ''}")

    return load_enum


def _plain_loader(kind: Any) -> Loader:
    def load_plain(data: Any, where: str) -> Any:
        data_type = type(data)
        if data_type is kind or kind is Any:
            if data_type is str and not data.isascii():
                _require_text(data, where)
            if data_type is float and not math.isfinite(data):
                raise ConvertError(f"{where}: must be a finite number, got {data}")
            if data_type is int and data.bit_length() > 64:  # arithmetic with this value would raise elsewhere
                raise ConvertError(f"{where}: must be a number of at most 64 bits, got {show(data)}")
            return data
        if kind is float and data_type is int:
            try:
                return float(data)
            except OverflowError:
                raise ConvertError(f"{where}: must be a finite number, got {show(data)}") from None
        hint = ""
        if kind in (int, float) and data_type is str:
            hint = f"; write {_number_hint(where)}"
        raise ConvertError(f"{where}: must be {_KINDS.get(kind, kind)}, got {show(data)}{hint}")

    return load_plain


def _number_hint(where: str) -> str:
    """Return a hint on how to write a setting's number, based on the unit at the end of the setting's name."""
    name = where.rpartition(".")[2]
    if name.endswith("_seconds"):
        return "a plain number of seconds, like 300"
    if name.endswith("_bytes"):
        return "a plain number of bytes, like 2199023255552 (2 TiB)"
    return "a number without quotes"


def _require_text(data: str, where: str) -> None:
    r"""Raise ConvertError for a lone UTF-16 surrogate, which JSON can contain (\ud800) but which cannot be encoded.

    Surrogates that os.fsdecode creates for non-UTF-8 bytes in a path are allowed, because they can be written back.
    """
    try:
        data.encode("utf-8", "surrogateescape")
    except UnicodeEncodeError:
        raise ConvertError(f"{where}: must be text, got half of a UTF-16 surrogate pair") from None


_KINDS = {str: "text", int: "a whole number", float: "a number", bool: "true or false"}


def show(data: object) -> str:
    """Return a short form of a value for an error message."""
    if isinstance(data, str):
        return f'"{data[:60]}"'
    if isinstance(data, Mapping):
        return "a table"
    if isinstance(data, list):
        return "a list"
    if isinstance(data, int) and data.bit_length() > 200:
        return "a number of that size"  # its decimal form may have more digits than Python prints
    return str(data).lower() if isinstance(data, bool) else str(data)[:60]


def number(value: float) -> str:
    """Format a number without trailing zeros ("30" for 30.0)."""
    return f"{value:g}" if isinstance(value, float) else show(value)


def _join_path(where: str, key: str) -> str:
    return f"{where}.{key}" if where else key


def _table(data: Any, where: str) -> Mapping[str, Any]:
    if not isinstance(data, Mapping):
        raise ConvertError(f"{where or 'top level'}: must be a table, got {show(data)}")
    return data


def _list(data: Any, where: str) -> list[Any]:
    if not isinstance(data, list | tuple):
        hint = f": [{show(data)}]" if isinstance(data, str | int | float) else f", got {show(data)}"
        raise ConvertError(f"{where}: must be a list{hint}")
    return list(data)


def dump(value: Any) -> Any:
    """Return the plain data that `load` turns back into an equal value. Fields at their default are omitted."""
    if isinstance(value, enum.Enum):
        return value.name.lower()
    if isinstance(value, tuple | list):
        return [dump(item) for item in value]
    if isinstance(value, frozenset):
        return [dump(item) for item in sorted(value)]
    if isinstance(value, dict):
        return {key: dump(item) for key, item in value.items()}
    if fields := fields_of(type(value)):
        items = ((f, getattr(value, f.name)) for f in fields)
        return {f.name: dump(item) for f, item in items if f.required or not _is_default(item, f.default)}
    return value


def _is_default(item: Any, default: Any) -> bool:
    if default is NODEFAULT:  # the default is a new list or table for each value
        return not item
    # In Python, 1 == True, but a setting of 1 (a node with one GPU) is not the default True.
    return bool(item == default) and not (default is True and item is not True)
