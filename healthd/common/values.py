"""`@dataclass(frozen=True, slots=True)`, of which each part is made when it is first asked for.

Python's own makes all of it where the class stands: 0.3 to 0.8 ms each, nearly all of it its compiler's (exec() for
each of seven methods). A command imports some 130 such classes, makes values of half of them, and compares and
shows hardly any (docs/adr/0032). Fields, comparison, hash and text are still what dataclass() makes of these fields.
__init__ is, where it is more than to set each field; else its code is one for all classes of as many fields, and takes
half the time. A class that a command imports says

    from healthd.common.values import dataclass

A site's class may be Python's own, also where it is derived from one of these.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import typing
from collections.abc import Callable, Mapping
from dataclasses import MISSING, FrozenInstanceError
from types import CodeType, FunctionType
from typing import TYPE_CHECKING, Any, NoReturn

if TYPE_CHECKING:
    from dataclasses import dataclass as dataclass  # mypy knows it by its name
else:

    def dataclass(cls=None, **how):
        """As dataclasses.dataclass()."""
        return _late if cls is None and how == {"frozen": True, "slots": True} else dataclasses.dataclass(cls, **how)


def _late(cls: type) -> type:
    """The class once more, with slots: these it can only have from its beginning."""
    body = {name: value for name, value in vars(cls).items() if name not in ("__dict__", "__weakref__")}
    fields = inspect.get_annotations(cls)
    inherited = {name for base in cls.__mro__[1:] for name in vars(base).get("__slots__", ())}
    own = {name: value for name, value in body.items() if name not in fields}
    late = {name: _Late(body) for name in _PARTS}
    slots = tuple(name for name in fields if name not in inherited)
    made = type(cls)(cls.__name__, cls.__bases__, {**_ALIKE, **late, **own, "__slots__": slots})
    made.__qualname__ = cls.__qualname__
    return made


class _Late:
    """Stands in a class where dataclass() would have put something. `body`: all that its source says."""

    __slots__ = ("body", "name", "of")

    def __init__(self, body: Mapping[str, Any]) -> None:
        self.body = body

    def __set_name__(self, of: type, name: str) -> None:
        self.of, self.name = of, name

    def __get__(self, value: object, cls: type | None = None) -> Any:
        """Two threads that come at once make the same thing twice."""
        if vars(self.of)[self.name] is self:
            setattr(self.of, self.name, _PARTS[self.name](self.of, self.body))
        made = vars(self.of)[self.name]
        return made.__get__(value, cls) if isinstance(made, FunctionType) else made


def type_hints(cls: type) -> dict[str, Any]:
    """typing.get_type_hints(cls, include_extras=True). That evaluates what a class has from its bases anew for each; of
    healthd's own it is done once, or it would be half of reading the settings of 45 checks."""
    if not all(base is object or base.__module__.startswith("healthd.") for base in cls.__mro__):
        return typing.get_type_hints(cls, include_extras=True)
    return {name: kind for base in reversed(cls.__mro__) for name, kind in _own_hints(base).items()}


@functools.cache
def _own_hints(cls: type) -> dict[str, Any]:
    notes: dict[str, Any] = {} if cls is object else inspect.get_annotations(cls, eval_str=True)
    return notes


# --- the parts

_ABSENT = object()  # in place of a default that is made anew for each value


def _fields(cls: type, body: Mapping[str, Any]) -> dict[str, dataclasses.Field[Any]]:
    known: dict[str, dataclasses.Field[Any]] = {}
    for base in cls.__mro__[:0:-1]:
        known.update(getattr(base, "__dataclass_fields__", {}))
    notes = {name: field.type for name, field in known.items()} | body.get("__annotations__", {})
    defaults = known | {name: value for name, value in body.items() if name in notes}
    found: dict[str, dataclasses.Field[Any]] = vars(_by_python(cls, notes, defaults))["__dataclass_fields__"]
    return found


def _by_python(cls: type, notes: Mapping[str, Any], defaults: Mapping[str, Any], **how: bool) -> type:
    """A class without bases that has these fields, and what dataclass() makes of it."""
    besides = {"__annotations__": dict(notes), "__module__": cls.__module__, "__doc__": "else one is made of __init__"}
    flat = type(cls.__name__, (), {**defaults, **besides})
    if hasattr(cls, "__post_init__"):
        flat.__post_init__ = cls.__post_init__  # type: ignore[attr-defined]
    return dataclasses.dataclass(**{"init": False, "repr": False, "eq": False, **how})(flat)


def _method(name: str, cls: type, **how: bool) -> Any:
    fields: dict[str, dataclasses.Field[Any]] = cls.__dataclass_fields__  # type: ignore[attr-defined]
    made = vars(_by_python(cls, {name: field.type for name, field in fields.items()}, fields, **how))[name]
    made.__qualname__ = f"{cls.__qualname__}.{name}"
    return made


def _init(cls: type, body: Mapping[str, Any]) -> Any:
    fields: dict[str, dataclasses.Field[Any]] = cls.__dataclass_fields__  # type: ignore[attr-defined]
    if hasattr(cls, "__post_init__") or not all(f.init and not f.kw_only for f in fields.values()):
        return _method("__init__", cls, init=True, frozen=True)
    setters = {f"set{i}": _setter(cls, field) for i, field in enumerate(fields.values())}
    defaults = tuple(f.default if f.default_factory is MISSING else _ABSENT for f in fields.values() if _optional(f))
    made = FunctionType(_set_each(len(fields)).replace(co_varnames=("self", *fields)), setters, "__init__", defaults)
    made.__qualname__ = f"{cls.__qualname__}.__init__"
    made.__annotations__ = {**{name: f.type for name, f in fields.items()}, "return": None}
    return made


def _optional(field: dataclasses.Field[Any]) -> bool:
    return field.default is not MISSING or field.default_factory is not MISSING


def _setter(cls: type, field: dataclasses.Field[Any]) -> Callable[[object, Any], None]:
    put: Callable[[object, Any], None] = getattr(cls, field.name).__set__
    make = field.default_factory
    if make is MISSING:
        return put
    return lambda value, given: put(value, make() if given is _ABSENT else given)


@functools.cache
def _set_each(count: int) -> CodeType:
    """The code of an __init__ that sets so many fields; what they are called is not in it."""
    names = [f"field{i}" for i in range(count)]
    sets = "".join(f"\n set{i}(self, {name})" for i, name in enumerate(names))
    made: dict[str, FunctionType] = {}
    exec(f"def __init__(self, {', '.join(names)}):{sets or ' pass'}", made)
    return made["__init__"].__code__


def _no_set(self: object, name: str, value: object) -> NoReturn:
    raise FrozenInstanceError(f"cannot assign to field {name!r}")


def _no_delete(self: object, name: str) -> NoReturn:
    raise FrozenInstanceError(f"cannot delete field {name!r}")


@dataclasses.dataclass(frozen=True, slots=True)
class _Real:
    """Has what Python gives to all such classes alike."""


_SAME = ("__dataclass_params__", "__getstate__", "__setstate__", "__replace__")  # the last from Python 3.13 on
_ALIKE = {name: vars(_Real)[name] for name in _SAME if name in vars(_Real)}
_ALIKE.update({"__setattr__": _no_set, "__delattr__": _no_delete})
_PARTS: Mapping[str, Callable[[type, Mapping[str, Any]], Any]] = {
    "__dataclass_fields__": _fields,
    "__match_args__": lambda cls, body: tuple(f.name for f in dataclasses.fields(cls) if f.init),
    "__init__": _init,
    "__repr__": lambda cls, body: _method("__repr__", cls, repr=True),
    "__eq__": lambda cls, body: _method("__eq__", cls, eq=True),
    "__hash__": lambda cls, body: _method("__hash__", cls, unsafe_hash=True),
}
