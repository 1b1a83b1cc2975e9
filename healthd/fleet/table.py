"""Answers as text tables that fit the page. Pure.

A column with the same value in all rows is printed once above the table; columns that do not fit are listed below.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from datetime import datetime, timezone
from typing import Any

from healthd.common.page import Page, plain

WIDEST_CELL = 40
NARROWEST = 80  # columns of a page
_TIMES = ("time", "first_seen", "last_seen")
_LATEST = 253402300799  # the end of the year 9999


def table(
    columns: Sequence[str], rows: Sequence[Sequence[Any]], page: Page, right: Collection[int] | None = None
) -> str:
    """Format rows as a table. Times are epoch seconds and are printed in UTC.

    right_aligned: the columns to align right; None: those with numbers only.
    """
    cells = [[cell(name, value) for name, value in zip(columns, row, strict=True)] for row in rows]
    same = [len(rows) > 1 and len({row[at] for row in cells}) == 1 for at in range(len(columns))]
    if all(same):
        same = [False] * len(columns)
    apart = [at for at in range(len(columns)) if not same[at]]
    widths = {at: max(len(columns[at]), *(len(row[at]) for row in cells)) for at in apart}
    room, fitting = max(page.width, NARROWEST), apart[:1]
    used = widths[apart[0]]
    for at in apart[1:]:
        if used + 2 + widths[at] > room:
            break
        used += 2 + widths[at]
        fitting.append(at)
    if right is None:
        right = [
            at
            for at in fitting
            if not _is_time(columns[at]) and all(isinstance(row[at], int | float | None) for row in rows)
        ]

    def line(texts: Sequence[str]) -> str:
        aligned = (texts[at].rjust(widths[at]) if at in right else texts[at].ljust(widths[at]) for at in fitting)
        return "  ".join(aligned).rstrip()

    once = ", ".join(f"{columns[at]} = {cells[0][at]}" for at, is_same in enumerate(same) if is_same and cells[0][at])
    left = [columns[at] for at in apart if at not in fitting]
    lines = [
        *(page.wrap(f"the same in all rows: {once}") if once else ()),
        page.heading(line(columns)),
        *map(line, cells),
        *(page.wrap(f"not shown here: {', '.join(left)} (--csv and --json have them)") if left else ()),
    ]
    return "\n".join(lines) + "\n"


def cell(column: str, value: Any) -> str:
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
    return text if len(text) <= WIDEST_CELL or isinstance(value, int) else f"{text[: WIDEST_CELL - 3]}..."


def _is_time(column: str) -> bool:
    return column in _TIMES or column.endswith("_time")
