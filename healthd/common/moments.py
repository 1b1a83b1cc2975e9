"""Moments: epoch seconds on this machine's clock, and a pure function that changes all moments in a value."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Annotated, Any, get_args

from msgspec import Struct
from msgspec.structs import replace

from healthd.common.values import type_hints

MOMENT = "moment"
PAST = "past"

# 0.0 means never. Durations, monotonic times and time stamps from another machine's clock (slurmctld's) are plain
# floats.
Moment = Annotated[float, MOMENT]
# A moment that must be in the past. If it is in the future, the clock was ahead when it was recorded.
PastMoment = Annotated[float, MOMENT, PAST]

Changes = Mapping[type, Callable[[Any], Any]]


def change_moments(value: Any, mark: str, change: Callable[[float], float], overrides: Changes) -> Any:
    """Return `value` with `change` applied to each field with this mark, even in nested Structs, tuples and tables.

    For a value's type in `overrides`, that entry's function is used instead.
    """
    kind = type(value)
    if kind in overrides:
        return overrides[kind](value)
    if kind is tuple:
        return tuple([change_moments(item, mark, change, overrides) for item in value])
    if kind is dict:
        return {key: change_moments(item, mark, change, overrides) for key, item in value.items()}
    if not issubclass(kind, Struct):
        return value
    changes = {}
    for name, hint in type_hints(kind).items():
        item = getattr(value, name)
        new = change(item) if mark in get_args(hint)[1:] else change_moments(item, mark, change, overrides)
        if new is not item:
            changes[name] = new
    return replace(value, **changes) if changes else value
