"""Reads records in delimited text without quotes, as written by sacct --parsable2, in bounded memory.

In this format, the delimiter is not escaped, and a field may contain a line end. A record continues until it has as
many fields as its header. If a record has too many fields, a text contained the delimiter. Such a record is accepted
only if the columns with a known form leave exactly one way to divide it. All other records are counted as unread, with
the line at which they begin.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import BinaryIO, Protocol

from healthd.common.text import regex

MAX_RECORD_BYTES = 1 << 20  # per record
MAX_RECORD_LINES = 64
MAX_DIVISIONS = 256  # maximum attempts to divide a record with too many fields
CHUNK = 1 << 20
_BOM = "\ufeff"
_HEADER = regex(r"([A-Za-z]\w*)([^A-Za-z0-9_\n]{1,8})(?=[A-Za-z]|$)")

Fields = list[str]


class Format(Protocol):
    """Describes the columns of one kind of table."""

    def is_header(self, names: Sequence[str], is_first: bool) -> bool:
        """Return True if a line with these fields is a header.

        Args:
            is_first: True if there is no header yet. Free text may look like a header, so a later header must have more
                names.
        """

    def is_free_text(self, name: str) -> bool:
        """Return True if a column may contain any text, including the delimiter and line ends."""

    def is_used(self, name: str) -> bool:
        """Return True if a column is used."""

    def fits(self, name: str, text: str) -> bool:
        """Return True if the text is valid in a column that is not free."""


@dataclass(frozen=True, slots=True)
class Batch:
    """Rows with the same header. `header` changes only if a file contains another one. `rows` are (line, fields)."""

    header: tuple[str, ...]
    rows: list[tuple[int, Fields]]


def read_records(
    file: BinaryIO, table_format: Format, unread: Callable[[int, str], None], delimiter: str = ""
) -> Iterator[Batch]:
    """Yield the records in a file below its headers.

    Args:
        delimiter: "" to determine it from the header.
    """
    reader = _Reader(table_format, unread, delimiter)
    number = 1
    for lines, whole in _chunks(file, unread):
        rows = reader.add_lines(number, lines, whole)
        number += len(lines)
        yield from rows
    yield from reader.finish()


def _chunks(file: BinaryIO, unread: Callable[[int, str], None]) -> Iterator[tuple[list[str], bool]]:
    """Yield lines without line ends, and True if the last line had one. An overlong line becomes "" and is counted as
    unread."""
    remainder, number = b"", 1
    while chunk := file.read(CHUNK):
        chunk = remainder + chunk
        cut = chunk.rfind(b"\n") + 1
        lines, remainder = _lines(chunk[:cut]), chunk[cut:]
        yield lines, True
        number += len(lines)
        if len(remainder) > MAX_RECORD_BYTES:
            unread(number, f"the line is longer than {MAX_RECORD_BYTES} bytes")
            remainder = b""
            while (chunk := file.readline(CHUNK)) and not chunk.endswith(b"\n"):
                pass
            yield [""], True
            number += 1
    if remainder:
        yield _lines(remainder + b"\n"), False


def _lines(chunk: bytes) -> list[str]:
    """Split the text into lines that end in LF or CR LF.

    Bytes that are not UTF-8 become \\xff, which no column with a known form contains.
    """
    return chunk.replace(b"\r\n", b"\n").decode("utf-8", "backslashreplace").split("\n")[:-1]


class _Reader:
    def __init__(self, form: Format, unread: Callable[[int, str], None], delimiter: str) -> None:
        self.form = form
        self.unread = unread
        self.delimiter = delimiter
        self.has_given_delimiter = bool(delimiter)
        self.header: tuple[str, ...] = ()
        self.open_lines: list[str] = []  # lines of an incomplete record
        self.open_line_number = 0
        self.has_reported_no_header = False  # True if lines above the first header were already reported

    def add_lines(self, number: int, lines: list[str], whole: bool) -> Iterator[Batch]:
        """Yield the complete records.

        Args:
            number: number of the first line.
            whole: True if the last line has a line end.
        """
        rows: list[tuple[int, Fields]] = []
        width, split, first = len(self.header), self.delimiter, self.header[:1]
        last = number + len(lines) - 1
        for at, line in enumerate(lines, number):
            fields = line.split(split) if split else []
            if (
                len(fields) == width
                and width
                and not self.open_lines
                and fields[:1] != [*first]
                and (whole or at != last)
            ):
                rows.append((at, fields))
                continue
            if self._begins_table(line):
                self._discard_open()
                if rows:
                    yield Batch(self.header, rows)
                    rows = []
                self._set_header(line)
                width, split, first = len(self.header), self.delimiter, self.header[:1]
            else:
                rows.extend(self._add_irregular_line(at, line, whole or at != last))
        if rows:
            yield Batch(self.header, rows)

    def finish(self) -> Iterator[Batch]:
        self._discard_open()
        yield from ()

    def _begins_table(self, line: str) -> bool:
        if self.has_given_delimiter and self.header:
            return False  # each call to sacct prints one header
        names = self._names(line)
        return bool(names) and self.form.is_header(names, not self.header)

    def _names(self, line: str) -> list[str]:
        line = line.removeprefix(_BOM)
        if self.has_given_delimiter:
            return line.split(self.delimiter)
        found = _HEADER.match(line)
        return line.split(found[2]) if found and len(line) < 1 << 16 else []

    def _set_header(self, line: str) -> None:
        self.header = tuple(self._names(line))
        if not self.has_given_delimiter:
            found = _HEADER.match(line.removeprefix(_BOM))
            assert found is not None
            self.delimiter = found[2]

    def _add_irregular_line(self, number: int, line: str, whole: bool) -> Iterator[tuple[int, Fields]]:
        """Process a line that is not a complete record by itself or that follows an incomplete record."""
        if not self.header:
            if line.strip() and not line.startswith("#") and not self.has_reported_no_header:
                self.has_reported_no_header = True
                self.unread(number, "no header line precedes it")
            return
        if not self.open_lines and not line.strip():
            return
        width = len(self.header)
        own_fields = line.split(self.delimiter)
        if self.open_lines:
            if len(own_fields) == width and whole and self._fits(own_fields):
                self._discard_open()  # this is a complete record, so the previous record was truncated
                yield number, own_fields
                return
            joined = " ".join([*self.open_lines, line]).split(self.delimiter)
            if (
                len(joined) < width
                and len(self.open_lines) < MAX_RECORD_LINES
                and sum(map(len, self.open_lines)) < MAX_RECORD_BYTES
            ):
                self.open_lines.append(line)
                return
            fields = joined if len(joined) == width and self._fits(joined) else self._divide(joined)
            if fields is not None and whole:
                yield self.open_line_number, fields
                self.open_lines = []
                return
            self._discard_open()
        if not whole:
            self.unread(number, "the file ends within this line, which may be truncated")
        elif len(own_fields) < width:
            self.open_lines, self.open_line_number = [line], number
        elif len(own_fields) == width:
            yield number, own_fields
        elif (fields := self._divide(own_fields)) is not None:
            yield number, fields
        else:
            self.unread(number, f"{len(own_fields)} fields, but the header has {width}")

    def _discard_open(self) -> None:
        if self.open_lines:
            fields = " ".join(self.open_lines).count(self.delimiter) + 1
            self.unread(self.open_line_number, f"{fields} fields, but the header has {len(self.header)}")
            self.open_lines = []

    def _fits(self, fields: Fields) -> bool:
        form = self.form
        return all(
            form.is_free_text(name) or form.fits(name, text) for name, text in zip(self.header, fields, strict=True)
        )

    def _divide(self, fields: Fields) -> Fields | None:
        """Join neighbouring fields in free-text columns, so that the number of fields is right.

        Return None if this is impossible, or if several ways to join them give different texts in a used column.
        """
        form, header = self.form, self.header
        if len(fields) <= len(header) or not any(map(form.is_free_text, header)):
            return None
        found: list[Fields] = []
        tried = 0

        def divide(column: int, position: int, divided: Fields) -> None:
            nonlocal tried
            tried += 1
            if tried > MAX_DIVISIONS * len(header):
                return
            if column == len(header):
                if position == len(fields):
                    found.append(divided)
                return
            surplus = len(fields) - position - (len(header) - column)
            name = header[column]
            for more in range(surplus + 1) if form.is_free_text(name) else range(1):
                text = self.delimiter.join(fields[position : position + more + 1])
                if position < len(fields) and (form.is_free_text(name) or form.fits(name, text)):
                    divide(column + 1, position + more + 1, [*divided, text])

        divide(0, 0, [])
        if tried > MAX_DIVISIONS * len(header) or not found:
            return None
        used = [column for column, name in enumerate(header) if form.is_used(name)]
        is_unique = all(
            [division[column] for column in used] == [found[0][column] for column in used] for division in found
        )
        return found[0] if is_unique else None
