"""Locks: one daemon per runtime directory, and one validation of this node at a time."""

from __future__ import annotations

import fcntl
import os

from healthd.common import ownership

VALIDATION_LOCK = "validation.lock"


def lock(runtime_dir: str) -> int:
    """Lock the runtime directory, which is created if missing. Return the lock's descriptor. Raises
    ownership.Untrusted, or OSError; the message is one sentence."""
    try:
        descriptor = lock_file(runtime_dir, "lock")
    except ownership.Untrusted as error:
        raise error.with_context(runtime_dir, "runtime_dir") from None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        raise OSError(f"{runtime_dir}: another healthd is running there") from None
    return descriptor


def lock_file(runtime_dir: str, name: str) -> int:
    """Open a lock file without locking it. Create the file and its directory if missing. Raises ownership.Untrusted or
    OSError."""
    flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
    with ownership.open_folder(runtime_dir, make_mode=0o755) as folder:
        try:
            return os.open(name, flags, 0o600, dir_fd=folder)
        except OSError as error:
            error.filename = os.path.join(runtime_dir, name)  # the error contains only the end of the path
            raise


def is_current(descriptor: int, runtime_dir: str) -> bool:
    """Return True if the runtime directory still contains this lock's file."""
    try:
        return os.path.samestat(os.fstat(descriptor), os.lstat(os.path.join(runtime_dir, "lock")))
    except OSError:
        return False


def wait_until_free(runtime_dir: str, name: str) -> None:
    """Wait until no other process holds this lock. Raises ownership.Untrusted or OSError."""
    descriptor = lock_file(runtime_dir, name)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
    finally:
        os.close(descriptor)


def is_locked(path: str) -> bool:
    """Return True if a process holds this lock. Return False if the file is missing or unreadable."""
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
