"""Ownership rule for all files that healthd runs, writes, or reads as settings or code.

The file must belong to root or to the user that healthd runs as, and no other user may be able to change it. The same
applies to each folder above the file, up to "/", and to each symbolic link on the path. This module follows the links
itself. The caller gets a descriptor for the verified file and must use it, because the name may refer to another file a
moment later.

- Group root is treated as root, unless an ACL names other users, whose rights appear in the group's mode bits (acl(5)).
- In a sticky folder (/tmp) only root can replace files that root owns (unlink(2)), so the path may pass through it.
- The server of a FUSE mount can claim any owner for its files, so they belong to the user who mounted it.
"""

from __future__ import annotations

import errno
import functools
import os
import stat
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial

from healthd.common import mountinfo
from healthd.common.errors import HealthdError

MAX_LINKS = 40  # the kernel's limit
MAX_BYTES = 64 << 20  # larger than any settings file, check or ledger
ACL = "system.posix_acl_access"
_FOLDER = os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


class Untrusted(HealthdError, PermissionError):
    """A user other than root could have changed the file. The message names the step of the path and the user.

    `path` is the real path of that step, which may be a folder above the requested file.
    """

    def __init__(self, why: str, path: str) -> None:
        super().__init__(errno.EPERM, why)
        self.path = path

    def __str__(self) -> str:
        return str(self.strerror)

    def with_context(self, path: str, setting: str = "") -> Untrusted:
        """Return the error with the requested path and the setting that names the path."""
        setting_note = f" ({setting})" if setting else ""
        return Untrusted(f"{path}{setting_note}: refused: {self}", self.path)


@contextmanager
def open_file(path: str) -> Iterator[int]:
    """Open a regular file for reading. Raises Untrusted or OSError."""
    # Non-blocking, because a FIFO may never have a writer.
    descriptor = _open_trusted(path, os.O_RDONLY | os.O_NONBLOCK)
    try:
        if not stat.S_ISREG(mode := os.fstat(descriptor).st_mode):
            raise IsADirectoryError(errno.EISDIR, "Is a directory" if stat.S_ISDIR(mode) else "Is not a file", path)
        yield descriptor
    finally:
        os.close(descriptor)


def read(path: str) -> bytes:
    """Return a file's content. Raises Untrusted or OSError."""
    with open_file(path) as descriptor:
        return read_all(descriptor)


def read_all(descriptor: int) -> bytes:
    """Return the whole content. Raises OSError, including for content larger than `MAX_BYTES`."""
    data = bytearray()
    while piece := os.read(descriptor, 1 << 20):
        data += piece
        if len(data) > MAX_BYTES:
            raise OSError(errno.EFBIG, os.strerror(errno.EFBIG))
    return bytes(data)


@contextmanager
def open_folder(path: str, make_mode: int | None = None) -> Iterator[int]:
    """Open a folder in which only healthd creates files. With `make_mode`, missing folders are created. Raises
    OSError.
    """
    descriptor = _open_trusted(path, os.O_RDONLY | os.O_DIRECTORY, make_mode, allow_sticky=False)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


@contextmanager
def open_parent(path: str) -> Iterator[tuple[int, str]]:
    """Open the folder of a file that will be replaced by name. Return the folder and the name.

    If the name is a symbolic link, it is replaced, not followed. Raises Untrusted or OSError.
    """
    parent, name = os.path.split(path)
    if name in ("", ".", ".."):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), path)
    descriptor = _open_trusted(parent or ".", os.O_PATH | os.O_DIRECTORY, error_path=path)
    try:
        yield descriptor, name
    finally:
        os.close(descriptor)


def stat_program(path: str) -> os.stat_result:
    """Return the stat of a program that is about to run. Raises Untrusted or OSError.

    The caller runs the program by name, not through a descriptor. Otherwise, a script's own name would be
    "/proc/self/fd/7", and the process's name "7". By the rule above, only root or healthd can change the name in
    between.
    """
    descriptor = _open_trusted(path, os.O_PATH)
    try:
        return os.fstat(descriptor)
    finally:
        os.close(descriptor)


# --- walking the path


def _open_trusted(
    path: str, flags: int, make_mode: int | None = None, error_path: str = "", allow_sticky: bool = True
) -> int:
    """Verify each step of `path` and return the descriptor of the last one.

    Raises Untrusted, or an OSError that names `path` or `error_path`.
    """
    # Read the mount table at most once per walk, and only for a file system without a disk.
    require = partial(_require, fuse_users=functools.cache(lambda: _fuse_users()))
    try:
        descriptor, real_path = _walk(path, flags | os.O_NOFOLLOW | os.O_CLOEXEC, make_mode, require)
        try:
            require(descriptor, real_path, allow_sticky=allow_sticky)
        except BaseException:
            os.close(descriptor)
            raise
    except Untrusted:
        raise
    except OSError as error:
        error.filename = error_path or path
        raise
    return descriptor


def _walk(path: str, flags: int, make_mode: int | None, require: Callable[[int, str], None]) -> tuple[int, str]:
    """Return the last step's descriptor and its real path. The last step itself is not yet verified."""
    remaining = list(reversed(_steps(os.path.join(os.getcwd(), path))))
    current, current_path, links = os.open("/", _FOLDER), "/", 0
    try:
        while True:
            require(current, current_path)
            name = remaining.pop() if remaining else "."
            step = os.path.normpath(os.path.join(current_path, name))
            target = _link_target(current, name, step, make_mode, require)
            if target is None and not remaining:
                return os.open(name, flags, dir_fd=current), step
            if target is None:
                # O_DIRECTORY triggers an automount now
                next_folder, next_path = os.open(name, _FOLDER, dir_fd=current), step
            else:
                links += 1
                if links > MAX_LINKS:
                    raise OSError(errno.ELOOP, os.strerror(errno.ELOOP))
                remaining += reversed(_steps(target))
                next_path = "/" if target.startswith("/") else current_path
                next_folder = os.open("/", _FOLDER) if target.startswith("/") else os.dup(current)
            os.close(current)
            current, current_path = next_folder, next_path
    finally:
        os.close(current)


def _steps(path: str) -> list[str]:
    """Return the names in a path. ".." is kept, because its target depends on the step before it."""
    return [name for name in path.split("/") if name not in ("", ".")]


def _link_target(
    current: int, name: str, step: str, make_mode: int | None, require: Callable[[int, str], None]
) -> str | None:
    """Return a symbolic link's target, or None for any other step.

    Create a missing folder if `make_mode` is set.
    """
    try:
        descriptor = os.open(name, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=current)
    except FileNotFoundError:
        if make_mode is not None:
            with suppress(FileExistsError):  # another process created the folder, which is verified like any other
                os.mkdir(name, make_mode, dir_fd=current)
        return None
    try:
        if not stat.S_ISLNK(os.fstat(descriptor).st_mode):
            return None
        require(descriptor, step)
        return os.readlink("", dir_fd=descriptor)
    finally:
        os.close(descriptor)


# --- the rule


def _require(
    descriptor: int, path: str, fuse_users: Callable[[], Mapping[int, int]], allow_sticky: bool = True
) -> None:
    """Raise Untrusted if other users can change the file behind this descriptor."""
    status = os.fstat(descriptor)
    # File systems without a disk have the major number 0.
    mounted_by = fuse_users().get(status.st_dev) if os.major(status.st_dev) == 0 else None
    why = untrusted_reason(status, {0, os.geteuid()}, mounted_by, lambda: _has_acl(descriptor), allow_sticky)
    if why:
        raise Untrusted(f"{path} {why}", path)


def untrusted_reason(
    status: os.stat_result,
    trusted: set[int],
    mounted_by: int | None = None,
    has_acl: Callable[[], bool] = lambda: False,
    allow_sticky: bool = True,
) -> str:
    """Return the other users who could change a file, folder or link, or "" if no other user can.

    `mounted_by` is the user who mounted the file's FUSE file system, or None. If `allow_sticky`, a sticky folder on the
    path is accepted.
    """
    if status.st_uid not in trusted:
        return f"belongs to user {status.st_uid}; it must belong to root"
    if mounted_by is not None and mounted_by not in trusted:
        return f"is in a FUSE mount by user {mounted_by}"
    if stat.S_ISLNK(status.st_mode):
        return ""  # a link's mode is meaningless, and its target cannot be changed
    mode = stat.S_IMODE(status.st_mode)
    if allow_sticky and stat.S_ISDIR(status.st_mode) and mode & stat.S_ISVTX:
        return ""
    if mode & stat.S_IWOTH:
        return f"is writable by all users (mode {mode:o})"
    if mode & stat.S_IWGRP and status.st_gid != 0:
        return f"is writable by group {status.st_gid} (mode {mode:o})"
    if mode & stat.S_IWGRP and has_acl():
        return f"is writable by other users through an ACL (mode {mode:o}; see getfacl)"
    return ""


def _has_acl(descriptor: int) -> bool:
    """Return True if a POSIX ACL grants more than the mode bits. Raises OSError."""
    try:
        return bool(os.getxattr(f"/proc/self/fd/{descriptor}", ACL))
    except OSError as error:
        if error.errno in (errno.ENODATA, errno.ENOTSUP):
            return False
        raise


def _fuse_users() -> dict[int, int]:
    """Return a dict that maps each FUSE mount's device number to the user who mounted it. Raises OSError."""
    with open(mountinfo.MOUNTINFO, encoding="utf-8", errors="replace") as file:
        return dict(found for line in file for found in parse_fuse_user(line.rstrip("\n")))


def parse_fuse_user(line: str) -> Iterator[tuple[int, int]]:
    """Yield the device number and the user_id= from a mountinfo line for a FUSE mount."""
    if " - fuse" not in line:
        return
    mount = mountinfo.parse(line)
    if mount.fstype.partition(".")[0] in ("fuse", "fuseblk"):
        major, _, minor = mount.device.partition(":")
        for option in mount.options:
            if option.startswith("user_id="):
                yield os.makedev(int(major), int(minor)), int(option.removeprefix("user_id="))
