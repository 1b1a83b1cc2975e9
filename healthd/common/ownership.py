"""Whose a file is that healthd reads as settings or code, runs, or writes: one rule for all of them.

It must belong to root, or to the user that healthd runs as, and nobody else may change it; so must each folder above
it, up to "/", and each symbolic link on the way, which is followed here by hand. Who looks gets a descriptor of what
was looked at, and uses that: a name may mean another file a moment later.

- Group root counts as root, unless an ACL names others: their rights hide in the group's mode bits (acl(5)).
- In a sticky folder (/tmp) nobody but root can replace what root owns there (unlink(2)): it is passed through.
- A FUSE mount says of its files what its server likes, also that they are root's: it belongs to who mounted it.
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

MOST_LINKS = 40  # as the kernel follows
MOST_BYTES = 64 << 20  # more is no settings file, check or ledger
ACL = "system.posix_acl_access"
_FOLDER = os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


class Untrusted(HealthdError, PermissionError):
    """Others than root could have changed what healthd would use: which step of the path, and who could.

    `place`: the real path of that step, which may be a folder above what was asked for."""

    def __init__(self, why: str, place: str) -> None:
        super().__init__(errno.EPERM, why)
        self.place = place

    def __str__(self) -> str:
        return str(self.strerror)

    def at(self, path: str, setting: str = "") -> Untrusted:
        """The same, naming what was asked for and the setting that it is."""
        named = f" ({setting})" if setting else ""
        return Untrusted(f"{path}{named}: refused: {self}", self.place)


@contextmanager
def opened(path: str) -> Iterator[int]:
    """A regular file, open for reading. Raises Untrusted, OSError."""
    # Not blocking: it may be a fifo, which may have no writer for ever.
    descriptor = _open_last(path, os.O_RDONLY | os.O_NONBLOCK)
    try:
        if not stat.S_ISREG(mode := os.fstat(descriptor).st_mode):
            raise IsADirectoryError(errno.EISDIR, "Is a directory" if stat.S_ISDIR(mode) else "Is not a file", path)
        yield descriptor
    finally:
        os.close(descriptor)


def read(path: str) -> bytes:
    """A file's content. Raises Untrusted, OSError."""
    with opened(path) as descriptor:
        return content(descriptor)


def content(descriptor: int) -> bytes:
    """All that can be read. Raises OSError, also for more than `MOST_BYTES`."""
    text = bytearray()
    while piece := os.read(descriptor, 1 << 20):
        text += piece
        if len(text) > MOST_BYTES:
            raise OSError(errno.EFBIG, os.strerror(errno.EFBIG))
    return bytes(text)


@contextmanager
def folder(path: str, make_mode: int | None = None) -> Iterator[int]:
    """A folder in which only we make files. `make_mode`: it and those above it are made where they are missing. Raises
    Untrusted, OSError."""
    descriptor = _open_last(path, os.O_RDONLY | os.O_DIRECTORY, make_mode, may_be_sticky=False)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


@contextmanager
def beside(path: str) -> Iterator[tuple[int, str]]:
    """The folder of a file that is to be written by replacing the name that `path` ends with, and that name: a symbolic
    link of that name is replaced, not followed. Raises Untrusted, OSError."""
    above, name = os.path.split(path)
    if name in ("", ".", ".."):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), path)
    descriptor = _open_last(above or ".", os.O_PATH | os.O_DIRECTORY, named=path)
    try:
        yield descriptor, name
    finally:
        os.close(descriptor)


def program(path: str) -> os.stat_result:
    """What a program is that is about to be run. Raises Untrusted, OSError.

    It is run by its name, not through a descriptor: a script would be told "/proc/self/fd/7" as its own name, and the
    process would be called "7". By the rule nobody but root, or we, can make the name mean something else meanwhile.
    """
    descriptor = _open_last(path, os.O_PATH)
    try:
        return os.fstat(descriptor)
    finally:
        os.close(descriptor)


# --- the way to it


def _open_last(path: str, flags: int, make_mode: int | None = None, named: str = "", may_be_sticky: bool = True) -> int:
    """Walk to `path`, looking at each step. The last one's descriptor. Raises Untrusted; an OSError names `path`, or
    what is `named`."""
    # The mount table is read once for a walk, and only if it leads through a file system without a disk.
    require = partial(_require, fuse_users=functools.cache(lambda: _fuse_users()))
    try:
        descriptor, place = _walked(path, flags | os.O_NOFOLLOW | os.O_CLOEXEC, make_mode, require)
        try:
            require(descriptor, place, may_be_sticky=may_be_sticky)
        except BaseException:
            os.close(descriptor)
            raise
    except Untrusted:
        raise
    except OSError as error:
        error.filename = named or path
        raise
    return descriptor


def _walked(path: str, flags: int, make_mode: int | None, require: Callable[[int, str], None]) -> tuple[int, str]:
    """The last step's descriptor and its real path. The last step itself is not looked at yet."""
    left = list(reversed(_steps(os.path.join(os.getcwd(), path))))
    here, place, links = os.open("/", _FOLDER), "/", 0
    try:
        while True:
            require(here, place)
            name = left.pop() if left else "."
            step = os.path.normpath(os.path.join(place, name))
            target = _link(here, name, step, make_mode, require)
            if target is None and not left:
                return os.open(name, flags, dir_fd=here), step
            if target is None:
                # O_DIRECTORY, so that an automount is mounted now
                next_folder, next_place = os.open(name, _FOLDER, dir_fd=here), step
            else:
                links += 1
                if links > MOST_LINKS:
                    raise OSError(errno.ELOOP, os.strerror(errno.ELOOP))
                left += reversed(_steps(target))
                next_place = "/" if target.startswith("/") else place
                next_folder = os.open("/", _FOLDER) if target.startswith("/") else os.dup(here)
            os.close(here)
            here, place = next_folder, next_place
    finally:
        os.close(here)


def _steps(path: str) -> list[str]:
    """The names in a path. ".." stays: where it leads is known where the step before it is."""
    return [name for name in path.split("/") if name not in ("", ".")]


def _link(here: int, name: str, step: str, make_mode: int | None, require: Callable[[int, str], None]) -> str | None:
    """Where a symbolic link points; None if the step is none. A folder that is missing is made if it shall be."""
    try:
        descriptor = os.open(name, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=here)
    except FileNotFoundError:
        if make_mode is not None:
            with suppress(FileExistsError):  # just made, by whomever: it is looked at like any other
                os.mkdir(name, make_mode, dir_fd=here)
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
    descriptor: int, place: str, fuse_users: Callable[[], Mapping[int, int]], may_be_sticky: bool = True
) -> None:
    """Raises Untrusted if others can change what this descriptor is of."""
    about = os.fstat(descriptor)
    # File systems without a disk have the major number 0.
    mounted_by = fuse_users().get(about.st_dev) if os.major(about.st_dev) == 0 else None
    why = changed_by(about, {0, os.geteuid()}, mounted_by, lambda: _has_acl(descriptor), may_be_sticky)
    if why:
        raise Untrusted(f"{place} {why}", place)


def changed_by(
    about: os.stat_result,
    trusted: set[int],
    mounted_by: int | None = None,
    has_acl: Callable[[], bool] = lambda: False,
    may_be_sticky: bool = True,
) -> str:
    """Who else could change a file, folder or link, "" if nobody. `mounted_by`: the user of the FUSE mount that it is
    in, None if it is in none. `may_be_sticky`: it is a folder on the way to something that is looked at, too."""
    if about.st_uid not in trusted:
        return f"belongs to user {about.st_uid}, it must belong to root"
    if mounted_by is not None and mounted_by not in trusted:
        return f"lies in a FUSE mount of user {mounted_by}"
    if stat.S_ISLNK(about.st_mode):
        return ""  # its mode says nothing, and where it leads cannot be changed
    mode = stat.S_IMODE(about.st_mode)
    if may_be_sticky and stat.S_ISDIR(about.st_mode) and mode & stat.S_ISVTX:
        return ""
    if mode & stat.S_IWOTH:
        return f"is writable by anybody (mode {mode:o})"
    if mode & stat.S_IWGRP and about.st_gid != 0:
        return f"is writable by group {about.st_gid} (mode {mode:o})"
    if mode & stat.S_IWGRP and has_acl():
        return f"is writable by whom its ACL names (mode {mode:o}; getfacl shows them)"
    return ""


def _has_acl(descriptor: int) -> bool:
    """Whether a POSIX ACL says more than the mode bits. Raises OSError."""
    try:
        return bool(os.getxattr(f"/proc/self/fd/{descriptor}", ACL))
    except OSError as error:
        if error.errno in (errno.ENODATA, errno.ENOTSUP):
            return False
        raise


def _fuse_users() -> dict[int, int]:
    """Device number -> the user who mounted it, of each FUSE mount. Raises OSError."""
    with open(mountinfo.MOUNTINFO, encoding="utf-8", errors="replace") as file:
        return dict(found for line in file for found in fuse_user(line.rstrip("\n")))


def fuse_user(line: str) -> Iterator[tuple[int, int]]:
    """The device number and the user_id= in a line of mountinfo, if it is of FUSE."""
    if " - fuse" not in line:
        return
    mount = mountinfo.parse(line)
    if mount.fstype.partition(".")[0] in ("fuse", "fuseblk"):
        major, _, minor = mount.device.partition(":")
        for option in mount.options:
            if option.startswith("user_id="):
                yield os.makedev(int(major), int(minor)), int(option.removeprefix("user_id="))
