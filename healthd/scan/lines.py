"""A block of log lines, and the counters for reading a log. All functions are pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple


class Block(NamedTuple):
    """Complete lines, which are split only on demand.

    Attributes:
        first: the first line's number in the file, from 1.
        text: the lines, separated by newlines.
        size: number of lines.
    """

    first: int
    text: bytes
    size: int

    @classmethod
    def from_lines(cls, first: int, lines: Sequence[bytes]) -> Block:
        """Return a block with these lines (at least one)."""
        return cls(first, b"\n".join(lines), len(lines))

    @property
    def lines(self) -> list[bytes]:
        return self.text.split(b"\n")

    @property
    def last(self) -> int:
        """Number of the last line."""
        return self.first + self.size - 1


MAX_TEXTS = 1000  # maximum number of distinct unrecognised lines to list; further lines are only counted
TEXT_LENGTH = 300  # characters kept from an unrecognised line


@dataclass(slots=True)
class Tally:
    """Counts made while a log is read.

    Attributes:
        kernel: True if there was an event, or a line with a prefix that only the kernel writes.
        drivers: maps each driver to the number of its lines that no rule recognises (messages.py).
        texts: maps (driver, line) to (number of the first such line, count).
    """

    lines: int = 0
    kernel: bool = False
    binary: bool = False
    drivers: dict[str, int] = field(default_factory=dict)
    texts: dict[tuple[str, str], tuple[int, int]] = field(default_factory=dict)

    def count_unrecognised(self, driver: str, text: str, line: int, count: int) -> None:
        self.drivers[driver] = self.drivers.get(driver, 0) + count
        name = (driver, text[:TEXT_LENGTH])
        previous = self.texts.get(name)
        if previous is not None:
            self.texts[name] = (previous[0], previous[1] + count)
        elif len(self.texts) < MAX_TEXTS:
            self.texts[name] = (line, count)
