"""Text for a terminal: paragraphs, tables, colours and times. The functions are pure.

Control characters in external text are never passed to the terminal.
"""

from __future__ import annotations

import textwrap
import time
from collections.abc import Sequence
from typing import NamedTuple

from healthd.common.duration import duration
from healthd.common.text import printable

MINUTE, DAY = 60.0, 86400.0
SEVERITIES = ("info", "warning", "degraded", "critical")
MAX_CELL_WIDTH, MIN_FOLD_WIDTH = 48, 20

_BOLD, _DIM, _RED, _GREEN, _YELLOW = "1", "2", "31", "32", "33"
_COLOURS = {
    "critical": "1;31",
    "unhealthy": "1;31",
    "degraded": _RED,
    "warning": _YELLOW,
    "unknown": "35",
    "failed": "35",
    "timed out": "35",
    "stuck": "35",
    "info": _DIM,
    "healthy": _GREEN,
    "completed": _GREEN,
}


class Page(NamedTuple):
    """Layout of terminal output.

    `width` is in columns. `colour` is True for a terminal with colours. With `fold`, a long table row is wrapped under
    its last column (not in a pipe, where each row is one line).
    """

    width: int = 100
    colour: bool = False
    fold: bool = False

    def paint(self, text: str, style: str = "") -> str:
        """Return the text in the colour for `style` ("critical"). By default, the text itself determines the colour."""
        code = _COLOURS.get(style or text.strip(), "")
        return f"\033[{code}m{text}\033[0m" if self.colour and code and text else text

    def heading(self, text: str) -> str:
        return f"\033[{_BOLD}m{text}\033[0m" if self.colour else text

    def wrap(self, text: str, indent: str = "") -> list[str]:
        """Wrap one paragraph. Words that are longer than a line (paths, reasons) stay whole."""
        return textwrap.wrap(
            plain(text),
            max(self.width, 40),
            initial_indent=indent,
            subsequent_indent=indent,
            break_long_words=False,
            break_on_hyphens=False,
        )

    def item(self, text: str, indent: str = "") -> list[str]:
        """Format one item of a list as "- text". Further lines are indented to the text."""
        first, *more_lines = Page(self.width - 2).wrap(text.removeprefix("- "), indent)
        return [f"{indent}- {first.removeprefix(indent)}", *(f"  {line}" for line in more_lines)]

    def table(self, head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
        """Format a table. Words that have a colour are painted.

        Columns are as wide as their widest cell, except that a very wide cell only shifts its own row.
        """
        rows = [[plain(cell) for cell in row] for row in rows]
        fitting = [
            [len(cell) for cell in column if len(cell) <= MAX_CELL_WIDTH] for column in zip(head, *rows, strict=True)
        ]
        widths = [max(column) for column in fitting]
        lines = [self.heading(_columns(head, widths))]
        for row in rows:
            *cells, last = (cell.ljust(width) for cell, width in zip(row, widths, strict=True))
            before = "".join(f"{cell}  " for cell in cells)
            painted = "".join(f"{self.paint(cell, cell.strip())}  " for cell in cells)
            first, *more_lines = self._folded(last.rstrip(), len(before))
            lines.append((painted + self.paint(first)).rstrip())
            lines += [" " * len(before) + line for line in more_lines]
        return lines

    def _folded(self, text: str, column: int) -> list[str]:
        room = self.width - column
        if not self.fold or room < MIN_FOLD_WIDTH:
            return [text]
        return textwrap.wrap(text, room, break_long_words=False, break_on_hyphens=False) or [""]


def _columns(cells: Sequence[str], widths: Sequence[int]) -> str:
    return "  ".join(cell.ljust(width) for cell, width in zip(cells, widths, strict=True)).rstrip()


def plain(text: object) -> str:
    """Return the text as one line without control characters."""
    return printable(" ".join(str(text).split()))


# --- times


def ago(time_point: float, now: float) -> str:
    """Return a time as "3 min ago", as local time if it is older than a day, or as "never" for 0."""
    if not time_point:
        return "never"
    seconds = now - time_point
    if seconds >= DAY or seconds < -MINUTE:
        return date(time_point)
    return f"{duration(int(seconds))} ago" if seconds >= 1 else "just now"


def date(time_point: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M", time.localtime(time_point))


def time_ahead(time_point: float, now: float) -> str:
    seconds = time_point - now
    if seconds >= DAY:
        return f"on {date(time_point)}"
    return f"in {duration(int(seconds))}" if seconds >= 1 else "now"


def plural(count: int, noun: str, plural_noun: str = "") -> str:
    """Format a count: 1 -> "1 failure", 2345 -> "2,345 failures". `plural_noun` is for irregular plurals."""
    return f"{count:,} {noun if count == 1 else plural_noun or noun + 's'}"
