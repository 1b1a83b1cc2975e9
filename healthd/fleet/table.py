"""Formats answers as text tables that fit the page. All functions are pure.

A column with the same value in all rows is printed once above the table. Columns that do not fit are listed below.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from datetime import datetime, timezone
from typing import Any

from healthd.common.page import Page, plain

MAX_CELL_WIDTH = 40
MIN_PAGE_WIDTH = 80  # columns on a page
_TIMES = ("time", "first_seen", "last_seen")
_LATEST = 253402300799  # the end of the year 9999


def format_table(
    columns: Sequence[str], rows: Sequence[Sequence[Any]], page: Page, right_aligned: Collection[int] | None = None
) -> str:
    """Format rows as a table. Times are epoch seconds and are printed in UTC.

    Args:
        right_aligned: columns to align right; None to align the columns that contain only numbers.
    """
    cells = [[format_cell(name, value) for name, value in zip(columns, row, strict=True)] for row in rows]
    is_constant = [len(rows) > 1 and len({row[index] for row in cells}) == 1 for index in range(len(columns))]
    if all(is_constant):
        is_constant = [False] * len(columns)
    varying = [index for index in range(len(columns)) if not is_constant[index]]
    widths = {index: max(len(columns[index]), *(len(row[index]) for row in cells)) for index in varying}
    width, fitting = max(page.width, MIN_PAGE_WIDTH), varying[:1]
    used_width = widths[varying[0]]
    for index in varying[1:]:
        if used_width + 2 + widths[index] > width:
            break
        used_width += 2 + widths[index]
        fitting.append(index)
    if right_aligned is None:
        right_aligned = [
            index
            for index in fitting
            if not _is_time(columns[index]) and all(isinstance(row[index], int | float | None) for row in rows)
        ]

    def line(texts: Sequence[str]) -> str:
        aligned = (
            texts[index].rjust(widths[index]) if index in right_aligned else texts[index].ljust(widths[index])
            for index in fitting
        )
        return "  ".join(aligned).rstrip()

    constant_text = ", ".join(
        f"{columns[index]} = {cells[0][index]}"
        for index, is_same in enumerate(is_constant)
        if is_same and cells[0][index]
    )
    hidden = [columns[index] for index in varying if index not in fitting]
    lines = [
        *(page.wrap(f"the same in all rows: {constant_text}") if constant_text else ()),
        page.heading(line(columns)),
        *map(line, cells),
        *(page.wrap(f"not shown here: {', '.join(hidden)} (see --csv and --json)") if hidden else ()),
    ]
    return "\n".join(lines) + "\n"


def format_cell(column: str, value: Any) -> str:
    """Format one value on one line."""
    if value is None:
        return ""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int) and (_is_time(column) or column == "day") and 0 <= value <= _LATEST:
        form = "%Y-%m-%d" if column == "day" else "%Y-%m-%d %H:%M:%S"
        return datetime.fromtimestamp(value, timezone.utc).strftime(form)
    if isinstance(value, float):
        return f"{value:.4g}"
    text = plain(value)
    return text if len(text) <= MAX_CELL_WIDTH or isinstance(value, int) else f"{text[: MAX_CELL_WIDTH - 3]}..."


def _is_time(column: str) -> bool:
    return column in _TIMES or column.endswith("_time")
