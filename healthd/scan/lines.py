"""The lines of a log, block by block, and how many were read. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
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


@dataclass(slots=True)
class Tally:
    """What was read. `kernel`: an event was seen, or a line that begins as only the kernel's do."""

    lines: int = 0
    kernel: bool = False
    binary: bool = False

    def add(self, behind: Tally) -> None:
        """What was read behind this."""
        self.lines += behind.lines
        self.kernel = self.kernel or behind.kernel
        self.binary = self.binary or behind.binary
