"""Processes of another user, forked from the test: that user needs no access to the interpreter or the sources."""

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
def many_connections(uid: int, path: str, connections: int, line: bytes = b"") -> Iterator[int]:
    """Run a process of this user that opens connections, sends `line` on each and keeps the last 200 open.

    Yield a descriptor that returns "c" for each connection that the listener's queue accepted.
    """
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.close(reading)
            become(uid)
            open_streams: list[socket.socket] = []
            for _ in range(connections):
                stream = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
                stream.connect(path)
                open_streams = [*open_streams[-200:], stream]
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


def run_as_user(uid: int, write_output: Callable[[int], None]) -> int:
    """Run `write_output` as another user and return a descriptor of its output.

    The process is not a child of this one, so no caller has to wait for its end.
    """
    reading, writing = os.pipe()
    parent = os.fork()
    if parent:
        os.close(writing)
        os.waitpid(parent, 0)
        return reading
    try:
        if not os.fork():
            become(uid)
            write_output(writing)
    finally:
        os._exit(0)


def request_as_user(uid: int, path: str, request: bytes) -> int:
    """Send a request as another user, in another process, and return a descriptor of the answer."""

    def send_and_copy(writing: int) -> None:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as stream:
            stream.settimeout(60)
            stream.connect(path)
            with suppress(ConnectionError):  # the daemon may reject it first; its reason can still be read
                stream.sendall(request)
            with suppress(ConnectionError):
                while chunk := stream.recv(1 << 16):
                    os.write(writing, chunk)

    return run_as_user(uid, send_and_copy)


def become(uid: int) -> None:
    os.setgroups([])
    os.setgid(uid)
    os.setuid(uid)
