"""Rows that cannot be read: counted, and the first ones shown with file and line. Never guessed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

from healthd.common.text import printable

SHOWN = 20
MOST_SHARE = 0.01  # more unread rows of a source than that are a wrong file or a wrong setting
LONGEST = 200


@dataclass(slots=True)
class Unread:
    rows: Counter[str] = field(default_factory=Counter)  # source -> rows that it had, the unread ones too
    unread: Counter[str] = field(default_factory=Counter)
    shown: list[str] = field(default_factory=list)

    def read(self, source: str, rows: int) -> None:
        """So many rows were read."""
        self.rows[source] += rows

    def add(self, source: str, file: str, line: int, why: str, rows: int = 1) -> None:
        """A row cannot be read. `line`: from 1; 0 where there are none (JSON, an answer of a server)."""
        self.rows[source] += rows
        self.unread[source] += rows
        if len(self.shown) < SHOWN:
            place = f"{file}:{line}" if line else file
            why = why if len(why) <= LONGEST else f"{why[:LONGEST]}..."
            self.shown.append(printable(f"{source}: {place}: {why}"))

    def told(self) -> Iterator[str]:
        """The first ones, and how many there are of each source."""
        yield from self.shown
        hidden = sum(self.unread.values()) - len(self.shown)
        if hidden > 0:
            yield f"... and {hidden:,} more"
        for source, count in sorted(self.unread.items()):
            rows = self.rows[source]
            yield f"{source}: {count:,} of {rows:,} rows could not be read ({_share(count, rows)})"

    def too_many(self) -> bool:
        """Whether more of any one source cannot be read than a few broken lines."""
        return any(count > MOST_SHARE * self.rows[source] for source, count in self.unread.items())


def _share(part: int, whole: int) -> str:
    share = 100 * part / whole
    return f"{share:.1f} %" if share >= 0.1 else "less than 0.1 %"
