"""One daemon for each runtime directory: it holds the lock there."""

from __future__ import annotations

import fcntl
import os


def lock(runtime_dir: str) -> int:
    """The lock's descriptor. Raises OSError in one sentence."""
    descriptor = os.open(os.path.join(runtime_dir, "lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise OSError(f"{runtime_dir}: another healthd is running there") from None
    return descriptor


def holds(descriptor: int, runtime_dir: str) -> bool:
    """Whether the runtime directory still holds this lock's file."""
    try:
        return os.path.samestat(os.fstat(descriptor), os.stat(os.path.join(runtime_dir, "lock")))
    except OSError:
        return False
