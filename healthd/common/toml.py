"""TOML, the format of settings files and scenario files."""

from __future__ import annotations

import os
import sys
from typing import Any

from healthd.common.codec import ConvertError
from healthd.common.text import regex

MAX_DEPTH = 50  # maximum depth of nested tables; dotted keys could nest thousands, and the settings code is recursive


_DUPLICATE_TABLE = regex(r"Cannot declare \((.{1,400}?),?\) twice(.*)", 16)  # re.DOTALL


def _message(problem: str) -> str:
    """Return tomllib's message, with a table's name as written in the file."""
    found = _DUPLICATE_TABLE.match(problem)
    if found is None:
        return problem
    name = ".".join(word.strip(" '\"") for word in found[1].split(","))
    return f"[{name}] is defined twice{found[2]}"


def names_in(folder: str) -> list[str]:
    """Return the sorted names of a folder's TOML files, without their suffix."""
    return sorted(name.removesuffix(".toml") for name in os.listdir(folder) if name.endswith(".toml"))


def parse(text: str | bytes) -> dict[str, Any]:
    """Parse TOML. Raises ConvertError with the reason if the text is invalid."""
    if sys.version_info >= (3, 11):
        import tomllib
    else:
        import tomli as tomllib
    try:
        table: dict[str, Any] = tomllib.loads(text if isinstance(text, str) else text.decode("utf-8"))
    except (ValueError, RecursionError) as error:  # ValueError is raised for a number with thousands of digits
        raise ConvertError(_message(str(error))) from None
    pending: list[tuple[Any, int]] = [(table, 0)]
    while pending:
        value, depth = pending.pop()
        if depth > MAX_DEPTH:
            raise ConvertError("tables or lists are nested too deeply")
        if isinstance(value, int) and value.bit_length() > 64:  # Python reads hexadecimal integers of any length
            raise ConvertError("an integer has more than 64 bits")
        items = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
        pending += [(item, depth + 1) for item in items]
    return table
