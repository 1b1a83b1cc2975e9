"""Atomic writes to folders that only healthd and root can change (ownership.py)."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterable
from contextlib import suppress

from healthd.common import ownership
from healthd.common.text import regex

_READ_FLAGS = os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC


def replace_file(path: str, content: str | bytes, mode: int = 0o600, durable: bool = False) -> None:
    """Replace `path` with `content` atomically.

    With `durable`, the file also survives a power cut, and an identical file is not written again. The daemon never
    uses `durable`. Raises ownership.Untrusted or OSError.
    """
    data = content.encode("utf-8", "replace") if isinstance(content, str) else content
    with ownership.open_parent(path) as (folder, name):
        if durable and _is_current(folder, name, data, mode):
            return
        temporary = f"{name}.{os.getpid()}.new"
        descriptor = _create(folder, temporary, mode)
        try:
            with open(descriptor, "wb") as file:
                os.fchmod(descriptor, mode)  # despite the umask, because other users read the verdict and the metrics
                file.write(data)
                file.flush()
                if durable:
                    os.fsync(descriptor)
            os.replace(temporary, name, src_dir_fd=folder, dst_dir_fd=folder)
        except BaseException:
            os.unlink(temporary, dir_fd=folder)
            raise


def open_own_file(path: str, folder: int | None = None) -> int:
    """Open one of healthd's regular files for writing, without truncating it. Create it with mode 0600 if it is
    missing.

    A FIFO, socket or device at this path is removed and replaced. Raises OSError, even for a symbolic link or a folder.
    """
    flags = os.O_WRONLY | os.O_CREAT | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC
    for is_last_try in (False, True):
        try:
            descriptor = os.open(path, flags, 0o600, dir_fd=folder)
        except OSError as error:
            if is_last_try or error.errno != errno.ENXIO:  # a FIFO without a reader, or a socket
                raise
        else:
            if stat.S_ISREG(os.fstat(descriptor).st_mode):
                return descriptor
            os.close(descriptor)
        os.unlink(path, dir_fd=folder)
    raise OSError(errno.EINVAL, "Not a regular file", path)


def overwrite_file(path: str, content: str) -> None:
    """Write `content` over the start of an existing regular file, in one call and without truncating it.

    The file keeps its blocks, so this works on a full file system. The first block has room for 4 KiB. If the old text
    was longer, blanks overwrite the rest. A concurrent reader may read a mix of both texts. Raises ownership.Untrusted
    or OSError.
    """
    with ownership.open_parent(path) as (folder, name):
        descriptor = os.open(name, os.O_RDWR | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=folder)
        try:
            status = os.fstat(descriptor)
            if not stat.S_ISREG(status.st_mode):
                raise OSError(errno.EINVAL, "Not a regular file", path)
            data = content.encode("utf-8", "replace").ljust(status.st_size)
            if os.pwrite(descriptor, data, 0) != len(data):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), path)
        finally:
            os.close(descriptor)


def newest_mtime(directory: str, names: Iterable[str]) -> float:
    """Return the modification time of the newest of these files (epoch seconds), or 0 if none exists."""
    times = [0.0]
    for name in names:
        with suppress(OSError):
            times.append(os.stat(os.path.join(directory, name)).st_mtime)
    return max(times)


def _is_current(folder: int, name: str, data: bytes, mode: int) -> bool:
    """Return True if the file already has this content, mode and owner."""
    with suppress(OSError), open(os.open(name, _READ_FLAGS, dir_fd=folder), "rb", buffering=0) as file:
        status = os.fstat(file.fileno())
        identity = (status.st_mode, status.st_uid, status.st_size, status.st_nlink)
        return identity == (stat.S_IFREG | mode, os.geteuid(), len(data), 1) and file.read() == data
    return False


def _create(folder: int, name: str, mode: int) -> int:
    """Create a file and open it for writing. Never follow a link.

    A file left behind by a killed writer with the same pid is replaced.
    """
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        return os.open(name, flags, mode, dir_fd=folder)
    except FileExistsError:
        os.unlink(name, dir_fd=folder)
        return os.open(name, flags, mode, dir_fd=folder)


def remove_leftovers(directory: str) -> None:
    """Remove the NAME.PID.new files that `replace_file` leaves behind if its process is killed. Files of running
    processes are kept.
    """
    with ownership.open_folder(directory) as folder:
        for name in os.listdir(folder):
            found = regex(r".+\.(\d+)\.new").fullmatch(name)
            if found and not os.path.exists(f"/proc/{found[1]}"):
                os.unlink(name, dir_fd=folder)
