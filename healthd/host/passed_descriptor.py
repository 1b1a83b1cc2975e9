"""Protection against open files that a process sends to one of healthd's sockets (SCM_RIGHTS, unix(7)).

A file that is sent but not received is closed when the message is read or the connection is closed. Closing may block:
a TCP socket with SO_LINGER blocks for the time that its owner chose, so any user could block a reader that otherwise
never blocks. From Linux 6.16 on, the kernel refuses such a message. On older kernels, a signal ends the wait. The
kernel closes all of a message's files at the end of one system call. Once a signal is pending, closing does not wait
for any file (sk_stream_wait_close in net/ipv4/tcp.c).
"""

from __future__ import annotations

import signal
import socket
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

SO_PASSRIGHTS = 83  # include/uapi/asm-generic/socket.h, Linux 6.16 and later
FIRST_SIGNAL_SECONDS = 0.02  # a signal interrupts a wait after this time
NEXT_SIGNAL_SECONDS = 0.01  # after the first signal, a signal interrupts each further wait after this time


def refuse_descriptors(listener: socket.socket) -> Callable[[], AbstractContextManager[None]]:
    """Refuse files from all future clients. Call this before `listen`, in the main thread, because it uses SIGALRM. A
    client that sends a file gets EPERM. Older kernels lack this option. On these kernels, use the returned context
    manager around all code that reads from clients or closes their connections.
    """
    try:
        listener.setsockopt(socket.SOL_SOCKET, SO_PASSRIGHTS, 0)
    except OSError:
        signal.signal(signal.SIGALRM, lambda _number, _frame: None)
        return _bounded
    return nullcontext


@contextmanager
def _bounded() -> Iterator[None]:
    signal.setitimer(signal.ITIMER_REAL, FIRST_SIGNAL_SECONDS, NEXT_SIGNAL_SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
