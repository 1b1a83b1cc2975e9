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

heard: list[bytes] = []  # requests in order of arrival
Serve = Callable[[Callable[[socket.socket], None]], str]


@pytest.fixture
def serve(tmp_path: Path) -> Iterator[Serve]:
    """Return a function that starts a daemon for one conversation and returns its runtime directory."""
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / SOCKET))
        listener.listen()
        threads: list[threading.Thread] = []

        def start(talk: Callable[[socket.socket], None]) -> str:
            def accept() -> None:
                stream, _ = listener.accept()
                with stream:
                    heard.append(stream.recv(1000))
                    talk(stream)

            threads.append(threading.Thread(target=accept))
            threads[-1].start()
            return str(tmp_path)

        yield start
        for thread in threads:
            thread.join(120)


def sentence(runtime_dir: str, kind: type[Exception] = DaemonUnreachable, patience: float = 60.0) -> str:
    with pytest.raises(kind) as raised:
        send_request(runtime_dir, {"command": "status"}, patience)
    return str(raised.value)


def test_an_answer_is_given_back(serve):
    def talk(stream: socket.socket) -> None:
        stream.sendall(b'{"done": ')
        stream.sendall(b'"yes"}\n')

    assert send_request(serve(talk), {"command": "x"}, 60.0) == {"done": "yes"}
    assert heard.pop() == b'{"command": "x"}\n'


def test_a_refusal_is_the_daemons_sentence(serve):
    assert sentence(serve(lambda stream: stream.sendall(b'{"error": "no"}\n')), RefusedByDaemon) == "no"


def test_no_daemon(tmp_path):
    assert sentence(str(tmp_path)) == f"healthd is not running (no {tmp_path}/healthd.sock)"


def test_a_daemon_that_was_killed(tmp_path):
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "healthd.sock"))
    assert sentence(str(tmp_path)) == f"healthd is not running (no listener at {tmp_path}/healthd.sock)"


@pytest.mark.parametrize("answer", [b"nonsense", b"[]", b"3\n", b"[" * 100_000, b"\xff"])
def test_nonsense(serve, answer):
    assert sentence(serve(lambda stream: stream.sendall(answer))).endswith("sent an invalid answer")


def test_a_daemon_that_stops_meanwhile(serve):
    assert sentence(serve(lambda stream: None)).endswith("sent no answer: it may be stopping")


def test_a_daemon_that_never_answers_is_waited_for_so_long_and_no_longer(serve):
    silent = serve(lambda stream: stream.recv(1))  # until the client leaves
    assert sentence(silent, patience=0.3).endswith("(no reply within 0.3 s)")


def test_a_daemon_whose_queue_is_full_took_no_connection_which_is_another_sentence_than_no_answer(tmp_path):
    with socket.socket(socket.AF_UNIX) as listener, ExitStack() as waiting:
        listener.bind(str(tmp_path / SOCKET))
        listener.listen(0)
        with suppress(BlockingIOError):
            while True:
                other = waiting.enter_context(socket.socket(socket.AF_UNIX))
                other.setblocking(False)
                other.connect(str(tmp_path / SOCKET))
        began = time.monotonic()
        said = sentence(str(tmp_path), patience=0.3)
        assert said == f"healthd does not answer at {tmp_path}/healthd.sock (no connection within 0.3 s)"
        assert time.monotonic() - began >= 0.3, "the message states the time that was waited"


def test_one_that_drips_is_not_waited_for_longer(serve):
    def drip(stream: socket.socket) -> None:
        with suppress(OSError):  # the client has left
            while True:
                stream.sendall(b" ")
                time.sleep(0.1)

    assert "within 0.4 s" in sentence(serve(drip), patience=0.4)


def test_a_path_that_is_too_long_for_a_socket(tmp_path):
    far = tmp_path / ("x" * 120)
    far.mkdir()
    (far / "healthd.sock").touch()
    assert sentence(str(far)).startswith("cannot connect to healthd at ")
