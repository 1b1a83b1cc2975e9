"""One daemon for each runtime directory: it holds the lock there. A validation of this node holds another one."""

from __future__ import annotations

import fcntl
import os

from healthd.common import ownership

VALIDATION_LOCK = "validation.lock"


def lock(runtime_dir: str) -> int:
    """The lock's descriptor; the directory is made if it is missing. Raises ownership.Untrusted, OSError in one
    sentence."""
    try:
        descriptor = lock_file(runtime_dir, "lock")
    except ownership.Untrusted as error:
        raise error.at(runtime_dir, "runtime_dir") from None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        raise OSError(f"{runtime_dir}: another healthd is running there") from None
    return descriptor


def lock_file(runtime_dir: str, name: str) -> int:
    """The file of a lock, not locked yet; it and the directory are made if they are missing. Raises
    ownership.Untrusted, OSError."""
    flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
    with ownership.folder(runtime_dir, make_mode=0o755) as folder:
        try:
            return os.open(name, flags, 0o600, dir_fd=folder)
        except OSError as error:
            error.filename = os.path.join(runtime_dir, name)  # a call in a folder knows only the end of the path
            raise


def holds(descriptor: int, runtime_dir: str) -> bool:
    """Whether the runtime directory still holds this lock's file."""
    try:
        return os.path.samestat(os.fstat(descriptor), os.lstat(os.path.join(runtime_dir, "lock")))
    except OSError:
        return False


def is_held(path: str) -> bool:
    """Whether a process holds this lock. False where there is no such file, or it cannot be read."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(descriptor)
    return False
