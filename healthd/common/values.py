"""Immutable values that healthd stores or sends, and their JSON.

    class Pause(Value, frozen=True):
        until: Moment
        why: str

A `Value` is compared, hashed and printed by its fields. Its JSON omits fields at their default. Decoding is strict:
unknown and missing fields, `"1"` for a number, NaN and infinity are rejected.
"""

from __future__ import annotations

import functools
import json
import sys
import types
import typing
from typing import Annotated, Any, TypeVar

import msgspec

from healthd.common.errors import HealthdError

T = TypeVar("T")

# A 64-bit int. Python also reads numbers with thousands of digits, which do not fit into a float.
Whole = Annotated[int, msgspec.Meta(ge=-(2**63), le=2**63 - 1)]


class Value(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """Base class for immutable values. mypy requires subclasses to repeat `frozen=True`."""


class DecodeError(HealthdError, ValueError):
    """Raised if a text is not JSON for the expected type. The message is one sentence."""


def _plain(value: object) -> str | float | int:
    """Convert text or a number of a derived type (numpy.float64) to a plain value."""
    for kind in (str, float, int):
        if isinstance(value, kind):
            return kind(value)
    raise TypeError(f"a value of type {type(value).__name__} has no JSON")


_encode = msgspec.json.Encoder(enc_hook=_plain).encode


def encode(value: Any) -> bytes:
    """Return a value as JSON. Raises ValueError or TypeError if that is impossible.

    Text such as a path or a Reason in Slurm may contain non-UTF-8 bytes, as lone surrogates (os.fsdecode).
    """
    try:
        return _encode(value)
    except UnicodeEncodeError:
        return json.dumps(msgspec.to_builtins(value, enc_hook=_plain), separators=(",", ":"), allow_nan=False).encode()


def decode(kind: type[T], text: str | bytes) -> T:
    """Parse a value of type `kind` that was written by `encode`. Raises DecodeError."""
    try:
        return typing.cast(T, _decoder(typing.cast(Any, kind)).decode(text))
    except (ValueError, RecursionError) as error:
        if not _has_surrogates(text):
            raise DecodeError(str(error)) from None
    try:
        data = json.loads(text)
        json.dumps(data, ensure_ascii=False, allow_nan=False).encode("utf-8", "surrogateescape")
        return msgspec.convert(data, kind)
    except (ValueError, RecursionError) as error:
        raise DecodeError(str(error)) from None


@functools.cache
def _decoder(kind: Any) -> msgspec.json.Decoder[Any]:
    return msgspec.json.Decoder(kind)


def _has_surrogates(text: str | bytes) -> bool:
    return "\\udc" in text if isinstance(text, str) else b"\\udc" in text


def type_hints(cls: type) -> dict[str, Any]:
    """Return the evaluated annotations of a class and its bases, including the metadata from Annotated."""
    return {name: kind for base in reversed(cls.__mro__) for name, kind in _own_hints(base).items()}


@functools.cache
def _own_hints(cls: type) -> dict[str, Any]:
    """Return the annotations of one class.

    The result is cached. Without the cache, evaluating the common settings for each check takes half of the time to
    read the settings.
    """
    own = types.SimpleNamespace(__annotations__=getattr(cls, "__annotations__", {}))
    module = sys.modules.get(cls.__module__)
    return typing.get_type_hints(own, vars(module) if module else {}, vars(cls), include_extras=True)
