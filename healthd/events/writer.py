"""The stream's files, as the worker writes them: STATE_DIR/events.jsonl, and older ones as events.jsonl.1 to .3.

A line is acknowledged when it is on the disk. What a kill or a full disk leaves of a line is closed with an end of its
own, so that it spoils no other.
"""

from __future__ import annotations

import errno
import fcntl
import os
import stat
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress

from healthd.common import ownership

NAME = "events.jsonl"
FILES = 4
MOST_BYTES = 16 << 20  # of a file; only a line that is longer alone has more
LOOK_BACK_BYTES = 1 << 20  # more than an outbox holds


def append(state_dir: str, lines: Sequence[str], again: bool) -> None:
    """Write these lines behind the others, durably, all or none. `again`: they may have been written before, and those
    that stand at the end already are left out. Raises ownership.Untrusted, OSError that names the file."""
    with ownership.folder(state_dir, make_mode=0o700) as folder, _naming(state_dir):
        descriptor = _open(folder)
        try:
            known = _newest(folder, descriptor) if again else frozenset()
            data = b"".join(line + b"\n" for line in map(str.encode, lines) if line not in known)
            if not data:
                return
            size = os.fstat(descriptor).st_size
            if size and size + len(data) > MOST_BYTES:
                _rotate(folder)
                os.close(descriptor)
                descriptor = _open(folder)
            _write(descriptor, data)
            os.fsync(folder)  # the file itself may be new
        finally:
            os.close(descriptor)


@contextmanager
def _naming(state_dir: str) -> Iterator[None]:
    """An error names the file by its path: a call by a descriptor knows none, one in a folder only its end."""
    try:
        yield
    except OSError as error:
        path = os.path.join(state_dir, os.fsdecode(error.filename or NAME))
        raise OSError(error.errno, error.strerror, path) from error


def name(number: int) -> str:
    """0 is the newest file."""
    return f"{NAME}.{number}" if number else NAME


def _open(folder: int) -> int:
    flags = os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    descriptor = os.open(NAME, flags, 0o600, dir_fd=folder)
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise OSError(errno.EINVAL, "Is not a file", NAME)
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)  # the worker of a daemon that was killed may still write
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def _newest(folder: int, descriptor: int) -> frozenset[bytes]:
    """The lines at the end of the stream, also where that is in the file before."""
    text = _end(descriptor, LOOK_BACK_BYTES)
    if len(text) < LOOK_BACK_BYTES:
        with suppress(FileNotFoundError):
            before = os.open(name(1), os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=folder)
            try:
                if stat.S_ISREG(os.fstat(before).st_mode):  # else it holds no line of ours, and _rotate says so
                    text = _end(before, LOOK_BACK_BYTES - len(text)) + b"\n" + text
            finally:
                os.close(before)
    return frozenset(text.split(b"\n"))


def _end(descriptor: int, most: int) -> bytes:
    start = max(os.fstat(descriptor).st_size - most, 0)
    pieces = []
    while piece := os.pread(descriptor, most, start):
        pieces.append(piece)
        start += len(piece)
    return b"".join(pieces)


def _rotate(folder: int) -> None:
    """Each file gets the next number, up to the first that is free: a kill in between costs no file."""
    free = next((n for n in range(1, FILES) if not _exists(folder, name(n))), FILES - 1)
    for number in reversed(range(free)):
        with suppress(FileNotFoundError):
            os.rename(name(number), name(number + 1), src_dir_fd=folder, dst_dir_fd=folder)


def _exists(folder: int, path: str) -> bool:
    """Raises OSError if it is a folder: no file can take its place."""
    try:
        mode = os.lstat(path, dir_fd=folder).st_mode
    except FileNotFoundError:
        return False
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), path)
    return True


def _write(descriptor: int, data: bytes) -> None:
    """All of it, on the disk, or nothing of it."""
    size = os.fstat(descriptor).st_size
    if size and os.pread(descriptor, 1, size - 1) != b"\n":
        data = b"\n" + data
    try:
        left = memoryview(data)
        while left:
            left = left[os.write(descriptor, left) :]
        os.fdatasync(descriptor)
    except OSError:
        with suppress(OSError):
            os.ftruncate(descriptor, size)
        raise
