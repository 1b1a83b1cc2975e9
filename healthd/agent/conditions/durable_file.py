"""A file that is rewritten often, whole or not at all, also on a file system that has become full.

PATH and PATH.spare alternate. The new text is written to the spare file, whose space is already allocated, and then the
two files swap names atomically. Blanks fill the rest of the allocated space.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import functools
import os
from contextlib import suppress
from typing import BinaryIO

from healthd.common import ownership
from healthd.common.atomic_files import open_own_file

SIZE_STEP_BYTES = 64 << 10  # the file grows in steps of this size, with a quarter of a step in reserve
RENAME_EXCHANGE = 2


def rewrite_file(path: str, text: bytes) -> None:
    """Write `text` to `path`. A kill leaves the old text or the new text.

    Raises ownership.Untrusted, and OSError, also if the text needs more space than the file ever had and there is none.
    """
    with ownership.open_parent(path) as (folder, name):
        spare = f"{name}.spare"
        with _open_spare(folder, spare) as file:
            current_size = os.fstat(file.fileno()).st_size
            text_size = file.write(text)
            needed_size = _padded_size(text_size)
            file_size = current_size if needed_size <= current_size <= 4 * needed_size else needed_size
            file.write(b" " * (file_size - text_size))
            file.truncate()
        try:
            _exchange(folder, spare, name)
        except OSError as error:
            if error.errno not in (errno.ENOENT, errno.EINVAL, errno.ENOSYS):
                raise
            # the first write, or a system that cannot exchange two names
            os.replace(spare, name, src_dir_fd=folder, dst_dir_fd=folder)
        with suppress(OSError):  # the text is written; only the space for the next one is missing
            _reserve(folder, spare, file_size)


def read_whole(path: str) -> str:
    """Return the text of such a file without its trailing blanks: one whole text, however often it is rewritten.

    Raises ownership.Untrusted, OSError.
    """
    with ownership.open_file(path) as descriptor:
        fcntl.flock(descriptor, fcntl.LOCK_SH)
        return ownership.read_all(descriptor).decode("utf-8", "replace").rstrip()


def _open_spare(folder: int, spare: str) -> BinaryIO:
    """Open the spare file for writing. A process may still read it under its other name; then it keeps that file."""
    file = _open(folder, spare)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.close()
        os.unlink(spare, dir_fd=folder)
        file = _open(folder, spare)
    return file


def _open(folder: int, name: str) -> BinaryIO:
    return open(open_own_file(name, folder), "wb")


def _padded_size(size: int) -> int:
    return -(-(size + SIZE_STEP_BYTES // 4) // SIZE_STEP_BYTES) * SIZE_STEP_BYTES


def _reserve(folder: int, name: str, size: int) -> None:
    with _open(folder, name) as file:
        if os.fstat(file.fileno()).st_size < size:
            os.posix_fallocate(file.fileno(), 0, size)


def _exchange(folder: int, first: str, second: str) -> None:
    """Swap two names (renameat2(2), Linux 3.15, glibc 2.28).

    Raises OSError: ENOSYS or EINVAL where names cannot be exchanged.
    """
    try:
        rename = _libc().renameat2
    except AttributeError:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS)) from None
    if rename(folder, os.fsencode(first), folder, os.fsencode(second), RENAME_EXCHANGE):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), first)


@functools.cache
def _libc() -> ctypes.CDLL:
    """Return libc. Cached: each lookup costs as much as a save."""
    return ctypes.CDLL(None, use_errno=True)
