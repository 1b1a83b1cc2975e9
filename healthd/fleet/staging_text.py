"""Clean text, as it goes to DuckDB (Step.stage_text in step.py): a row a line, tabs between its fields."""

from __future__ import annotations

from typing import TypeAlias

Value: TypeAlias = "str | int | float | bool | None"


def field(value: Value) -> str:
    """One value: "" is no value; text becomes printable, and stands in quotation marks where it has to."""
    if value is None:
        return ""
    if not isinstance(value, str):
        return str(value)
    if not value.isprintable():
        value = "".join(c if c.isprintable() else "?" for c in value)
    return '"' + value.replace('"', '""') + '"' if '"' in value or not value else value
