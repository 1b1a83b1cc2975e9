"""A log file or standard input as blocks of whole lines: plain, or compressed as log rotation leaves it.

Memory is bounded, whatever the file holds: a line that is longer than MAX_LINE is cut. A pipe is read as it comes.
"""

from __future__ import annotations

import io
import os
from collections.abc import Iterator
from typing import IO, NamedTuple

from healthd.errors import HealthdError

BLOCK = 1 << 20
MAX_LINE = 16 << 10

# How a file begins -> how it is compressed.
_COMPRESSED = {b"\x1f\x8b": "gzip", b"\xfd7zXZ\x00": "xz", b"BZh": "bzip2", b"\x28\xb5\x2f\xfd": "zstd"}
_JOURNAL = b"LPKSHHRH"
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"


class LogError(HealthdError):
    """One sentence that names the log: it cannot be read, or not to its end."""


class Block(NamedTuple):
    """Whole lines without their ends. `first`: the number of the first in the file, from 1."""

    first: int
    lines: list[bytes]


def blocks(path: str) -> Iterator[Block]:
    """The lines of `path`; "-" is standard input. Raises LogError, also after lines were given (a damaged archive)."""
    name = "standard input" if path == "-" else path
    try:
        with _open(path) as file:
            yield from lines_of(_unpacked(file, name))
    except OSError as error:  # gzip's own errors are of this kind and have no errno
        raise LogError(f"{name}: {_why(error)}") from None
    except EOFError:
        raise LogError(f"{name}: ends in the middle of compressed data") from None
    except Exception as error:
        if type(error).__name__ not in ("LZMAError", "ZstdError", "error"):  # "error" is zlib's
            raise
        raise LogError(f"{name}: its compressed data are damaged: {error}") from None


def _why(error: OSError) -> str:
    if isinstance(error, FileNotFoundError):
        return "there is no such file"
    if isinstance(error, IsADirectoryError):
        return "is a directory, no log"
    return f"cannot be read: {error.strerror}" if error.errno else f"its compressed data are damaged: {error}"


def _open(path: str) -> io.BufferedReader:
    # A descriptor of our own: closing it leaves standard input alone.
    return io.BufferedReader(io.FileIO(os.dup(0) if path == "-" else path), BLOCK)


def _unpacked(file: io.BufferedReader, name: str) -> IO[bytes]:
    begins = file.peek(8)[:8]
    if begins.startswith(_JOURNAL):
        raise LogError(f"{name}: is a journal, no text: journalctl -k -o json --file {name} | healthd scan -")
    kind = next((kind for magic, kind in _COMPRESSED.items() if begins.startswith(magic)), "")
    if kind == "gzip":
        import gzip

        return gzip.open(file)  # type: ignore[return-value]
    if kind == "xz":
        import lzma

        return lzma.open(file)
    if kind == "bzip2":
        import bz2

        return bz2.open(file)
    if kind == "zstd":
        try:
            from compression import zstd  # type: ignore[import-not-found]  # Python 3.14
        except ImportError:
            raise LogError(f"{name}: is compressed with zstd: zstdcat {name} | healthd scan -") from None
        opened: IO[bytes] = zstd.open(file)
        return opened
    return file


def lines_of(file: IO[bytes], block: int = BLOCK, max_line: int = MAX_LINE) -> Iterator[Block]:
    """The lines as they come: a reader of a pipe need not wait for a full block."""
    read = getattr(file, "read1", None) or file.read
    first, rest, skipping = 1, b"", False
    while data := read(block):
        if skipping:  # skips the rest of a line that was too long
            _, end, data = data.partition(b"\n")
            if not end:
                continue
            skipping = False
        if first == 1 and not rest:
            data = data.removeprefix(_BYTE_ORDER_MARK)
        *lines, rest = (rest + data).split(b"\n")
        if b"\0" in data:  # not yet on the disk at a crash; the next boot's first line follows them
            lines, rest = [line.lstrip(b"\0") for line in lines], rest.lstrip(b"\0")
        if len(rest) > max_line:
            lines.append(rest[:max_line])
            rest, skipping = b"", True
        if lines:
            yield Block(first, [line[:max_line] if len(line) > max_line else line for line in lines])
            first += len(lines)
    if rest:
        yield Block(first, [rest])
