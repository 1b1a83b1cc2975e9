"""A log file or standard input as blocks of whole lines: plain, or compressed as log rotation leaves it.

Memory is bounded, whatever the file holds: a line that is longer than MAX_LINE is cut. A pipe is read as it comes.
"""

from __future__ import annotations

import io
import os
from collections.abc import Generator, Iterator
from typing import IO

from healthd.common.errors import HealthdError
from healthd.scan.lines import Block

BLOCK = 64 << 10  # stays in a core's cache; what is larger glibc gives back to the kernel, and gets anew page by page
MAX_LINE = 16 << 10

# How a file begins -> how it is compressed.
_COMPRESSED = {b"\x1f\x8b": "gzip", b"\xfd7zXZ\x00": "xz", b"BZh": "bzip2", b"\x28\xb5\x2f\xfd": "zstd"}
_JOURNAL = b"LPKSHHRH"
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"


class LogError(HealthdError):
    """One sentence that names the log: it cannot be read, or not to its end."""


def blocks(path: str) -> Generator[Block, None, None]:
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
    for data in iter(lambda: read(block), b""):
        if skipping:  # skips the rest of a line that was too long
            over = data.find(b"\n") + 1
            if not over:
                continue
            data, skipping = data[over:], False
        if first == 1 and not rest:
            data = data.removeprefix(_BYTE_ORDER_MARK)
        whole = rest + data
        end = whole.rfind(b"\n")
        lines, rest = ([whole[:end]] if end >= 0 else []), whole[end + 1 :]
        if b"\0" in data:  # not yet on the disk at a crash; the next boot's first line follows them
            lines = [line.lstrip(b"\0") for text in lines for line in text.split(b"\n")]
            rest = rest.lstrip(b"\0")
        if len(rest) > max_line:
            lines.append(rest[:max_line])
            rest, skipping = b"", True
        if lines:
            text = _cut(b"\n".join(lines), max_line)
            count = text.count(b"\n") + 1
            yield Block(first, text, count)
            first += count
    if rest:
        yield Block(first, rest, 1)


def _cut(text: bytes, max_line: int) -> bytes:
    """The lines, each at most so long."""
    at = 0
    while len(text) - at > max_line:
        at = text.rfind(b"\n", at, at + max_line + 1) + 1
        if at == 0:
            return b"\n".join(line[:max_line] for line in text.split(b"\n"))
    return text
