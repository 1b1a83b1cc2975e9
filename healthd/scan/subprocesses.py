"""Copies of this process that do a piece of work each, and answer in bytes. One that dies answers nothing.

They end with this process, however it ends: a copy that can neither read what to do next nor write its answer ends.
"""

from __future__ import annotations

import os
import select
import signal
import struct
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import NoReturn

_LENGTH = struct.Struct("=Q")
MOST_WAITING = 2  # requests of a copy: while one is answered the next must be there
READ_BYTES = 1 << 20

Work = Callable[[bytes], bytes]


class Copy:
    """`answers`: None for each request that it did not live to answer."""

    def __init__(self, pid: int, requests: int, replies: int) -> None:
        self.pid, self.requests, self.replies = pid, requests, replies
        self.alive = True
        self.waiting = 0
        self.answers: deque[bytes | None] = deque()
        self._read = bytearray()

    def ask(self, request: bytes) -> None:
        """A request of a few bytes, which is never waited for."""
        self.waiting += 1
        try:
            os.write(self.requests, _LENGTH.pack(len(request)) + request)
        except OSError:
            self._lost()

    def hear(self) -> None:
        data = os.read(self.replies, READ_BYTES)
        if not data:
            self._lost()
            return
        self._read += data
        while len(self._read) >= _LENGTH.size:
            (size,) = _LENGTH.unpack_from(self._read)
            if len(self._read) < _LENGTH.size + size:
                return
            self.answers.append(bytes(memoryview(self._read)[_LENGTH.size : _LENGTH.size + size]))
            self.waiting -= 1
            self._read = self._read[_LENGTH.size + size :]

    def _lost(self) -> None:
        self.alive = False
        self.answers.extend([None] * self.waiting)
        self.waiting = 0

    def end(self) -> None:
        for descriptor in (self.requests, self.replies):
            os.close(descriptor)
        os.kill(self.pid, signal.SIGKILL)
        os.waitpid(self.pid, 0)

    @property
    def unread(self) -> int:
        """Bytes of answers that are kept here."""
        return len(self._read) + sum(len(answer or b"") for answer in self.answers)


def can_be_copied() -> bool:
    """A copy has no threads but would have their locks."""
    return len(os.listdir("/proc/self/task")) == 1


@contextmanager
def crew(count: int, keep: Sequence[int], work: Work) -> Iterator[list[Copy]]:
    """`count` copies, or as many as there may be; `keep`: descriptors that they need."""
    copies: list[Copy] = []
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # who has died keeps its number until `end`
    try:
        for _ in range(count):
            try:
                copies.append(_start(keep, work))
            except OSError:  # no more processes, memory or descriptors
                break
        yield copies
    finally:
        for copy in copies:
            copy.end()


def hear(copies: Sequence[Copy], wait: bool) -> None:
    """Take in what the copies have answered; `wait`: until one of them says something, or dies."""
    asked = select.poll()
    by_descriptor = {copy.replies: copy for copy in copies if copy.alive}
    for descriptor in by_descriptor:
        asked.register(descriptor, select.POLLIN)
    if by_descriptor:
        for descriptor, _ in asked.poll(None if wait else 0):
            by_descriptor[descriptor].hear()


def _start(keep: Sequence[int], work: Work) -> Copy:
    theirs, requests = os.pipe()
    try:
        replies, mine = os.pipe()
    except OSError:
        os.close(theirs)
        os.close(requests)
        raise
    # Ctrl-C is for the first process, from the first moment on.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        pid = os.fork()
        if not pid:
            _serve(theirs, mine, keep, work)
        return Copy(pid, requests, replies)
    except OSError:
        os.close(requests)
        os.close(replies)
        raise
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        os.close(theirs)
        os.close(mine)


def _serve(requests: int, replies: int, keep: Sequence[int], work: Work) -> NoReturn:
    try:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.pthread_sigmask(signal.SIG_SETMASK, ())
        # Who reads what the first process prints must not wait for our end, and none of us for another's.
        nowhere = os.open(os.devnull, os.O_RDWR)
        for descriptor in (0, 1, 2):
            os.dup2(nowhere, descriptor)
        for name in os.listdir("/proc/self/fd"):
            if int(name) > 2 and int(name) not in (requests, replies, *keep):
                with suppress(OSError):  # the one by which they were listed
                    os.close(int(name))
        with open(requests, "rb", buffering=0) as asked:
            while len(head := asked.read(_LENGTH.size) or b"") == _LENGTH.size:
                request = asked.read(_LENGTH.unpack(head)[0]) or b""
                answer = work(request)
                data = memoryview(_LENGTH.pack(len(answer)) + answer)
                while data:
                    data = data[os.write(replies, data) :]
    finally:
        os._exit(0)  # what the first process does at its end is not ours to do
