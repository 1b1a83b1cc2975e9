"""Processes of another user, forked from the test: that user need not reach the interpreter nor the sources."""

from __future__ import annotations

import os
import signal
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

import pytest

NOBODY = 65534
only_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")


@contextmanager
def crowd(uid: int, path: str, connections: int, line: bytes = b"") -> Iterator[int]:
    """A process of this user that opens so many connections, says `line` on each, and holds the last 200. Gives what
    is to be read from: "c" for each that was taken into the listener's queue."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.close(reading)
            become(uid)
            held: list[socket.socket] = []
            for _ in range(connections):
                stream = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
                stream.connect(path)
                held = [*held[-200:], stream]
                with suppress(OSError):
                    stream.send(line)
                os.write(writing, b"c")
            time.sleep(600)
        finally:
            os._exit(0)
    os.close(writing)
    try:
        yield reading
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        os.close(reading)


def told_by(uid: int, tell: Callable[[int], None]) -> int:
    """Another user's process: what `tell` writes to the descriptor that it gets is to be read from this one. It is no
    child of this process: nobody here has to wait for its end."""
    reading, writing = os.pipe()
    between = os.fork()
    if between:
        os.close(writing)
        os.waitpid(between, 0)
        return reading
    try:
        if not os.fork():
            become(uid)
            tell(writing)
    finally:
        os._exit(0)


def as_user(uid: int, path: str, request: bytes) -> int:
    """Ask as another user, in a process of its own; what comes back is to be read from this descriptor."""

    def tell(writing: int) -> None:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as stream:
            stream.settimeout(60)
            stream.connect(path)
            with suppress(ConnectionError):  # turned away before it had asked: why, can be read all the same
                stream.sendall(request)
            with suppress(ConnectionError):
                while chunk := stream.recv(1 << 16):
                    os.write(writing, chunk)

    return told_by(uid, tell)


def become(uid: int) -> None:
    os.setgroups([])
    os.setgid(uid)
    os.setuid(uid)
