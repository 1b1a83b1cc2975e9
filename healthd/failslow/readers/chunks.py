"""Reads tables in chunks of rows, as columns. Formats: CSV and JSON lines (also gzip-compressed), and Parquet.

Text is read with the standard library, so that each error names its line. DuckDB reads Parquet (extra
healthd[failslow]).
"""

from __future__ import annotations

import csv
import gzip
import json
import lzma
import os
import stat
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import chain, islice
from typing import Any, BinaryIO, NamedTuple, cast

from healthd.common.errors import HealthdError
from healthd.common.text import printable, redacted, regex

CHUNK_ROWS = 1 << 16
BLOCK = 1 << 20  # bytes
MAX_LINE_BYTES = 1 << 20
_BEGIN = 1 << 16
_DELIMITERS = (",", "\t", ";")
NUMBER = regex(r"\s*[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?\s*")


class Unreadable(HealthdError):
    """The file is not a table of samples, or is damaged.

    The message is one sentence that begins with the file's name.
    """


class Chunk(NamedTuple):
    """Some rows.

    Attributes:
        columns: cells of each selected column (str from CSV, JSON values, numbers and str from Parquet).
        where: function that returns the location of a row for a message, such as "line 17"; rows are counted from 0.
    """

    columns: tuple[Sequence[Any], ...]
    where: Callable[[int], str]


class Table(NamedTuple):
    """An open table.

    Attributes:
        names: names of the columns.
        first: the first rows, with all columns. chunks(selected): yields all rows, with only the columns that have
            these indices; it can be called only once.
        notes: sentences without a full stop about problems while reading; they are complete after the last chunk.
    """

    names: tuple[str, ...]
    first: Sequence[Sequence[Any]]
    chunks: Callable[[Sequence[int]], Iterator[Chunk]]
    notes: list[str]


@contextmanager
def open_table(path: str, name: str, standard_input: BinaryIO | None = None) -> Iterator[Table]:
    """Open the table in a file. The first bytes determine the format. Raises Unreadable.

    Args:
        name: the file's name in messages.
        standard_input: if given, it is read instead of the file.
    """
    try:
        with standard_input or _open_regular(path, name) as file:
            begin = file.peek(4)[:4] if standard_input else _peek(file)  # type: ignore[attr-defined]
            if begin == b"PAR1":
                if standard_input:
                    raise Unreadable(f"{name}: Parquet cannot be read from standard input")
                yield _parquet_table(path, name)
            elif begin[:2] == b"\x1f\x8b":
                with gzip.GzipFile(fileobj=file) as unpacked:
                    yield _text_table(cast(BinaryIO, unpacked), name)
            else:
                yield _text_table(file, name)
    except OSError as error:
        if isinstance(error, gzip.BadGzipFile):
            raise Unreadable(f"{name}: has damaged compressed data") from None
        raise Unreadable(f"{name}: cannot be read: {error.strerror or error}") from None
    except (EOFError, zlib.error, lzma.LZMAError):
        raise Unreadable(f"{name}: has damaged or truncated compressed data") from None


def _open_regular(path: str, name: str) -> BinaryIO:
    """Open the file. If it is a pipe, do not wait for the other end. Raises OSError, Unreadable."""
    file = os.fdopen(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb")
    kind = os.fstat(file.fileno()).st_mode
    if not stat.S_ISREG(kind):
        file.close()
        shell = stat.S_ISFIFO(kind) and path.startswith(("/dev/fd/", "/dev/stdin", "/proc/self/fd/"))
        hint = " (for standard input, use -: ... | healthd failslow -)" if shell else ""
        raise Unreadable(f"{name}: is not a regular file{hint}")
    return file


def _peek(file: BinaryIO) -> bytes:
    begin = file.read(4) or b""  # None if a kernel file has no data at present
    file.seek(0)
    return begin


# --- text


def _text_table(file: BinaryIO, name: str) -> Table:
    blocks = _blocks(file, name)
    first = next(blocks, "")
    sample = next((line for line in first.split("\n") if line.strip()), "")
    if not sample:
        raise Unreadable(f"{name}: is empty" if not first else f"{name}: line 1: is blank")
    all_blocks = chain([first], blocks)
    if sample.lstrip().startswith("{"):
        return _json_table(chain.from_iterable(block.split("\n") for block in all_blocks), name)
    if sample.lstrip().startswith("["):
        raise Unreadable(
            f"{name}: line 1: is a JSON array, but one object per line is required (convert with jq -c '.[]')"
        )
    return _csv_table(all_blocks, sample, name)


def _blocks(file: BinaryIO, name: str) -> Iterator[str]:
    """Yield blocks of whole lines.

    The last newline of a block is left out; at the end of the file, it may be missing.
    """
    incomplete, lines, begin = b"", 0, True
    while data := file.read(BLOCK):
        if begin:
            data = data.removeprefix(b"\xef\xbb\xbf")
            if b"\0" in data[:_BEGIN] or data.startswith((b"\xff\xfe", b"\xfe\xff")):
                raise Unreadable(f"{name}: is neither UTF-8 text nor Parquet")
            begin = False
        data = incomplete + data
        end = data.rfind(b"\n") + 1
        incomplete = data[end:]
        lines += data.count(b"\n")
        if len(incomplete) > MAX_LINE_BYTES:
            raise Unreadable(f"{name}: line {lines + 1:,}: is longer than 1 MiB")
        if end:
            yield data[: end - 1].decode("utf-8", "replace")
    if incomplete:
        yield incomplete.decode("utf-8", "replace")


def _csv_table(blocks: Iterator[str], head: str, name: str) -> Table:
    delimiter = max(_DELIMITERS, key=lambda candidate: head.count(candidate))
    notes: list[str] = []
    parts = _csv_parts(blocks, delimiter, name)
    line_before, head_rows = next(parts)
    if isinstance(head_rows, str):
        head_rows = _records(head_rows.split("\n"), delimiter, line_before, name)
    begin = next(at for at, row in enumerate(head_rows) if row)
    names = [cell.strip() for cell in head_rows[begin]]
    if all(map(NUMBER.fullmatch, names)):
        names = [str(column) for column in range(1, len(names) + 1)]
        notes.append('has no header, so columns are named "1", "2" and so on')
    else:
        head_rows[begin] = []
    width = len(names)

    def columns(selected: Sequence[int]) -> Iterator[Chunk]:
        torn = ""  # the last line is too short; it may be incomplete
        for start, part in chain([(line_before, head_rows)], parts):
            if torn:
                raise Unreadable(f"{name}: {torn}")
            if isinstance(part, str):
                if (split_cells := _split_cells(part, width, delimiter)) is not None:
                    yield Chunk(tuple(split_cells[column] for column in selected), partial(_line, start))
                    continue
                part = _records(part.split("\n"), delimiter, start, name)
            rows, lines, torn = _check_widths(part, start, width, name)
            if rows:
                cells = list(zip(*rows, strict=True))
                yield Chunk(tuple(cells[column] for column in selected), lines.__getitem__)
        if torn:
            notes.append(f"{torn.partition(':')[0]} is incomplete and was left out")

    first = [row for row in head_rows[: 100 + begin] if len(row) == width]
    return Table(tuple(names), list(zip(*first, strict=True)) or [()] * width, columns, notes)


def _csv_parts(blocks: Iterator[str], delimiter: str, name: str) -> Iterator[tuple[int, str | list[list[str]]]]:
    """Yield blocks of whole records as text, each with the number of the line before it.

    From the first block that may contain a quoted newline on, blocks are rows instead of text.
    """
    line = 0
    for block in blocks:
        block = block.replace("\r\n", "\n").removesuffix("\r") if "\r" in block else block
        lines = block.count("\n") + 1
        if '"' in block and any(text_line.count('"') % 2 for text_line in block.split("\n")):
            remaining_lines = (
                f"{text_line}\n" for text_block in chain([block], blocks) for text_line in text_block.split("\n")
            )
            reader = csv.reader(remaining_lines, delimiter=delimiter, strict=True)
            base = line
            while rows := _read_rows(reader, base, name, CHUNK_ROWS):
                yield line, rows
                line += sum(1 + sum(cell.count("\n") for cell in row) for row in rows)
            return
        yield line, block
        line += lines


def _records(lines: Sequence[str], delimiter: str, start: int, name: str) -> list[list[str]]:
    ends = (f"{line}\n" for line in lines)  # a quoted newline is part of its cell
    return _read_rows(csv.reader(ends, delimiter=delimiter, strict=True), start, name, len(lines))


def _read_rows(reader: Any, start: int, name: str, limit: int) -> list[list[str]]:
    """Return the next rows of a csv.reader. Raises Unreadable.

    Args:
        start: number of the line before the reader's first line.
    """
    try:
        return list(islice(reader, limit))
    except csv.Error as error:
        raise Unreadable(f"{name}: line {start + reader.line_num:,}: is not CSV: {printable(str(error))}") from None


def _split_cells(block: str, width: int, delimiter: str) -> list[list[str]] | None:
    """Split text into columns. Return None if it contains quotes or if a line does not have `width` cells.

    This is three times as fast as the csv module. Each newline becomes a separate cell. If each line has `width` cells,
    these newline cells are at known positions.
    """
    if '"' in block or "\r" in block:
        return None
    cells = block.replace("\n", f"{delimiter}\n{delimiter}").split(delimiter)
    ends = block.count("\n")
    if len(cells) != width * (ends + 1) + ends or cells[width :: width + 1].count("\n") != ends:
        return None
    return [cells[column :: width + 1] for column in range(width)]


def _line(start: int, row: int) -> str:
    return f"line {start + row + 1:,}"


def _check_widths(
    rows: Sequence[list[str]], start: int, width: int, name: str
) -> tuple[list[list[str]], list[str], str]:
    """Return the rows of the right width, their locations, and a problem with the last row, if any. Skip blank lines.

    Raises Unreadable if another row has a wrong width.

    Args:
        start: number of the line before the first row.
    """
    good_rows, lines, problem = [], [], ""
    for row in rows:
        start += 1
        if problem and row:
            break
        if len(row) == width:
            good_rows.append(row)
            lines.append(f"line {start:,}")
        elif row:
            problem = f"line {start:,}: has {len(row):,} cells, but the header has {width:,}"
            if len(row) > width:
                break
        start += sum(cell.count("\n") for cell in row) if width else 0
    else:
        return good_rows, lines, problem
    raise Unreadable(f"{name}: {problem}")


def _json_table(lines: Iterator[str], name: str) -> Table:
    notes: list[str] = []
    chunks = _objects(lines, name, notes)
    numbers, first_objects = next(chunks)
    names = tuple(dict.fromkeys(key for record in first_objects for key in record))

    def columns(selected: Sequence[int]) -> Iterator[Chunk]:
        for line_numbers, rows in chain([(numbers, first_objects)], chunks):
            cells = tuple([row.get(names[column]) for row in rows] for column in selected)
            yield Chunk(cells, lambda row, line_numbers=line_numbers: f"line {line_numbers[row]:,}")  # type: ignore[misc]

    return Table(names, [[row.get(key) for row in first_objects[:100]] for key in names], columns, notes)


def _objects(
    lines: Iterator[str], name: str, notes: list[str]
) -> Iterator[tuple[Sequence[int], Sequence[dict[str, Any]]]]:
    """Yield line numbers and their objects, CHUNK_ROWS at a time.

    If the last line is not JSON, it is incomplete and is left out with a note. Raises Unreadable for any other line
    that is not an object.
    """
    numbers: list[int] = []
    found: list[dict[str, Any]] = []
    torn, begun = "", False
    for number, line in enumerate(lines, 1):
        if not line or line.isspace():
            continue
        if torn:
            raise Unreadable(torn)
        try:
            record = json.loads(line)
        except (ValueError, RecursionError):
            record = None
        if isinstance(record, dict):
            numbers.append(number)
            found.append(record)
            if len(found) == CHUNK_ROWS:
                yield numbers, found
                numbers, found, begun = [], [], True
            continue
        problem = "is damaged JSON" if record is None else "is not a JSON object"
        torn = f"{name}: line {number:,}: {problem}: {redacted(line.strip())}"
        if record is not None or not (found or begun):
            raise Unreadable(torn)
    if torn:
        notes.append(f"{torn.removeprefix(f'{name}: ').partition(': ')[0]} is incomplete and was left out")
    yield numbers, found


# --- Parquet


def _parquet_table(path: str, name: str) -> Table:
    try:
        import duckdb
    except ImportError:
        raise Unreadable(
            f"{name}: Parquet needs the package duckdb (extra failslow): pip install duckdb, or write the data as CSV"
        ) from None
    try:
        database = duckdb.connect(config={"threads": 2, "memory_limit": "256MB"})
        source = "read_parquet(?)"
        description = database.execute(f"DESCRIBE SELECT * FROM {source}", [_escape_glob(path)]).fetchall()
        names = tuple(str(row[0]) for row in description)
        all_cells = ", ".join(_column_sql(str(row[0]), str(row[1])) for row in description)
        first = database.execute(f"SELECT {all_cells} FROM {source} LIMIT 100", [_escape_glob(path)]).fetchall()
    except duckdb.Error as error:
        raise Unreadable(f"{name}: is damaged Parquet: {_first_line(error)}") from None

    def columns(selected: Sequence[int]) -> Iterator[Chunk]:
        # Only numbers and text convert cheaply to Python objects. A time becomes ISO 8601.
        picked = ", ".join(_column_sql(names[column], str(description[column][1])) for column in selected)
        start = 0
        try:
            answer = database.execute(f"SELECT {picked} FROM {source}", [_escape_glob(path)])
            while rows := answer.fetchmany(CHUNK_ROWS):
                yield Chunk(tuple(zip(*rows, strict=True)), lambda row, start=start: f"row {start + row + 1:,}")  # type: ignore[misc]
                start += len(rows)
        except duckdb.Error as error:
            raise Unreadable(f"{name}: is damaged Parquet: {_first_line(error)}") from None

    return Table(names, list(zip(*first, strict=True)) or [()] * len(names), columns, [])


def _escape_glob(path: str) -> str:
    """Return the path with glob characters escaped."""
    return "".join(f"[{sign}]" if sign in "*?[" else sign for sign in os.path.abspath(path))


def _column_sql(column: str, kind: str) -> str:
    quoted = '"' + column.replace('"', '""') + '"'
    if kind.startswith("DECIMAL") or kind in ("HUGEINT", "UHUGEINT"):
        return f"CAST({quoted} AS DOUBLE)"
    plain = ("TINYINT", "SMALLINT", "INTEGER", "BIGINT", "UTINYINT", "USMALLINT", "UINTEGER", "UBIGINT", "VARCHAR")
    return quoted if kind in (*plain, "FLOAT", "DOUBLE", "BOOLEAN") else f"CAST({quoted} AS VARCHAR)"


def _first_line(error: Exception) -> str:
    return printable((str(error).splitlines() or [""])[0])
