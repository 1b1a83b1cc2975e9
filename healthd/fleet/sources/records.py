"""Records of delimited text without quotes, as sacct --parsable2 writes them, in bounded memory.

The delimiter is not escaped, and a field may contain a line end. Records are reassembled only if the result is
unambiguous: a record continues until it has as many fields as its header. A record with too many fields is accepted
only if the columns with a known form leave one way to divide it. Anything else is counted as unread, with the line in
which it begins.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import BinaryIO, Protocol

from healthd.common.text import regex

MOST_BYTES = 1 << 20  # per record
MOST_LINES = 64
MOST_WAYS = 256  # to divide a record with too many fields
CHUNK = 1 << 20
_BOM = "\ufeff"
_HEADER = regex(r"([A-Za-z]\w*)([^A-Za-z0-9_\n]{1,8})(?=[A-Za-z]|$)")

Fields = list[str]


class Format(Protocol):
    """Knowledge about a kind of table."""

    def is_header(self, names: Sequence[str], is_first: bool) -> bool:
        """Return True if a line with these fields names columns.

        is_first: no earlier line does. Free text may look like a header, so a later header must have more names.
        """

    def free(self, name: str) -> bool:
        """Return True if a column may contain any text, including the delimiter and line ends."""

    def wanted(self, name: str) -> bool:
        """Return True if a column is used."""

    def fits(self, name: str, text: str) -> bool:
        """Return True if the text is valid in a column that is not free."""


@dataclass(frozen=True, slots=True)
class Batch:
    """Rows with the same header. `header` changes only if a file contains another one. `rows`: (line, fields)."""

    header: tuple[str, ...]
    rows: list[tuple[int, Fields]]


def records(file: BinaryIO, form: Format, unread: Callable[[int, str], None], delimiter: str = "") -> Iterator[Batch]:
    """Yield the records of a file below its headers. delimiter: "" = taken from the header."""
    reader = _Reader(form, unread, delimiter)
    number = 1
    for lines, whole in _chunks(file, unread):
        rows = reader.take(number, lines, whole)
        number += len(lines)
        yield from rows
    yield from reader.end()


def _chunks(file: BinaryIO, unread: Callable[[int, str], None]) -> Iterator[tuple[list[str], bool]]:
    """Yield lines without their ends, and whether the last one has its end. An overlong line is "" and unread."""
    rest, number = b"", 1
    while chunk := file.read(CHUNK):
        chunk = rest + chunk
        cut = chunk.rfind(b"\n") + 1
        lines, rest = _lines(chunk[:cut]), chunk[cut:]
        yield lines, True
        number += len(lines)
        if len(rest) > MOST_BYTES:
            unread(number, f"the line is longer than {MOST_BYTES} bytes")
            rest = b""
            while (chunk := file.readline(CHUNK)) and not chunk.endswith(b"\n"):
                pass
            yield [""], True
            number += 1
    if rest:
        yield _lines(rest + b"\n"), False


def _lines(chunk: bytes) -> list[str]:
    """Split into lines that end in LF or CR LF.

    Bytes that are not UTF-8 become \\xff; the columns with a known form contain none.
    """
    return chunk.replace(b"\r\n", b"\n").decode("utf-8", "backslashreplace").split("\n")[:-1]


class _Reader:
    def __init__(self, form: Format, unread: Callable[[int, str], None], delimiter: str) -> None:
        self.form = form
        self.unread = unread
        self.delimiter = delimiter
        self.known = bool(delimiter)
        self.header: tuple[str, ...] = ()
        self.open: list[str] = []  # lines of an incomplete record
        self.open_at = 0
        self.lost = False  # lines above the first header were reported

    def take(self, number: int, lines: list[str], whole: bool) -> Iterator[Batch]:
        """Yield the complete records. number: of the first line; whole: the last line has its end."""
        rows: list[tuple[int, Fields]] = []
        width, split, first = len(self.header), self.delimiter, self.header[:1]
        last = number + len(lines) - 1
        for at, line in enumerate(lines, number):
            fields = line.split(split) if split else []
            if len(fields) == width and width and not self.open and fields[:1] != [*first] and (whole or at != last):
                rows.append((at, fields))
                continue
            if self._begins_table(line):
                self._give_up()
                if rows:
                    yield Batch(self.header, rows)
                    rows = []
                self._set_header(line)
                width, split, first = len(self.header), self.delimiter, self.header[:1]
            else:
                rows.extend(self._irregular(at, line, whole or at != last))
        if rows:
            yield Batch(self.header, rows)

    def end(self) -> Iterator[Batch]:
        self._give_up()
        yield from ()

    def _begins_table(self, line: str) -> bool:
        if self.known and self.header:
            return False  # one call of sacct prints one header
        names = self._names(line)
        return bool(names) and self.form.is_header(names, not self.header)

    def _names(self, line: str) -> list[str]:
        line = line.removeprefix(_BOM)
        if self.known:
            return line.split(self.delimiter)
        found = _HEADER.match(line)
        return line.split(found[2]) if found and len(line) < 1 << 16 else []

    def _set_header(self, line: str) -> None:
        self.header = tuple(self._names(line))
        if not self.known:
            found = _HEADER.match(line.removeprefix(_BOM))
            assert found is not None
            self.delimiter = found[2]

    def _irregular(self, at: int, line: str, whole: bool) -> Iterator[tuple[int, Fields]]:
        """Process a line that is not a complete record by itself, or follows an incomplete one."""
        if not self.header:
            if line.strip() and not line.startswith("#") and not self.lost:
                self.lost = True
                self.unread(at, "no header line above it")
            return
        if not self.open and not line.strip():
            return
        width = len(self.header)
        alone = line.split(self.delimiter)
        if self.open:
            if len(alone) == width and whole and self._fits(alone):
                self._give_up()  # a complete record: the previous one was cut
                yield at, alone
                return
            joined = " ".join([*self.open, line]).split(self.delimiter)
            if len(joined) < width and len(self.open) < MOST_LINES and sum(map(len, self.open)) < MOST_BYTES:
                self.open.append(line)
                return
            fields = joined if len(joined) == width and self._fits(joined) else self._divided(joined)
            if fields is not None and whole:
                yield self.open_at, fields
                self.open = []
                return
            self._give_up()
        if not whole:
            self.unread(at, "the file ends within this line, which may be cut")
        elif len(alone) < width:
            self.open, self.open_at = [line], at
        elif len(alone) == width:
            yield at, alone
        elif (fields := self._divided(alone)) is not None:
            yield at, fields
        else:
            self.unread(at, f"{len(alone)} fields, but the header has {width}")

    def _give_up(self) -> None:
        if self.open:
            fields = " ".join(self.open).count(self.delimiter) + 1
            self.unread(self.open_at, f"{fields} fields, but the header has {len(self.header)}")
            self.open = []

    def _fits(self, fields: Fields) -> bool:
        form = self.form
        return all(form.free(name) or form.fits(name, text) for name, text in zip(self.header, fields, strict=True))

    def _divided(self, fields: Fields) -> Fields | None:
        """Return the only way to reach the number of columns by joining neighbouring fields in free-text columns.

        None: there is no way, or several that differ in a used column.
        """
        form, header = self.form, self.header
        if len(fields) <= len(header) or not any(map(form.free, header)):
            return None
        found: list[Fields] = []
        tried = 0

        def divide(place: int, at: int, made: Fields) -> None:
            nonlocal tried
            tried += 1
            if tried > MOST_WAYS * len(header):
                return
            if place == len(header):
                if at == len(fields):
                    found.append(made)
                return
            left = len(fields) - at - (len(header) - place)
            name = header[place]
            for more in range(left + 1) if form.free(name) else range(1):
                text = self.delimiter.join(fields[at : at + more + 1])
                if at < len(fields) and (form.free(name) or form.fits(name, text)):
                    divide(place + 1, at + more + 1, [*made, text])

        divide(0, 0, [])
        if tried > MOST_WAYS * len(header) or not found:
            return None
        used = [place for place, name in enumerate(header) if form.wanted(name)]
        same = all([way[place] for place in used] == [found[0][place] for place in used] for way in found)
        return found[0] if same else None
