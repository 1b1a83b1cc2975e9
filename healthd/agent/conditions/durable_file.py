"""A file that is written again and again, whole or not at all, also on a file system that has become full meanwhile.

PATH and PATH.spare take turns: the new text goes into the spare one, whose room is its own already, and then both
change their names at once. What a text leaves of the room is filled with blanks.
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

ROOM_BYTES = 64 << 10  # room is taken in such steps, with a quarter of one to grow into
RENAME_EXCHANGE = 2


def rewrite_file(path: str, text: bytes) -> None:
    """Write `text` to `path`; a kill leaves the old text or the new one.

    Raises ownership.Untrusted, OSError: also if it needs more room than it has ever had, and there is none.
    """
    with ownership.beside(path) as (folder, name):
        spare = f"{name}.spare"
        with _to_write(folder, spare) as file:
            has = os.fstat(file.fileno()).st_size
            size = file.write(text)
            needs = _room(size)
            room = has if needs <= has <= 4 * needs else needs
            file.write(b" " * (room - size))
            file.truncate()
        try:
            _exchange(folder, spare, name)
        except OSError as error:
            if error.errno not in (errno.ENOENT, errno.EINVAL, errno.ENOSYS):
                raise
            # the first time, or where two names cannot be exchanged
            os.replace(spare, name, src_dir_fd=folder, dst_dir_fd=folder)
        with suppress(OSError):  # the text is written; without room now the next one may have to do without
            _keep_room(folder, spare, room)


def read_whole(path: str) -> str:
    """The text of such a file, without the blanks behind it: one of its texts, however often it is written meanwhile.
    Raises ownership.Untrusted, OSError."""
    with ownership.opened(path) as descriptor:
        fcntl.flock(descriptor, fcntl.LOCK_SH)
        return ownership.content(descriptor).decode("utf-8", "replace").rstrip()


def _to_write(folder: int, spare: str) -> BinaryIO:
    """The spare file. Somebody may still read it, who opened it under its other name: then they keep it."""
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


def _room(size: int) -> int:
    return -(-(size + ROOM_BYTES // 4) // ROOM_BYTES) * ROOM_BYTES


def _keep_room(folder: int, name: str, room: int) -> None:
    with _open(folder, name) as file:
        if os.fstat(file.fileno()).st_size < room:
            os.posix_fallocate(file.fileno(), 0, room)


def _exchange(folder: int, one: str, other: str) -> None:
    """Swap two names (renameat2(2), Linux 3.15, glibc 2.28). Raises OSError: ENOSYS, EINVAL where that cannot be."""
    try:
        rename = _libc().renameat2
    except AttributeError:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS)) from None
    if rename(folder, os.fsencode(one), folder, os.fsencode(other), RENAME_EXCHANGE):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), one)


@functools.cache
def _libc() -> ctypes.CDLL:
    """Found once: each finding costs as much as a save."""
    return ctypes.CDLL(None, use_errno=True)
