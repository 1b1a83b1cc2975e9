"""Shortages of threads, child processes or file descriptors in this process.

Each shortage is counted (healthd_resource_shortages_total) and reported in `healthd status` for REPORT_SECONDS. A
shortage is never a fault of the node: a fork bomb in another user's job can cause it, as can a leak in healthd.
"""

from __future__ import annotations

import errno
import os
import socket
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress

THREADS, PROCESSES, DESCRIPTORS = "threads", "processes", "file_descriptors"
REPORT_SECONDS = 600.0
ACCEPT_PAUSE_SECONDS = 1.0  # how long a listener without a free descriptor leaves new connections in its queue
MAX_SHED = 128  # maximum number of connections to close at once

# Errors from accept(2) that leave the connection in the queue, so that poll(2) reports the listener again at once.
_NO_DESCRIPTOR = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})
# Errors from fork(2) and clone(2) when a limit is reached (RLIMIT_NPROC, pids.max, threads-max) or memory is out.
_NO_PROCESS = frozenset({errno.EAGAIN, errno.ENOMEM})

counts: Counter[str] = Counter()  # shortages since the start of this process, by resource
_last: dict[str, float] = {}  # time of the last shortage (epoch seconds), by resource


def record(resource: str) -> None:
    """Count a shortage of THREADS, PROCESSES or DESCRIPTORS."""
    counts[resource] += 1
    _last[resource] = time.time()


def record_failed_start(error: OSError) -> None:
    """Count a shortage if it is the reason why a process could not be started."""
    if error.errno in (errno.EMFILE, errno.ENFILE):
        record(DESCRIPTORS)
    elif error.errno in _NO_PROCESS:
        record(PROCESSES)


def has_no_descriptor(error: OSError) -> bool:
    """Return True if accept(2) failed because there was no free descriptor."""
    return error.errno in _NO_DESCRIPTOR


def open_pidfd(pid: int) -> int | None:
    """Return a pidfd for a running process, or None if no descriptor is left for it. Raises OSError if the process does
    not exist."""
    try:
        return os.pidfd_open(pid)
    except OSError as error:
        if not has_no_descriptor(error):
            raise
        record(DESCRIPTORS)
        return None


def problems(now: float) -> Iterator[str]:
    """Yield a sentence for each resource that was short within the last REPORT_SECONDS."""
    for resource, when in list(_last.items()):  # other threads record too
        if now - when < REPORT_SECONDS:
            times = "once" if counts[resource] == 1 else f"{counts[resource]} times"
            name = resource.replace("_", " ")
            yield f"healthd could not get {name} {times} since it started; skipped work is retried"


class SpareDescriptor:
    """A reserve descriptor, so that connections can be closed when no other descriptor is left.

    Without it, a listener whose accept(2) fails with EMFILE stays readable, and its loop uses a whole core.
    """

    def __init__(self) -> None:
        """Raises OSError."""
        self._descriptor = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)

    def shed(self, listener: socket.socket, farewell: bytes = b"") -> None:
        """Send `farewell` to at most MAX_SHED waiting connections and close them. Record the shortage.

        `listener` must be non-blocking.
        """
        record(DESCRIPTORS)
        for _ in range(MAX_SHED):
            self._release()
            try:
                stream, _ = listener.accept()
            except OSError:  # the queue is empty, or another thread took the descriptor
                break
            with stream, suppress(OSError):
                stream.setblocking(False)
                stream.send(farewell)
        with suppress(OSError):  # retried at the next shortage
            if self._descriptor < 0:
                self._descriptor = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)

    def close(self) -> None:
        self._release()

    def _release(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1
