"""Reads lines from other programs' files in bounded memory. Lines that are not text are counted as unread.

If the last line has no line end, it may be incomplete and counts as unread.
"""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import BinaryIO, cast

from healthd.fleet.ingest import IngestError
from healthd.fleet.sources.reading import Reading

MAX_LINE_BYTES = 1 << 20  # maximum bytes per line
_PIECE = 1 << 16
_GZIP = b"\x1f\x8b"
_BOM = b"\xef\xbb\xbf"


@dataclass
class Position:
    """Position in a file after the last complete line, as bytes and as lines."""

    offset: int = 0
    line_number: int = 0


def read_lines(path: str, reading: Reading) -> Iterator[tuple[int, str]]:
    """Yield (number, line without its end) for a file, plain or gzip. Raises IngestError if it cannot be read."""
    with open_unpacked(path) as file:
        yield from iterate_lines(file, reading)


@contextmanager
def open_unpacked(path: str) -> Iterator[BinaryIO]:
    """Open a file and decompress it. Raises IngestError if it cannot be opened, or later if it cannot be read."""
    try:
        with open(path, "rb") as file:
            packed = file.read(2) == _GZIP
            file.seek(0)
            with gzip.GzipFile(fileobj=file) if packed else nullcontext(file) as unpacked:
                yield cast(BinaryIO, unpacked)
    except IsADirectoryError:
        raise IngestError(f"{path} is a directory; name the files in it ({path.rstrip('/')}/*)") from None
    except OSError as error:
        raise IngestError(f"{path}: cannot be read: {error.strerror or error}") from None
    except (EOFError, zlib.error) as error:
        raise IngestError(f"{path}: the compressed file is damaged: {error}") from None


def is_gzip(path: str) -> bool:
    with open(path, "rb") as file:
        return file.read(2) == _GZIP


def iterate_lines(
    file: BinaryIO, reading: Reading, position: Position | None = None, is_growing: bool = False
) -> Iterator[tuple[int, str]]:
    """Yield (number, line) and advance `position`.

    Args:
        is_growing: the file is still being written, so a last line without an end is skipped.
    """
    position = position or Position()
    try:
        while line := file.readline(MAX_LINE_BYTES + 1):
            number, size = position.line_number + 1, len(line)
            is_complete = line.endswith(b"\n")
            if not is_complete and size > MAX_LINE_BYTES:
                skipped_bytes, is_complete = _skip_line(file)
                size += skipped_bytes
            if not is_complete and is_growing:
                return
            position.line_number, position.offset = number, position.offset + size
            if not is_complete:
                reading.unread(number, "the file ends within this line, which may be truncated")
            elif size > MAX_LINE_BYTES + 1:
                reading.unread(number, f"the line is longer than {MAX_LINE_BYTES} bytes")
            else:
                text = _text(line, number, reading)
                if text is not None:
                    yield number, text
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        reading.cut(f"the compressed file is truncated: {error}")


def _text(line: bytes, number: int, reading: Reading) -> str | None:
    try:
        text = line.removeprefix(_BOM).decode("utf-8") if number == 1 else line.decode("utf-8")
    except UnicodeDecodeError as error:
        reading.unread(number, f"not UTF-8 at byte {error.start + 1} of the line")
        return None
    if "\0" in text:
        reading.unread(number, "the line has a zero byte")
        return None
    return text.rstrip("\r\n")


def _skip_line(file: BinaryIO) -> tuple[int, bool]:
    """Skip the rest of a line. Return the number of bytes, and True if a line end was found."""
    size = 0
    while piece := file.readline(_PIECE):
        size += len(piece)
        if piece.endswith(b"\n"):
            return size, True
    return size, False
