"""Read a large log in pieces on all cores. The first process puts the results together in the order of the log.

The meaning of a line depends on the line and on a few lines before it, so it is found piece by piece. Events and
findings depend on everything before: events.py and findings.py get the messages one after another, as from one reader.
If a copy is killed, the first process reads its pieces.

The pieces must not change what is found. A piece therefore ends where one reader of the whole file ends a block, before
a line that is not indented (an indented line may belong to the program of an earlier line). The earlier lines on which
a record may have begun must be near enough to be read again.
"""

from __future__ import annotations

import os
import stat
import struct
from collections import deque
from collections.abc import Generator, Iterator
from typing import NamedTuple

from healthd.common import guard
from healthd.host.cpu_count import cores
from healthd.scan import piece_result, subprocesses
from healthd.scan.continuation import LINES_KEPT, Heads
from healthd.scan.lines import Block, Tally
from healthd.scan.literals import by_re2
from healthd.scan.log_file import BLOCK, MAX_LINE, LogError, is_plain, lines_in, why
from healthd.scan.messages import EXPORTED, Reader, Told

PIECE_BYTES = 1 << 20  # a piece full of faults takes some 10 MiB of memory
CONTEXT_BYTES = (3 << 17, 8 << 20)  # how far back LINES_KEPT lines are searched: first the smaller range
TRIED_BYTES = 8 << 20  # how far a place for a cut is searched


class Piece(NamedTuple):
    """A range of bytes of a file.

    context: where the lines to read again before it begin. last: the piece extends beyond `ends`, the file's end a
    moment ago, to the end of the file when it is read.
    """

    context: int
    begins: int
    ends: int
    last: bool = False


def pieces(file: int, piece_bytes: int = PIECE_BYTES, block: int = BLOCK) -> Iterator[Piece]:
    """Yield the pieces of a file in order. They are planned on demand, because the log may grow meanwhile."""
    context = begins = 0
    while True:
        try:
            found = _cut(file, begins, begins + piece_bytes, block)
        except OSError:  # the reader of this piece reports it
            found = None
        if found is None:
            yield Piece(context, begins, max(begins, os.fstat(file).st_size), last=True)
            return
        yield Piece(context, begins, found[1])
        context, begins = found


def _cut(file: int, begins: int, wanted: int, block: int) -> tuple[int, int] | None:
    """Return where the lines before a cut begin, and the cut: the end of a piece near `wanted`. None if there is no
    place for a cut."""
    first = -(-wanted // block) * block
    for end in range(first, first + TRIED_BYTES + 1, block):
        before = max(begins, end - MAX_LINE)
        text = os.pread(file, end - before, before)
        if before + len(text) < end:
            return None  # the file is shorter
        cut = before + text.rfind(b"\n") + 1
        behind = os.pread(file, 64, cut).lstrip(b"\0")[:1]
        if cut > before and behind not in (b"", b" ", b"\t"):
            context = _context(file, cut)
            return None if context is None else (context, cut)
    return None


def _context(file: int, cut: int) -> int | None:
    """Return where the LINES_KEPT lines before a line begin, or None if that is too far back."""
    for size in CONTEXT_BYTES:
        start = max(0, cut - size)
        text = os.pread(file, cut - start, start)
        before, *lines = text.rsplit(b"\n", LINES_KEPT + 1)
        if len(lines) > LINES_KEPT:  # the last item is the text after the final newline before the cut
            return start + len(before) + 1
        if start == 0:
            return 0
    return None


def chunks(file: int, name: str, begins: int, ends: int, last: bool = False, block: int = BLOCK) -> Iterator[bytes]:
    """Yield the bytes of a piece in blocks, as one reader of the whole file gets them. Raises LogError if the file has
    become shorter, and OSError."""
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


_PIECE = struct.Struct("=QQQ?")
MOST_COPIES = 8  # each takes up to 40 MiB of memory
TOLD_AT_ONCE = 500  # then it is seen what the copies have answered meanwhile: who waits for that does not work


class Sizes(NamedTuple):
    """large    bytes, above which a log is read in pieces
    piece      bytes of a piece, about
    copies     processes beside the first: each keeps some 20 MiB of its own
    unread     bytes of answers, above which no further piece is given out
    """

    large: int = 64_000_000
    piece: int = PIECE_BYTES
    block: int = BLOCK
    copies: int = 0
    unread: int = 32 << 20


def open_large(path: str, sizes: Sizes) -> int | None:
    """A descriptor of a log that is worth it: a plain file, of lines, above the size, where there is more than one
    core. None for all others, also those that cannot be opened."""
    if path == "-":
        return None
    try:
        state = os.stat(path)
        if not stat.S_ISREG(state.st_mode) or state.st_size <= sizes.large:
            return None
        if _copies(sizes) < 2 or not subprocesses.can_be_copied():
            return None
        file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        begins = os.pread(file, BLOCK, 0)
    except OSError:
        begins = b""
    if not is_plain(begins) or EXPORTED in begins or b"\n" not in begins:
        os.close(file)
        return None
    return file


def _copies(sizes: Sizes) -> int:
    return sizes.copies or min(cores(), MOST_COPIES)


def messages(file: int, name: str, now: float, tally: Tally, sizes: Sizes) -> Generator[Told, None, None]:
    """What messages.messages() says of the whole file. Raises LogError. Closes the file."""
    reader = Reader(now, by_re2())
    try:
        with subprocesses.crew(_copies(sizes), (file,), _work(reader, file, name, sizes)) as copies:
            yield from _in_order(reader, file, name, tally, sizes, copies)
    except OSError as error:
        raise LogError(f"{name}: {why(error)}") from None
    finally:
        os.close(file)


def _work(reader: Reader, file: int, name: str, sizes: Sizes) -> subprocesses.Work:
    kernel = False  # seen once, it need not be looked for

    def work(request: bytes) -> bytes:
        """Raises SystemExit where something is dropped, since memory is short or by a mistake of ours: what this copy
        remembers may be wrong from now on. The first process reads the piece, and tells people."""
        nonlocal kernel
        part = _Part(reader, file, name, Piece(*_PIECE.unpack(request)), {}, sizes.block, kernel)
        said, trouble, dropped = [], "", guard.dropped.total()
        try:
            for row in part.told():
                said.append(row)
        except LogError as error:
            trouble = str(error)
        kernel = part.tally.kernel
        if guard.dropped.total() != dropped:
            raise SystemExit
        return piece_result.encoded(said, part.tally, part.near, trouble)

    return work


class _Part:
    """A piece that this process reads. `heads`: what is known of the lines before it."""

    def __init__(
        self, reader: Reader, file: int, name: str, piece: Piece, heads: Heads, block: int, kernel: bool
    ) -> None:
        self.tally = Tally(kernel=kernel)
        self.near = reader.neighbours(heads)
        self._reader, self._file, self._name, self._piece, self._block = reader, file, name, piece, block

    def told(self) -> Iterator[Told]:
        """Raises LogError."""
        context, begins, ends, last = self._piece
        try:
            for block in self._blocks(context, begins, False):
                self.near.enter(block.text, block.size)
            yield from self._reader.messages(self._blocks(begins, ends, last), self.tally, self.near)
        except OSError as error:
            raise LogError(f"{self._name}: {why(error)}") from None

    def _blocks(self, begins: int, ends: int, last: bool) -> Iterator[Block]:
        return lines_in(chunks(self._file, self._name, begins, ends, last, self._block), beginning=begins == 0)


def _in_order(
    reader: Reader, file: int, name: str, tally: Tally, sizes: Sizes, copies: list[subprocesses.Copy]
) -> Iterator[Told]:
    given = _Given(pieces(file, sizes.piece, sizes.block), copies, sizes.unread)
    known, heads = piece_result.known_messages(), Heads()
    while (next_one := given.next()) is not None:
        piece, answer = next_one
        part = None if answer is None else piece_result.decoded(answer, known, tally.lines)
        if part is not None and part.asked.isdisjoint(heads):
            tally.add(part.tally)
            for place, row in enumerate(part.told):
                yield row
                if place % TOLD_AT_ONCE == 0:
                    given.look()
            heads = piece_result.heads_behind(heads, part)
            if part.trouble:
                raise LogError(part.trouble)
            continue
        here = _Part(reader, file, name, piece, heads, sizes.block, tally.kernel)
        try:
            for row in here.told():
                yield (tally.lines + row[0], *row[1:])
            heads = here.near.heads(here.tally.lines)
        finally:
            tally.add(here.tally)


class _Given:
    """The pieces of a log, given to copies as these have time; one after another back, in the log's order."""

    def __init__(self, plan: Iterator[Piece], copies: list[subprocesses.Copy], unread: int) -> None:
        self._plan, self._copies, self._unread = plan, copies, unread
        self._waiting: deque[tuple[Piece, subprocesses.Copy | None]] = deque()

    def next(self) -> tuple[Piece, bytes | None] | None:
        """The next piece with its answer, which is None where the first process must read it; None: there is none."""
        self._give()
        if not self._waiting:
            piece = next(self._plan, None)
            return None if piece is None else (piece, None)
        piece, copy = self._waiting.popleft()
        if copy is None:
            return piece, None
        while not copy.answers:
            subprocesses.hear(self._copies, wait=True)
            self._give()
        return piece, copy.answers.popleft()

    def look(self) -> None:
        """Let nobody wait who could work."""
        subprocesses.hear(self._copies, wait=False)
        self._give()

    def _give(self) -> None:
        while len(self._waiting) < subprocesses.MOST_WAITING * len(self._copies):
            idle = [copy for copy in self._copies if copy.alive and copy.waiting < subprocesses.MOST_WAITING]
            if not idle or sum(copy.unread for copy in self._copies) > self._unread:
                return
            piece = next(self._plan, None)
            if piece is None:
                return
            if piece.last:  # how long it will be nobody knows
                self._waiting.append((piece, None))
                return
            copy = min(idle, key=lambda copy: copy.waiting)
            copy.ask(_PIECE.pack(*piece))
            self._waiting.append((piece, copy))
