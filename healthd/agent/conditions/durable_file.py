"""Atomic writes to a file that is rewritten often, even on a full file system.

The new text is written to PATH.spare, whose space is already allocated. Then PATH and PATH.spare swap names atomically.
Blanks fill the unused part of the allocated space.
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
    """Write `text` to `path`. If the process is killed, the file has either the old text or the new text.

    Raises ownership.Untrusted, or OSError, for example if the text needs more space than the file ever had and the disk
    is full.
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
            # this is the first write, or the system cannot exchange two names
            os.replace(spare, name, src_dir_fd=folder, dst_dir_fd=folder)
        with suppress(OSError):  # the text is written; only the space for the next text is missing
            _reserve(folder, spare, file_size)


def read_whole(path: str) -> str:
    """Return the text of a file written by `rewrite_file`, without trailing blanks. The text is always complete, even
    if the file is rewritten in the meantime.

    Raises ownership.Untrusted or OSError.
    """
    with ownership.open_file(path) as descriptor:
        fcntl.flock(descriptor, fcntl.LOCK_SH)
        return ownership.read_all(descriptor).decode("utf-8", "replace").rstrip()


def _open_spare(folder: int, spare: str) -> BinaryIO:
    """Open the spare file for writing. A process that is still reading it under its other name is not affected."""
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
    """Swap two file names (renameat2(2), Linux 3.15, glibc 2.28).

    Raises OSError, with ENOSYS or EINVAL if the system cannot exchange names.
    """
    try:
        rename = _libc().renameat2
    except AttributeError:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS)) from None
    if rename(folder, os.fsencode(first), folder, os.fsencode(second), RENAME_EXCHANGE):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), first)


@functools.cache
def _libc() -> ctypes.CDLL:
    """Return libc. The result is cached, because each lookup takes as long as a save."""
    return ctypes.CDLL(None, use_errno=True)
