"""Tests of the client of the control socket: each failure of a daemon is one sentence, in bounded time."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest

from healthd.agent.control.client import DaemonUnreachable, RefusedByDaemon, send_request
from healthd.common.paths import SOCKET

received: list[bytes] = []  # requests in order of arrival
Serve = Callable[[Callable[[socket.socket], None]], str]


@pytest.fixture
def serve(tmp_path: Path) -> Iterator[Serve]:
    """Return a function that starts a daemon for one conversation and returns its runtime directory."""
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / SOCKET))
        listener.listen()
        threads: list[threading.Thread] = []

        def start(conversation: Callable[[socket.socket], None]) -> str:
            def accept() -> None:
                stream, _ = listener.accept()
                with stream:
                    received.append(stream.recv(1000))
                    conversation(stream)

            threads.append(threading.Thread(target=accept))
            threads[-1].start()
            return str(tmp_path)

        yield start
        for thread in threads:
            thread.join(120)


def error_text(runtime_dir: str, kind: type[Exception] = DaemonUnreachable, patience: float = 60.0) -> str:
    with pytest.raises(kind) as raised:
        send_request(runtime_dir, {"command": "status"}, patience)
    return str(raised.value)


def test_send_request_returns_answer(serve):
    def send_in_parts(stream: socket.socket) -> None:
        stream.sendall(b'{"done": ')
        stream.sendall(b'"yes"}\n')

    assert send_request(serve(send_in_parts), {"command": "x"}, 60.0) == {"done": "yes"}
    assert received.pop() == b'{"command": "x"}\n'


def test_send_request_raises_refusal(serve):
    assert error_text(serve(lambda stream: stream.sendall(b'{"error": "no"}\n')), RefusedByDaemon) == "no"


def test_send_request_without_daemon(tmp_path):
    assert error_text(str(tmp_path)).endswith(f" (no {tmp_path}/healthd.sock)")


def test_send_request_after_killed_daemon(tmp_path):
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "healthd.sock"))
    assert error_text(str(tmp_path)).endswith(f" (no listener at {tmp_path}/healthd.sock)")


@pytest.mark.parametrize("answer", [b"nonsense", b"[]", b"3\n", b"[" * 100_000, b"\xff"])
def test_send_request_rejects_invalid_answer(serve, answer):
    assert error_text(serve(lambda stream: stream.sendall(answer))).endswith(" invalid answer")


def test_send_request_when_daemon_closes_connection(serve):
    assert "sent no answer" in error_text(serve(lambda stream: None))


def test_send_request_times_out_without_reply(serve):
    runtime_dir = serve(lambda stream: stream.recv(1))  # until the client leaves
    assert error_text(runtime_dir, patience=0.3).endswith("(no reply within 0.3 s)")


def test_send_request_times_out_in_full_queue(tmp_path):
    with socket.socket(socket.AF_UNIX) as listener, ExitStack() as clients:
        listener.bind(str(tmp_path / SOCKET))
        listener.listen(0)
        with suppress(BlockingIOError):
            while True:
                client = clients.enter_context(socket.socket(socket.AF_UNIX))
                client.setblocking(False)
                client.connect(str(tmp_path / SOCKET))
        started = time.monotonic()
        message = error_text(str(tmp_path), patience=0.3)
        assert message.endswith(f"{tmp_path}/healthd.sock (no connection within 0.3 s)")
        assert time.monotonic() - started >= 0.3, "the message states the time that was waited"


def test_send_request_times_out_on_partial_reply(serve):
    def drip(stream: socket.socket) -> None:
        with suppress(OSError):  # the client has left
            while True:
                stream.sendall(b" ")
                time.sleep(0.1)

    assert "within 0.4 s" in error_text(serve(drip), patience=0.4)


def test_send_request_with_too_long_path(tmp_path):
    long_path = tmp_path / ("x" * 120)
    long_path.mkdir()
    (long_path / "healthd.sock").touch()
    assert error_text(str(long_path)).startswith("cannot connect ")
