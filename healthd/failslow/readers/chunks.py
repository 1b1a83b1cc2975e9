"""Reader of tables as columns, a chunk of rows at a time: CSV and JSON lines, both also as gzip, and Parquet.

The standard library reads text, so that each error has its line. DuckDB reads Parquet (extra healthd[failslow]).
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
from healthd.common.text import described, printable, regex

ROWS_AT_ONCE = 1 << 16
BLOCK = 1 << 20  # bytes
LONGEST_LINE = 1 << 20
_BEGIN = 1 << 16
_DELIMITERS = (",", "\t", ";")
NUMBER = regex(r"\s*[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?\s*")


class Unreadable(HealthdError):
    """The file is not a table of samples, or is damaged.

    The message is one sentence that begins with the file's name.
    """


class Chunk(NamedTuple):
    """Some rows.

    columns: the cells of each selected column: str from CSV, JSON values, numbers and str from Parquet. where(row):
    "line 17", for a message; rows count from 0.
    """

    columns: tuple[Sequence[Any], ...]
    where: Callable[[int], str]


class Table(NamedTuple):
    """An open table.

    names: its columns. first: the first rows of all columns. chunks(selected): all rows of the columns with these
    indices; may be called once. notes: sentences without a full stop about reading, complete after the last chunk.
    """

    names: tuple[str, ...]
    first: Sequence[Sequence[Any]]
    chunks: Callable[[Sequence[int]], Iterator[Chunk]]
    notes: list[str]


@contextmanager
def opened(path: str, name: str, standard_input: BinaryIO | None = None) -> Iterator[Table]:
    """Open the table in a file. The first bytes determine the format. Raises Unreadable.

    Args:
        name: the file's name in messages.
        standard_input: read in place of the file, if given.
    """
    try:
        with standard_input or _regular(path, name) as file:
            begin = file.peek(4)[:4] if standard_input else _peek(file)  # type: ignore[attr-defined]
            if begin == b"PAR1":
                if standard_input:
                    raise Unreadable(f"{name}: Parquet cannot be read from standard input")
                yield _parquet(path, name)
            elif begin[:2] == b"\x1f\x8b":
                with gzip.GzipFile(fileobj=file) as unpacked:
                    yield _text(cast(BinaryIO, unpacked), name)
            else:
                yield _text(file, name)
    except OSError as error:
        if isinstance(error, gzip.BadGzipFile):
            raise Unreadable(f"{name}: has damaged compressed data") from None
        raise Unreadable(f"{name}: cannot be read: {error.strerror or error}") from None
    except (EOFError, zlib.error, lzma.LZMAError):
        raise Unreadable(f"{name}: has damaged or truncated compressed data") from None


def _regular(path: str, name: str) -> BinaryIO:
    """Open the file without waiting for the other end of a pipe. Raises OSError, Unreadable."""
    file = os.fdopen(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb")
    kind = os.fstat(file.fileno()).st_mode
    if not stat.S_ISREG(kind):
        file.close()
        shell = stat.S_ISFIFO(kind) and path.startswith(("/dev/fd/", "/dev/stdin", "/proc/self/fd/"))
        hint = " (standard input is named -: ... | healthd failslow -)" if shell else ""
        raise Unreadable(f"{name}: is not a regular file{hint}")
    return file


def _peek(file: BinaryIO) -> bytes:
    begin = file.read(4) or b""  # None if a kernel file has no data now
    file.seek(0)
    return begin


# --- text


def _text(file: BinaryIO, name: str) -> Table:
    blocks = _blocks(file, name)
    first = next(blocks, "")
    sample = next((line for line in first.split("\n") if line.strip()), "")
    if not sample:
        raise Unreadable(f"{name}: is empty" if not first else f"{name}: line 1: is blank")
    every = chain([first], blocks)
    if sample.lstrip().startswith("{"):
        return _json_lines(chain.from_iterable(block.split("\n") for block in every), name)
    if sample.lstrip().startswith("["):
        raise Unreadable(f"{name}: line 1: is a JSON array; one object per line is required (convert with jq -c '.[]')")
    return _csv(every, sample, name)


def _blocks(file: BinaryIO, name: str) -> Iterator[str]:
    """Yield blocks of whole lines, without the last newline, which the file may lack too."""
    rest, lines, begin = b"", 0, True
    while data := file.read(BLOCK):
        if begin:
            data = data.removeprefix(b"\xef\xbb\xbf")
            if b"\0" in data[:_BEGIN] or data.startswith((b"\xff\xfe", b"\xfe\xff")):
                raise Unreadable(f"{name}: is neither UTF-8 text nor Parquet")
            begin = False
        data = rest + data
        end = data.rfind(b"\n") + 1
        rest = data[end:]
        lines += data.count(b"\n")
        if len(rest) > LONGEST_LINE:
            raise Unreadable(f"{name}: line {lines + 1:,}: is longer than 1 MiB")
        if end:
            yield data[: end - 1].decode("utf-8", "replace")
    if rest:
        yield rest.decode("utf-8", "replace")


def _csv(blocks: Iterator[str], head: str, name: str) -> Table:
    delimiter = max(_DELIMITERS, key=lambda one: head.count(one))
    notes: list[str] = []
    parts = _parts(blocks, delimiter, name)
    before, some = next(parts)
    if isinstance(some, str):
        some = _records(some.split("\n"), delimiter, before, name)
    begin = next(at for at, row in enumerate(some) if row)
    names = [cell.strip() for cell in some[begin]]
    if all(map(NUMBER.fullmatch, names)):
        names = [str(place) for place in range(1, len(names) + 1)]
        notes.append('has no header: columns are named "1", "2" and so on')
    else:
        some[begin] = []
    width = len(names)

    def columns(wanted: Sequence[int]) -> Iterator[Chunk]:
        torn = ""  # a line that is too short: the last line of a file may be incomplete
        for start, part in chain([(before, some)], parts):
            if torn:
                raise Unreadable(f"{name}: {torn}")
            if isinstance(part, str):
                if (fast := _split(part, width, delimiter)) is not None:
                    yield Chunk(tuple(fast[place] for place in wanted), partial(_line, start))
                    continue
                part = _records(part.split("\n"), delimiter, start, name)
            rows, lines, torn = _even(part, start, width, name)
            if rows:
                cells = list(zip(*rows, strict=True))
                yield Chunk(tuple(cells[place] for place in wanted), lines.__getitem__)
        if torn:
            notes.append(f"{torn.partition(':')[0]} is incomplete and was left out")

    first = [row for row in some[: 100 + begin] if len(row) == width]
    return Table(tuple(names), list(zip(*first, strict=True)) or [()] * width, columns, notes)


def _parts(blocks: Iterator[str], delimiter: str, name: str) -> Iterator[tuple[int, str | list[list[str]]]]:
    """Yield the previous line number with a block of whole records as text.

    Once quoted newlines may occur, the blocks are rows.
    """
    line = 0
    for block in blocks:
        block = block.replace("\r\n", "\n").removesuffix("\r") if "\r" in block else block
        lines = block.count("\n") + 1
        if '"' in block and any(one.count('"') % 2 for one in block.split("\n")):
            rest = (f"{one}\n" for some in chain([block], blocks) for one in some.split("\n"))
            reader = csv.reader(rest, delimiter=delimiter, strict=True)
            base = line
            while rows := _some(reader, base, name, ROWS_AT_ONCE):
                yield line, rows
                line += sum(1 + sum(cell.count("\n") for cell in row) for row in rows)
            return
        yield line, block
        line += lines


def _records(lines: Sequence[str], delimiter: str, start: int, name: str) -> list[list[str]]:
    ends = (f"{line}\n" for line in lines)  # a quoted newline is part of its cell
    return _some(csv.reader(ends, delimiter=delimiter, strict=True), start, name, len(lines))


def _some(reader: Any, start: int, name: str, most: int) -> list[list[str]]:
    """Return the next rows of a csv.reader. Raises Unreadable.

    Args:
        start: number of the line before its first one.
    """
    try:
        return list(islice(reader, most))
    except csv.Error as error:
        raise Unreadable(f"{name}: line {start + reader.line_num:,}: is not CSV: {printable(str(error))}") from None


def _split(block: str, width: int, delimiter: str) -> list[list[str]] | None:
    """Return the columns of text without quotes whose lines all have `width` cells, otherwise None.

    This is three times as fast as the csv module. Each newline becomes a cell of its own, which must then be at every
    expected position.
    """
    if '"' in block or "\r" in block:
        return None
    cells = block.replace("\n", f"{delimiter}\n{delimiter}").split(delimiter)
    ends = block.count("\n")
    if len(cells) != width * (ends + 1) + ends or cells[width :: width + 1].count("\n") != ends:
        return None
    return [cells[place :: width + 1] for place in range(width)]


def _line(start: int, row: int) -> str:
    return f"line {start + row + 1:,}"


def _even(rows: Sequence[list[str]], start: int, width: int, name: str) -> tuple[list[list[str]], list[str], str]:
    """Return the rows of the right width without blank lines, their lines, and the problem of the last row.

    Raises Unreadable if another row has a wrong width.

    Args:
        start: number of the line before the first row.
    """
    kept, lines, wrong = [], [], ""
    for row in rows:
        start += 1
        if wrong and row:
            break
        if len(row) == width:
            kept.append(row)
            lines.append(f"line {start:,}")
        elif row:
            wrong = f"line {start:,}: has {len(row):,} cells, the header has {width:,}"
            if len(row) > width:
                break
        start += sum(cell.count("\n") for cell in row) if width else 0
    else:
        return kept, lines, wrong
    raise Unreadable(f"{name}: {wrong}")


def _json_lines(lines: Iterator[str], name: str) -> Table:
    notes: list[str] = []
    chunks = _objects(lines, name, notes)
    numbers, some = next(chunks)
    names = tuple(dict.fromkeys(key for one in some for key in one))

    def columns(wanted: Sequence[int]) -> Iterator[Chunk]:
        for here, rows in chain([(numbers, some)], chunks):
            cells = tuple([row.get(names[place]) for row in rows] for place in wanted)
            yield Chunk(cells, lambda row, here=here: f"line {here[row]:,}")  # type: ignore[misc]

    return Table(names, [[row.get(key) for row in some[:100]] for key in names], columns, notes)


def _objects(
    lines: Iterator[str], name: str, notes: list[str]
) -> Iterator[tuple[Sequence[int], Sequence[dict[str, Any]]]]:
    """Yield the numbers of the lines and their objects, CHUNK_ROWS at a time.

    A last line that is not JSON is incomplete: it is left out, with a note. Raises Unreadable for any other line that
    is not an object.
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
            one = json.loads(line)
        except (ValueError, RecursionError):
            one = None
        if isinstance(one, dict):
            numbers.append(number)
            found.append(one)
            if len(found) == ROWS_AT_ONCE:
                yield numbers, found
                numbers, found, begun = [], [], True
            continue
        what = "is damaged JSON" if one is None else "is not a JSON object"
        torn = f"{name}: line {number:,}: {what}: {described(line.strip())}"
        if one is not None or not (found or begun):
            raise Unreadable(torn)
    if torn:
        notes.append(f"{torn.removeprefix(f'{name}: ').partition(': ')[0]} is incomplete and was left out")
    yield numbers, found


# --- Parquet


def _parquet(path: str, name: str) -> Table:
    try:
        import duckdb
    except ImportError:
        raise Unreadable(
            f"{name}: Parquet needs the extra: pip install 'healthd[failslow]' (or write it as CSV)"
        ) from None
    try:
        database = duckdb.connect(config={"threads": 2, "memory_limit": "256MB"})
        source = "read_parquet(?)"
        about = database.execute(f"DESCRIBE SELECT * FROM {source}", [_literal(path)]).fetchall()
        names = tuple(str(row[0]) for row in about)
        every = ", ".join(_cell(str(row[0]), str(row[1])) for row in about)
        first = database.execute(f"SELECT {every} FROM {source} LIMIT 100", [_literal(path)]).fetchall()
    except duckdb.Error as error:
        raise Unreadable(f"{name}: is damaged Parquet: {_first_line(error)}") from None

    def columns(wanted: Sequence[int]) -> Iterator[Chunk]:
        # Only numbers and text convert cheaply to Python objects. A time becomes ISO 8601.
        picked = ", ".join(_cell(names[place], str(about[place][1])) for place in wanted)
        start = 0
        try:
            answer = database.execute(f"SELECT {picked} FROM {source}", [_literal(path)])
            while rows := answer.fetchmany(ROWS_AT_ONCE):
                yield Chunk(tuple(zip(*rows, strict=True)), lambda row, start=start: f"row {start + row + 1:,}")  # type: ignore[misc]
                start += len(rows)
        except duckdb.Error as error:
            raise Unreadable(f"{name}: is damaged Parquet: {_first_line(error)}") from None

    return Table(names, list(zip(*first, strict=True)) or [()] * len(names), columns, [])


def _literal(path: str) -> str:
    """Return the path with glob characters escaped."""
    return "".join(f"[{sign}]" if sign in "*?[" else sign for sign in os.path.abspath(path))


def _cell(column: str, kind: str) -> str:
    quoted = '"' + column.replace('"', '""') + '"'
    if kind.startswith("DECIMAL") or kind in ("HUGEINT", "UHUGEINT"):
        return f"CAST({quoted} AS DOUBLE)"
    plain = ("TINYINT", "SMALLINT", "INTEGER", "BIGINT", "UTINYINT", "USMALLINT", "UINTEGER", "UBIGINT", "VARCHAR")
    return quoted if kind in (*plain, "FLOAT", "DOUBLE", "BOOLEAN") else f"CAST({quoted} AS VARCHAR)"


def _first_line(error: Exception) -> str:
    return printable((str(error).splitlines() or [""])[0])
