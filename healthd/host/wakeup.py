"""A process's single blocking wait, and the signals that end the wait."""

from __future__ import annotations

import os
import select
import signal
from collections.abc import Iterable

FOREVER = float("inf")
MAX_SLEEP_SECONDS = 24 * 3600.0  # poll(2) accepts at most 24 days


def wake_on_signals() -> int:
    """Return a descriptor that receives one byte for each SIGTERM, SIGINT or SIGHUP."""
    reading, writing = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, lambda _number, _frame: None)
    return reading


def stop_waking_on_signals(descriptor: int) -> None:
    """Close the descriptors that `wake_on_signals` opened. Afterwards, the signals have no effect and do not end this
    process.
    """
    writing = signal.set_wakeup_fd(-1)
    for end in (writing, descriptor):
        if end >= 0:
            os.close(end)


def signals(descriptor: int) -> bytes:
    """Return the signals since the last call. SIGALRM only ends a wait in the kernel (passed_descriptor.py)."""
    try:
        return os.read(descriptor, 64).replace(bytes([signal.SIGALRM]), b"")
    except BlockingIOError:
        return b""


def poll(descriptors: Iterable[tuple[int, bool]], seconds: float) -> set[int]:
    """Sleep for at most `seconds`, or until a descriptor can be read (or written, if requested). Return the ready
    descriptors."""
    ready = select.poll()
    for descriptor, writes in descriptors:
        ready.register(descriptor, select.POLLIN | (select.POLLOUT if writes else 0))
    wait = min(max(0.0, seconds), MAX_SLEEP_SECONDS)
    return {descriptor for descriptor, _ in ready.poll(None if seconds == FOREVER else wait * 1000 + 1)}
