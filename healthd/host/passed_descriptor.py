"""An open file that a process hands to a socket of healthd (SCM_RIGHTS, unix(7)) holds healthd up for a moment at most.

A file that was handed over and not taken is closed by whoever reads the message or closes the connection, and to close
one may wait: a TCP socket with SO_LINGER as long as its owner asked for, so that any user could hold up a reader that
never blocks. From Linux 6.16 on the kernel refuses such a message. Before, a signal ends the wait: the kernel closes
all files of a message on its way back from one system call, and none of them waits once a signal is due
(sk_stream_wait_close in net/ipv4/tcp.c).
"""

from __future__ import annotations

import signal
import socket
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

SO_PASSRIGHTS = 83  # include/uapi/asm-generic/socket.h, Linux 6.16 and later
FIRST_SECONDS = 0.02  # what waits longer than this is ended,
AGAIN_SECONDS = 0.01  # and then what waits next


def take_no_files(listener: socket.socket) -> Callable[[], AbstractContextManager[None]]:
    """For all who will connect, before `listen`: who sends a file has EPERM. Older kernels do not know that. For their
    sake `with brief():`, brief being what is returned, stands around all that reads from those who connect or closes
    them. In the main thread; SIGALRM is ours."""
    try:
        listener.setsockopt(socket.SOL_SOCKET, SO_PASSRIGHTS, 0)
    except OSError:
        signal.signal(signal.SIGALRM, lambda _number, _frame: None)
        return _brief
    return nullcontext


@contextmanager
def _brief() -> Iterator[None]:
    signal.setitimer(signal.ITIMER_REAL, FIRST_SECONDS, AGAIN_SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
