"""The lines of a log, block by block, and how many were read. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple


class Block(NamedTuple):
    """Whole lines, which are cut apart only where somebody looks at them. `first`: the number of the first in the file,
    from 1; `text`: the lines with an end between each two; `size`: how many lines."""

    first: int
    text: bytes
    size: int

    @classmethod
    def of(cls, first: int, lines: Sequence[bytes]) -> Block:
        """At least one line."""
        return cls(first, b"\n".join(lines), len(lines))

    @property
    def lines(self) -> list[bytes]:
        return self.text.split(b"\n")

    @property
    def last(self) -> int:
        """The number of its last line."""
        return self.first + self.size - 1


MOST_TEXTS = 1000  # different unrecognised lines that are kept to be listed; the others are only counted
TEXT_LENGTH = 300  # characters that are kept of such a line


@dataclass(slots=True)
class Tally:
    """What was read. `kernel`: an event was seen, or a line that begins as only the kernel's do.

    drivers   driver -> how many of its lines no rule recognises (messages.py)
    texts     (driver, such a line) -> (its first line's number, how many)
    """

    lines: int = 0
    kernel: bool = False
    binary: bool = False
    drivers: dict[str, int] = field(default_factory=dict)
    texts: dict[tuple[str, str], tuple[int, int]] = field(default_factory=dict)

    def count_unrecognised(self, driver: str, text: str, line: int, count: int) -> None:
        self.drivers[driver] = self.drivers.get(driver, 0) + count
        name = (driver, text[:TEXT_LENGTH])
        known = self.texts.get(name)
        if known is not None:
            self.texts[name] = (known[0], known[1] + count)
        elif len(self.texts) < MOST_TEXTS:
            self.texts[name] = (line, count)
