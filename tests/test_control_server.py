"""The control socket with real clients: slow, half, wrong, huge, gone, many, and of another user."""

from __future__ import annotations

import json
import os
import select
import shutil
import socket
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from healthd import guard
from healthd.say.control_server import MAX_CLIENTS, MAX_REQUEST_BYTES, PATIENCE_SECONDS, ControlServer

NOBODY = 65534


class Served:
    """A server, what it was asked, and a clock that can be put forward."""

    def __init__(self, path: str) -> None:
        self.ahead = 0.0
        self.asked: list[tuple[dict[str, Any], str, bool]] = []
        self.answer: dict[str, Any] = {"done": "yes"}
        self.path = path
        self.server = ControlServer(path, self._answer, self.monotonic)

    def monotonic(self) -> float:
        return time.monotonic() + self.ahead

    def _answer(self, request: dict[str, Any], who: str, may: bool) -> dict[str, Any]:
        self.asked.append((request, who, may))
        return self.answer

    def client(self, data: bytes = b"") -> socket.socket:
        stream = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        stream.connect(self.path)
        stream.setblocking(False)
        if data:
            stream.send(data)
        return stream

    def until(self, reached: Callable[[], bool], seconds: float = 5.0) -> int:
        """Serve until it is so; how often that woke the server."""
        end, wakes = time.monotonic() + seconds, 0
        while not reached():
            assert time.monotonic() < end, "it did not happen"
            ready = select.poll()
            for descriptor, writes in self.server.waits():
                ready.register(descriptor, select.POLLIN | (select.POLLOUT if writes else 0))
            ready.poll(20)
            self.server.step()
            wakes += 1
        return wakes

    def said_to(self, stream: socket.socket) -> Any:
        """The answer, once the server hung up; None if there is none."""
        said = bytearray()

        def over() -> bool:
            try:
                chunk = stream.recv(1 << 16)
            except BlockingIOError:
                return False
            except ConnectionError:
                return True
            said.extend(chunk)
            return not chunk

        with stream:
            self.until(over)
        return json.loads(said) if said else None


@pytest.fixture
def served() -> Iterator[Served]:
    directory = tempfile.mkdtemp(prefix="healthd.", dir="/tmp")
    os.chmod(directory, 0o755)
    found = Served(f"{directory}/healthd.sock")
    yield found
    found.server.close()
    assert not os.path.exists(found.path)
    shutil.rmtree(directory)


def test_a_request_is_answered_and_the_line_closed(served: Served) -> None:
    assert served.said_to(served.client(b'{"command": "status"}\n')) == {"done": "yes"}
    ((request, who, may),) = served.asked
    assert request == {"command": "status"}
    assert who.endswith(f"uid {os.getuid()})") or who == f"uid {os.getuid()}"
    assert may


def test_a_request_that_comes_in_pieces_is_put_together(served: Served) -> None:
    stream = served.client(b'{"comm')
    served.until(lambda: len(served.server._clients) == 1)
    served.server.step()
    stream.send(b'and": "status"}\n')
    assert served.said_to(stream) == {"done": "yes"}


def test_one_who_ends_without_a_line_feed_is_answered_too(served: Served) -> None:
    stream = served.client(b'{"command": "status"}')
    stream.shutdown(socket.SHUT_WR)
    assert served.said_to(stream) == {"done": "yes"}


@pytest.mark.parametrize(
    "line", [b"", b"garbage", b"[1]", b'"x"', b"null", b"\xff\xfe", b"{" * 5000, b"[" * 5000, b'{"a": NaN'],
)  # fmt: skip
def test_garbage_is_refused_in_one_sentence_and_never_reaches_the_daemon(served: Served, line: bytes) -> None:
    assert set(served.said_to(served.client(line + b"\n"))) == {"error"}
    assert served.asked == []


def test_half_a_line_is_let_go_after_a_while(served: Served) -> None:
    stream = served.client(b'{"command"')
    served.until(lambda: len(served.server._clients) == 1)
    assert served.server.deadline <= served.monotonic() + PATIENCE_SECONDS
    served.ahead = PATIENCE_SECONDS + 0.1
    assert served.said_to(stream) is None
    assert served.server.deadline == float("inf")


def test_a_line_of_ten_megabytes_is_cut_off(served: Served) -> None:
    stream = served.client()
    left = 10 << 20

    def hung_up() -> bool:
        nonlocal left
        try:
            left -= stream.send(b"x" * min(left, 1 << 16))
        except BlockingIOError:
            return False
        except ConnectionError:
            return True
        assert sum(len(client.incoming) for client in served.server._clients) <= 2 * MAX_REQUEST_BYTES
        return False

    served.until(hung_up)
    assert left > 9 << 20
    stream.close()
    assert served.asked == []


def test_a_client_that_vanishes_harms_nobody(served: Served) -> None:
    served.answer = {"status": "x" * (4 << 20)}
    for data in (b"", b'{"com', b'{"command": "status"}\n'):
        served.client(data).close()
    served.server.step()
    served.server.step()
    assert served.said_to(served.client(b'{"command": "status"}\n')) == served.answer
    assert served.server._clients == []


def test_a_client_that_does_not_read_is_waited_for_without_a_busy_loop_and_then_let_go(served: Served) -> None:
    served.answer = {"status": "x" * (4 << 20)}
    stream = served.client(b'{"command": "status"}\n')
    served.until(lambda: any(client.outgoing for client in served.server._clients))
    quiet_until = time.monotonic() + 0.3
    assert served.until(lambda: time.monotonic() > quiet_until) < 50
    assert served.said_to(served.client(b"{}\n")) == served.answer, "the others are served"
    served.ahead = PATIENCE_SECONDS + 0.1
    served.until(lambda: not served.server._clients)
    stream.close()


def test_forty_clients_at_once_all_get_their_answer(served: Served) -> None:
    streams = []
    for _ in range(40):  # more than the listener's queue holds
        streams.append(served.client(b'{"command": "status"}\n'))
        served.server._accept()
    assert len(served.server._clients) == MAX_CLIENTS
    assert [served.said_to(stream) for stream in streams] == [{"done": "yes"}] * 40


def test_clients_that_say_nothing_hold_the_socket_for_a_while_only(served: Served) -> None:
    silent = [served.client() for _ in range(MAX_CLIENTS)]
    served.until(lambda: len(served.server._clients) == MAX_CLIENTS)
    late = served.client(b"{}\n")
    served.ahead = PATIENCE_SECONDS + 0.1
    assert served.said_to(late) == {"done": "yes"}
    for stream in silent:
        stream.close()


def test_a_socket_that_a_killed_daemon_left_is_taken_over(tmp_path: Path) -> None:
    path = str(tmp_path / "healthd.sock")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as left:
        left.bind(path)
    server = ControlServer(path, lambda *_: {}, time.monotonic)
    server.close()
    assert not os.path.exists(path)


def as_user(uid: int, path: str, request: bytes) -> int:
    """Ask as another user, in a process of its own; what comes back is to be read from this descriptor."""
    reading, writing = os.pipe()
    if os.fork():
        os.close(writing)
        return reading
    try:
        os.setgroups([])
        os.setgid(uid)
        os.setuid(uid)
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as stream:
            stream.settimeout(5)
            stream.connect(path)
            stream.sendall(request)
            while chunk := stream.recv(1 << 16):
                os.write(writing, chunk)
    finally:
        os._exit(0)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_another_user_may_ask_but_is_known_as_one_who_may_not_command(served: Served) -> None:
    answer = as_user(NOBODY, served.path, b'{"command": "pause"}\n')
    served.until(lambda: bool(select.select([answer], [], [], 0)[0]))
    assert json.loads(os.read(answer, 4096)) == {"done": "yes"}
    os.close(answer)
    os.wait()
    ((_, who, may),) = served.asked
    assert str(NOBODY) in who
    assert not may


def test_a_request_on_which_healthd_fails_gets_an_answer_and_costs_no_other_client(tmp_path: Path) -> None:
    path = str(tmp_path / "s")

    def fails(request: dict[str, Any], *_: object) -> dict[str, Any]:
        return {"done": 1 / request["by"], "cannot be sent": {1, 2} if request["by"] == 7 else 0}

    server = ControlServer(path, fails, time.monotonic)
    mistake = "healthd makes a mistake with this request: "
    for by, answer in (
        (0, {"error": f"{mistake}ZeroDivisionError: division by zero"}),
        (7, {"error": f"{mistake}TypeError: Object of type set is not JSON serializable"}),
        (1, {"done": 1.0, "cannot be sent": 0}),
    ):
        with socket.socket(socket.AF_UNIX) as client:
            client.connect(path)
            client.sendall(json.dumps({"by": by}).encode() + b"\n")
            for _ in range(3):
                server.step()
            assert json.loads(client.recv(1 << 16)) == answer
    assert dict(guard.dropped) == {"socket": 2}
    server.close()
