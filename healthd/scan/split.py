"""Where a large log may be cut into pieces that are read side by side, and the bytes of one.

What one reader of the whole file finds must be found: so a piece ends where that reader ends a block, before a line
that is not indented (an indented one may belong to the program of a line before), and the lines before it that a record
could have begun on are near enough to be read again.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import NamedTuple

from healthd.scan.continuation import LINES_KEPT
from healthd.scan.log_file import BLOCK, MAX_LINE, LogError

PIECE_BYTES = 1 << 20  # of all faults some 10 MiB are kept meanwhile
CONTEXT_BYTES = (3 << 17, 8 << 20)  # so far back LINES_KEPT lines are looked for
TRIED_BYTES = 8 << 20  # where no piece may end; then there are no lines to be found soon


class Piece(NamedTuple):
    """Bytes of a file. `context`: where the lines that stand before it begin; `last`: it goes on beyond `ends`, where
    the file ended a moment ago, to where it ends when it is read."""

    context: int
    begins: int
    ends: int
    last: bool = False


def pieces(file: int, piece_bytes: int = PIECE_BYTES, block: int = BLOCK) -> Iterator[Piece]:
    """The pieces of a file in their order; planned as they are asked for, since a log may grow meanwhile."""
    context = begins = 0
    while True:
        try:
            found = _cut(file, begins, begins + piece_bytes, block)
        except OSError:  # whoever reads so far will be told
            found = None
        if found is None:
            yield Piece(context, begins, max(begins, os.fstat(file).st_size), last=True)
            return
        yield Piece(context, begins, found[1])
        context, begins = found


def _cut(file: int, begins: int, wanted: int, block: int) -> tuple[int, int] | None:
    """(where the lines before a cut begin, where the cut is), for the end of a piece, near a place; None: nowhere."""
    first = -(-wanted // block) * block
    for end in range(first, first + TRIED_BYTES + 1, block):
        before = max(begins, end - MAX_LINE)
        text = os.pread(file, end - before, before)
        if before + len(text) < end:
            return None  # the file ends before
        cut = before + text.rfind(b"\n") + 1
        behind = os.pread(file, 64, cut).lstrip(b"\0")[:1]
        if cut > before and behind not in (b"", b" ", b"\t"):
            context = _context(file, cut)
            return None if context is None else (context, cut)
    return None


def _context(file: int, cut: int) -> int | None:
    """Where the LINES_KEPT lines before a line begin; None if that is too far."""
    for size in CONTEXT_BYTES:
        start = max(0, cut - size)
        text = os.pread(file, cut - start, start)
        before, *lines = text.rsplit(b"\n", LINES_KEPT + 1)
        if len(lines) > LINES_KEPT:  # the last of these is what stands behind the end of the line before the cut
            return start + len(before) + 1
        if start == 0:
            return 0
    return None


def chunks(file: int, name: str, begins: int, ends: int, last: bool = False, block: int = BLOCK) -> Iterator[bytes]:
    """The bytes of a piece as one reader of the whole file has them: up to the multiples of a block. Raises LogError
    where the file has become shorter, OSError."""
    stop = ((begins + MAX_LINE) // block + 1) * block if begins else block
    while last or begins < ends:
        wanted = (stop if last else min(stop, ends)) - begins
        data = os.pread(file, wanted, begins)
        if data:
            yield data
        begins += len(data)
        stop = max(stop, (begins // block + 1) * block)
        if not data:
            if begins < ends:
                raise LogError(f"{name}: became shorter while it was read")
            return
