"""Writes clean text for DuckDB (Step.stage_text in step.py): one row per line, with fields separated by tabs."""

from __future__ import annotations

from typing import TypeAlias

Value: TypeAlias = "str | int | float | bool | None"


def clean_field(value: Value) -> str:
    """Return one value as text. NULL becomes "". Text is made printable, and quoted if necessary."""
    if value is None:
        return ""
    if not isinstance(value, str):
        return str(value)
    if not value.isprintable():
        value = "".join(c if c.isprintable() else "?" for c in value)
    return '"' + value.replace('"', '""') + '"' if '"' in value or not value else value
