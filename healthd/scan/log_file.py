"""Reads a log file or standard input as blocks of complete lines. The data may be plain or compressed by log rotation.

Memory is bounded for any file: a line longer than MAX_LINE is truncated. A pipe is read as data arrives.
"""

from __future__ import annotations

import io
import os
from collections.abc import Generator, Iterator
from typing import IO

from healthd.common.errors import HealthdError
from healthd.scan.lines import Block

# small enough for a core's cache; glibc would return larger blocks to the kernel and get them back page by page
BLOCK = 64 << 10
MAX_LINE = 16 << 10

# Maps the first bytes of a file to its compression.
_COMPRESSED = {b"\x1f\x8b": "gzip", b"\xfd7zXZ\x00": "xz", b"BZh": "bzip2", b"\x28\xb5\x2f\xfd": "zstd"}
_JOURNAL = b"LPKSHHRH"
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"


class LogError(HealthdError):
    """The log cannot be read, or only a part of it. The message is one sentence that names the log."""


def blocks(path: str) -> Generator[Block, None, None]:
    """Yield the lines in `path` ("-": standard input).

    Raises LogError. If an archive is damaged, the readable lines are yielded before the error is raised.
    """
    name = "standard input" if path == "-" else path
    try:
        with _open(path) as file:
            yield from read_blocks(_unpacked(file, name))
    except OSError as error:  # gzip raises this type too, without an errno
        raise LogError(f"{name}: {_why(error)}") from None
    except EOFError:
        raise LogError(f"{name}: ends in the middle of compressed data") from None
    except Exception as error:
        if type(error).__name__ not in ("LZMAError", "ZstdError", "error"):  # "error" is zlib's
            raise
        raise LogError(f"{name}: its compressed data is damaged: {error}") from None


def _why(error: OSError) -> str:
    if isinstance(error, FileNotFoundError):
        return "no such file"
    if isinstance(error, IsADirectoryError):
        return "is a directory, not a log"
    return f"cannot be read: {error.strerror}" if error.errno else f"its compressed data is damaged: {error}"


def _open(path: str) -> io.BufferedReader:
    # Use a separate file descriptor, so that closing it does not close standard input.
    return io.BufferedReader(io.FileIO(os.dup(0) if path == "-" else path), BLOCK)


def _unpacked(file: io.BufferedReader, name: str) -> IO[bytes]:
    begins = file.peek(8)[:8]
    if begins.startswith(_JOURNAL):
        raise LogError(f"{name}: is a journal, not text; run: journalctl -k -o json --file {name} | healthd scan -")
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
            raise LogError(f"{name}: is compressed with zstd; run: zstdcat {name} | healthd scan -") from None
        opened: IO[bytes] = zstd.open(file)
        return opened
    return file


def read_blocks(file: IO[bytes], block: int = BLOCK, max_line: int = MAX_LINE) -> Iterator[Block]:
    """Yield the lines as they arrive. If the input is a pipe, do not wait for a full block."""
    read = getattr(file, "read1", None) or file.read
    first, remainder, skipping = 1, b"", False
    for data in iter(lambda: read(block), b""):
        if skipping:  # skip the rest of a line that is too long
            skipped = data.find(b"\n") + 1
            if not skipped:
                continue
            data, skipping = data[skipped:], False
        if first == 1 and not remainder:
            data = data.removeprefix(_BYTE_ORDER_MARK)
        whole = remainder + data
        end = whole.rfind(b"\n")
        lines, remainder = ([whole[:end]] if end >= 0 else []), whole[end + 1 :]
        # zero bytes in place of data that was not on disk when the machine crashed; the next boot's first line follows
        if b"\0" in data:
            lines = [line.lstrip(b"\0") for text in lines for line in text.split(b"\n")]
            remainder = remainder.lstrip(b"\0")
        if len(remainder) > max_line:
            lines.append(remainder[:max_line])
            remainder, skipping = b"", True
        if lines:
            text = _cut(b"\n".join(lines), max_line)
            count = text.count(b"\n") + 1
            yield Block(first, text, count)
            first += count
    if remainder:
        yield Block(first, remainder, 1)


def _cut(text: bytes, max_line: int) -> bytes:
    """Return the lines, each truncated to `max_line`."""
    at = 0
    while len(text) - at > max_line:
        at = text.rfind(b"\n", at, at + max_line + 1) + 1
        if at == 0:
            return b"\n".join(line[:max_line] for line in text.split(b"\n"))
    return text
