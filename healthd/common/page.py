"""Text for a terminal: paragraphs, tables, colours and times. Pure.

No text of others reaches the terminal as a control character.
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
WIDEST_CELL, NARROWEST_FOLD = 48, 20

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
    """Where text is written: `width` in columns; `colour`: a terminal that wants colours; `fold`: a table row that is
    too long goes on below its last column (not in a pipe, where a row is a line)."""

    width: int = 100
    colour: bool = False
    fold: bool = False

    def paint(self, text: str, word: str = "") -> str:
        """The text in the colour of `word` ("critical"); without `word`, in its own."""
        code = _COLOURS.get(word or text.strip(), "")
        return f"\033[{code}m{text}\033[0m" if self.colour and code and text else text

    def heading(self, text: str) -> str:
        return f"\033[{_BOLD}m{text}\033[0m" if self.colour else text

    def wrap(self, text: str, indent: str = "") -> list[str]:
        """One paragraph. Words that are longer than a line (paths, reasons) stay whole."""
        return textwrap.wrap(
            plain(text),
            max(self.width, 40),
            initial_indent=indent,
            subsequent_indent=indent,
            break_long_words=False,
            break_on_hyphens=False,
        )

    def item(self, text: str, indent: str = "") -> list[str]:
        """One item of a list: "- text", with its further lines below the text."""
        first, *rest = Page(self.width - 2).wrap(text.removeprefix("- "), indent)
        return [f"{indent}- {first.removeprefix(indent)}", *(f"  {line}" for line in rest)]

    def table(self, head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
        """Columns are as wide as their widest cell (a very wide one moves only its own row); a word that has a colour
        gets it."""
        rows = [[plain(cell) for cell in row] for row in rows]
        fitting = [
            [len(cell) for cell in column if len(cell) <= WIDEST_CELL] for column in zip(head, *rows, strict=True)
        ]
        widths = [max(column) for column in fitting]
        lines = [self.heading(_columns(head, widths))]
        for row in rows:
            *cells, last = (cell.ljust(width) for cell, width in zip(row, widths, strict=True))
            before = "".join(f"{cell}  " for cell in cells)
            painted = "".join(f"{self.paint(cell, cell.strip())}  " for cell in cells)
            first, *rest = self._folded(last.rstrip(), len(before))
            lines.append((painted + self.paint(first)).rstrip())
            lines += [" " * len(before) + line for line in rest]
        return lines

    def _folded(self, text: str, column: int) -> list[str]:
        room = self.width - column
        if not self.fold or room < NARROWEST_FOLD:
            return [text]
        return textwrap.wrap(text, room, break_long_words=False, break_on_hyphens=False) or [""]


def _columns(cells: Sequence[str], widths: Sequence[int]) -> str:
    return "  ".join(cell.ljust(width) for cell, width in zip(cells, widths, strict=True)).rstrip()


def plain(text: object) -> str:
    """Text that cannot steer a terminal: one line, no control characters."""
    return printable(" ".join(str(text).split()))


# --- times


def ago(then: float, now: float) -> str:
    """ "3 min ago"; the local time if older than a day; "never" for 0."""
    if not then:
        return "never"
    seconds = now - then
    if seconds >= DAY or seconds < -MINUTE:
        return date(then)
    return f"{duration(int(seconds))} ago" if seconds >= 1 else "just now"


def date(then: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M", time.localtime(then))


def ahead(then: float, now: float) -> str:
    seconds = then - now
    if seconds >= DAY:
        return f"on {date(then)}"
    return f"in {duration(int(seconds))}" if seconds >= 1 else "now"


def plural(count: int, what: str, several: str = "") -> str:
    """1 -> "1 failure", 2345 -> "2,345 failures". several: where it is not the word with an s."""
    return f"{count:,} {what if count == 1 else several or what + 's'}"
