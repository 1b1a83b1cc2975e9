"""Tests of the control socket with real clients: slow, partial, invalid, huge, vanished, many, and other users."""

from __future__ import annotations

import json
import os
import select
import shutil
import socket
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, nullcontext
from pathlib import Path
from typing import Any

import pytest
from other_user import NOBODY, many_connections, only_root, request_as_user, run_as_user

from healthd.agent.control import server as control_server
from healthd.agent.control.client import DaemonUnreachable, RefusedByDaemon, send_request
from healthd.agent.control.server import (
    ACCEPT_PAUSE_SECONDS,
    CLIENT_TIMEOUT_SECONDS,
    MAX_CLIENTS,
    MAX_CLIENTS_PER_USER,
    MAX_REQUEST_BYTES,
    MAX_UNPRIVILEGED_CLIENTS,
    ControlServer,
)
from healthd.common import guard
from healthd.host.passed_descriptor import SO_PASSRIGHTS


class ServedSocket:
    """A server, the requests it received, and a clock that can be advanced."""

    def __init__(self, path: str) -> None:
        self.clock_offset = 0.0
        self.requests: list[tuple[dict[str, Any], str, bool]] = []
        self.answer: dict[str, Any] = {"done": "yes"}
        self.path = path
        self.server = ControlServer(path, self._answer, self.monotonic)
        self.server.open()

    def monotonic(self) -> float:
        return time.monotonic() + self.clock_offset

    def _answer(self, request: dict[str, Any], user: str, may_command: bool) -> dict[str, Any]:
        self.requests.append((request, user, may_command))
        return self.answer

    def client(self, data: bytes = b"") -> socket.socket:
        stream = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        stream.connect(self.path)
        stream.setblocking(False)
        if data:
            stream.send(data)
        return stream

    def run_until(self, is_reached: Callable[[], bool], seconds: float = 120.0) -> int:
        """Serve until `is_reached` returns True, and return how often the server woke."""
        end, wakes = time.monotonic() + seconds, 0
        while not is_reached():
            assert time.monotonic() < end, "timed out"
            ready = select.poll()
            for descriptor, is_writing in self.server.waits():
                ready.register(descriptor, select.POLLIN | (select.POLLOUT if is_writing else 0))
            ready.poll(20)
            self.server.step()
            wakes += 1
        return wakes

    def read_answer(self, stream: socket.socket) -> Any:
        """Return the answer once the server closes the connection, or None if there is none."""
        received = bytearray()

        def is_closed() -> bool:
            try:
                chunk = stream.recv(1 << 16)
            except BlockingIOError:
                return False
            except ConnectionError:
                return True
            received.extend(chunk)
            return not chunk

        with stream:
            self.run_until(is_closed)
        return json.loads(received) if received else None


@pytest.fixture
def served() -> Iterator[ServedSocket]:
    directory = tempfile.mkdtemp(prefix="healthd.")
    os.chmod(directory, 0o755)
    new_server = ServedSocket(f"{directory}/healthd.sock")
    yield new_server
    new_server.server.close()
    assert not os.path.exists(new_server.path)
    shutil.rmtree(directory)


def test_server_answers_request_and_closes(served: ServedSocket) -> None:
    assert served.read_answer(served.client(b'{"command": "status"}\n')) == {"done": "yes"}
    ((request, user, may_command),) = served.requests
    assert request == {"command": "status"}
    assert user.endswith(f"uid {os.getuid()})") or user == f"uid {os.getuid()}"
    assert may_command


def test_server_joins_request_parts(served: ServedSocket) -> None:
    stream = served.client(b'{"comm')
    served.run_until(lambda: len(served.server._clients) == 1)
    served.server.step()
    stream.send(b'and": "status"}\n')
    assert served.read_answer(stream) == {"done": "yes"}


def test_server_is_not_blocked_by_passed_file(served: ServedSocket) -> None:
    """Closing a passed file may take days. Linux 6.16 and later can refuse it."""
    stream = served.client(b"")
    try:
        is_supported = stream.getsockopt(socket.SOL_SOCKET, SO_PASSRIGHTS) >= 0
    except OSError:
        is_supported = False
    with pytest.raises(PermissionError) if is_supported else nullcontext():
        socket.send_fds(stream, [b" "], [0])
    stream.send(b'{"command": "status"}\n')
    assert served.read_answer(stream) == {"done": "yes"}


def test_server_answers_request_without_line_feed(served: ServedSocket) -> None:
    stream = served.client(b'{"command": "status"}')
    stream.shutdown(socket.SHUT_WR)
    assert served.read_answer(stream) == {"done": "yes"}


@pytest.mark.parametrize(
    "line", [b"", b"garbage", b"[1]", b'"x"', b"null", b"\xff\xfe", b"{" * 5000, b"[" * 5000, b'{"a": NaN'],
)  # fmt: skip
def test_server_refuses_invalid_request(served: ServedSocket, line: bytes) -> None:
    assert set(served.read_answer(served.client(line + b"\n"))) == {"error"}
    assert served.requests == []


def test_client_keeps_refusal_when_retry_gets_no_answer(tmp_path: Path) -> None:
    """The client must not report "no answer": that would mean that the daemon hangs."""
    with socket.socket(socket.AF_UNIX) as listener, ThreadPoolExecutor(1) as threads:
        listener.bind(str(tmp_path / "healthd.sock"))
        listener.listen()
        answer = threads.submit(send_request, str(tmp_path), {"command": "status"}, 5.0)
        stream, _ = listener.accept()
        with stream:
            stream.recv(1 << 16)
            stream.send(control_server.TOO_MANY_CONNECTIONS)
        with pytest.raises(RefusedByDaemon, match="too many connections"):  # the retry gets no answer
            answer.result(120)


def test_server_drops_incomplete_request_after_timeout(served: ServedSocket) -> None:
    stream = served.client(b'{"command"')
    served.run_until(lambda: len(served.server._clients) == 1)
    assert served.server.deadline <= served.monotonic() + CLIENT_TIMEOUT_SECONDS
    served.clock_offset = CLIENT_TIMEOUT_SECONDS + 0.1
    assert served.read_answer(stream) is None
    assert served.server.deadline == float("inf")


def test_server_drops_too_long_request(served: ServedSocket) -> None:
    stream = served.client()
    remaining = 10 << 20

    def send_until_closed() -> bool:
        nonlocal remaining
        try:
            remaining -= stream.send(b"x" * min(remaining, 1 << 16))
        except BlockingIOError:
            return False
        except ConnectionError:
            return True
        assert sum(len(client.incoming) for client in served.server._clients) <= 2 * MAX_REQUEST_BYTES
        return False

    served.run_until(send_until_closed)
    assert remaining > 9 << 20
    stream.close()
    assert served.requests == []


def test_server_survives_clients_that_disconnect(served: ServedSocket) -> None:
    served.answer = {"status": "x" * (4 << 20)}
    for data in (b"", b'{"com', b'{"command": "status"}\n'):
        served.client(data).close()
    served.server.step()
    served.server.step()
    assert served.read_answer(served.client(b'{"command": "status"}\n')) == served.answer
    assert served.server._clients == []


def test_server_drops_client_that_does_not_read(served: ServedSocket) -> None:
    served.answer = {"status": "x" * (4 << 20)}
    stream = served.client(b'{"command": "status"}\n')
    served.run_until(lambda: any(client.outgoing for client in served.server._clients))
    quiet_until = time.monotonic() + 0.3
    assert served.run_until(lambda: time.monotonic() > quiet_until) < 50
    assert served.read_answer(served.client(b"{}\n")) == served.answer, "other clients are served"
    served.clock_offset = CLIENT_TIMEOUT_SECONDS + 0.1
    served.run_until(lambda: not served.server._clients)
    stream.close()


def test_server_answers_forty_clients_at_once(served: ServedSocket) -> None:
    streams = []
    for _ in range(40):  # more than the listener's queue holds
        streams.append(served.client(b'{"command": "status"}\n'))
        served.server._accept()
    assert len(served.server._clients) == MAX_CLIENTS
    assert [served.read_answer(stream) for stream in streams] == [{"done": "yes"}] * 40


def test_silent_clients_block_server_only_until_timeout(served: ServedSocket) -> None:
    silent = [served.client() for _ in range(MAX_CLIENTS)]
    served.run_until(lambda: len(served.server._clients) == MAX_CLIENTS)
    late = served.client(b"{}\n")
    served.clock_offset = CLIENT_TIMEOUT_SECONDS + 0.1
    assert served.read_answer(late) == {"done": "yes"}
    for stream in silent:
        stream.close()


def test_server_replaces_stale_socket(tmp_path: Path) -> None:
    path = str(tmp_path / "healthd.sock")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as stale_socket:
        stale_socket.bind(path)
    server = ControlServer(path, lambda *_: {}, time.monotonic)
    server.open()
    server.close()
    assert not os.path.exists(path)


def request_as_root(served: ServedSocket, request: dict[str, Any]) -> dict[str, Any]:
    """Return the answer that the real client gets as root, while the server runs."""
    with ThreadPoolExecutor(1) as threads:
        answer = threads.submit(send_request, os.path.dirname(served.path), request, 60.0)
        served.run_until(answer.done)
        return answer.result()


def start_client(uid: int, path: str, patience_seconds: float) -> int:
    """Run the real client as this user. Its answer can be read from the returned descriptor."""

    def write_answer(write_end: int) -> None:
        try:
            message = str(send_request(os.path.dirname(path), {"command": "status"}, patience_seconds))
        except (DaemonUnreachable, RefusedByDaemon) as error:
            message = f"{type(error).__name__}: {error}"
        os.write(write_end, message.encode())

    return run_as_user(uid, write_answer)


def run_client(served: ServedSocket, uid: int, patience_seconds: float) -> str:
    read_end = start_client(uid, served.path, patience_seconds)
    served.run_until(lambda: bool(select.select([read_end], [], [], 0)[0]))
    answer = os.read(read_end, 4096).decode()
    os.close(read_end)
    return answer


@pytest.fixture
def long_timeout(monkeypatch: pytest.MonkeyPatch) -> float:
    """Raise the client timeout, so that it does not expire before the test ends on a busy machine."""
    seconds = 500.0
    monkeypatch.setattr(control_server, "CLIENT_TIMEOUT_SECONDS", seconds)
    return seconds


def clients_by_uid(served: ServedSocket) -> Counter[int]:
    return Counter(client.uid for client in served.server._clients)


@only_root
@pytest.mark.parametrize("command", ["status", "pause", "job-ended"])
def test_eighty_connections_do_not_lock_root_out(long_timeout: float, served: ServedSocket, command: str) -> None:
    with many_connections(NOBODY, served.path, 80) as connected:
        connected_count = 0

        def all_connected() -> bool:
            nonlocal connected_count
            connected_count += len(os.read(connected, 100)) if select.select([connected], [], [], 0)[0] else 0
            return connected_count == 80

        served.run_until(all_connected)
        started = time.monotonic()
        assert request_as_root(served, {"command": command}) == {"done": "yes"}
        assert time.monotonic() - started < long_timeout, "no client had to time out first"
        assert clients_by_uid(served) == {NOBODY: MAX_CLIENTS_PER_USER}


@only_root
def test_users_leave_places_for_root(long_timeout: float, served: ServedSocket) -> None:
    with ExitStack() as crowds:
        for uid in range(2000, 2005):
            crowds.enter_context(many_connections(uid, served.path, MAX_CLIENTS_PER_USER))
        served.run_until(lambda: len(served.server._clients) == MAX_UNPRIVILEGED_CLIENTS)
        answer = request_as_user(NOBODY, served.path, b"{}\n")
        served.run_until(lambda: bool(select.select([answer], [], [], 0)[0]))
        refusal = json.loads(os.read(answer, 4096))
        assert (refusal.keys(), refusal["again"]) == ({"error", "again"}, True)
        assert "too many connections" in refusal["error"]
        os.close(answer)
        streams = [served.client() for _ in range(MAX_CLIENTS - MAX_UNPRIVILEGED_CLIENTS)]
        served.run_until(lambda: len(served.server._clients) == MAX_CLIENTS)
        assert max((count, uid) for uid, count in clients_by_uid(served).items() if uid)[0] == MAX_CLIENTS_PER_USER
        for stream in streams:
            stream.close()


@only_root
def test_user_over_limit_is_refused_and_served_later(long_timeout: float, served: ServedSocket) -> None:
    """Run the real client as that user several times: sometimes it has sent its request when it is refused."""
    with many_connections(NOBODY, served.path, MAX_CLIENTS_PER_USER):
        served.run_until(lambda: clients_by_uid(served)[NOBODY] == MAX_CLIENTS_PER_USER)
        for _ in range(4):
            answer = run_client(served, NOBODY, patience_seconds=3.0)
            assert answer.startswith("RefusedByDaemon: too many connections")
        read_end = start_client(NOBODY, served.path, patience_seconds=60)
        served.clock_offset = long_timeout + 0.1  # the other clients time out
        served.run_until(lambda: bool(select.select([read_end], [], [], 0)[0]), seconds=60)
        assert os.read(read_end, 4096) == b"{'done': 'yes'}"
        os.close(read_end)


@only_root
def test_user_at_limit_does_not_affect_others(long_timeout: float, served: ServedSocket) -> None:
    with many_connections(NOBODY, served.path, MAX_CLIENTS_PER_USER - 1):
        served.run_until(lambda: clients_by_uid(served)[NOBODY] == MAX_CLIENTS_PER_USER - 1)
        answer = request_as_user(NOBODY, served.path, b"{}\n")
        served.run_until(lambda: bool(select.select([answer], [], [], 0)[0]))
        assert json.loads(os.read(answer, 4096)) == {"done": "yes"}, "this user still had one place"
        os.close(answer)
        with many_connections(NOBODY, served.path, 2), many_connections(2000, served.path, 1):
            served.run_until(lambda: clients_by_uid(served) == {NOBODY: MAX_CLIENTS_PER_USER, 2000: 1})


@only_root
def test_connection_loop_does_not_keep_server_busy(served: ServedSocket) -> None:
    with many_connections(NOBODY, served.path, 100_000):
        served.run_until(lambda: clients_by_uid(served)[NOBODY] == MAX_CLIENTS_PER_USER)
        end = time.monotonic() + 1.0
        wakes = served.run_until(lambda: time.monotonic() > end)
        assert wakes < 1.0 / ACCEPT_PAUSE_SECONDS * (MAX_CLIENTS_PER_USER + 4), "each accepted client may wake it"
        assert request_as_root(served, {"command": "status"}) == {"done": "yes"}


def test_client_waits_for_full_queue() -> None:
    with tempfile.TemporaryDirectory(prefix="healthd.") as directory, ThreadPoolExecutor(1) as threads:
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        listener.bind(f"{directory}/healthd.sock")
        listener.listen(0)
        first = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        first.connect(f"{directory}/healthd.sock")
        answer = threads.submit(send_request, directory, {"command": "status"}, 60.0)
        time.sleep(0.2)
        assert not answer.done(), "the queue is full, and the client retries"
        for reply in (b"", b'{"done": "yes"}\n'):
            with listener.accept()[0] as stream:
                stream.sendall(reply)
                stream.shutdown(socket.SHUT_WR)
                answer.exception(60) if reply else None
        assert answer.result() == {"done": "yes"}
        first.close()
        listener.close()


def test_client_times_out_in_full_queue(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        listener.bind(str(tmp_path / "healthd.sock"))
        listener.listen(0)
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as first:
            first.connect(str(tmp_path / "healthd.sock"))
            with pytest.raises(DaemonUnreachable, match=r"no connection within 0.1 s"):
                send_request(str(tmp_path), {"command": "status"}, 0.1)


@only_root
def test_unprivileged_user_may_not_command(served: ServedSocket) -> None:
    answer = request_as_user(NOBODY, served.path, b'{"command": "pause"}\n')
    served.run_until(lambda: bool(select.select([answer], [], [], 0)[0]))
    assert json.loads(os.read(answer, 4096)) == {"done": "yes"}
    os.close(answer)
    ((_, user, may_command),) = served.requests
    assert str(NOBODY) in user
    assert not may_command


def test_error_in_request_does_not_stop_server(tmp_path: Path) -> None:
    path = str(tmp_path / "s")

    def fail(request: dict[str, Any], *_: object) -> dict[str, Any]:
        return {"done": 1 / request["by"], "cannot be sent": {1, 2} if request["by"] == 7 else 0}

    server = ControlServer(path, fail, time.monotonic)
    server.open()
    mistake = "internal error in healthd with this request: "
    for divisor, answer in (
        (0, {"error": f"{mistake}ZeroDivisionError: division by zero"}),
        (7, {"error": f"{mistake}TypeError: Object of type set is not JSON serializable"}),
        (1, {"done": 1.0, "cannot be sent": 0}),
    ):
        with socket.socket(socket.AF_UNIX) as client:
            client.connect(path)
            client.sendall(json.dumps({"by": divisor}).encode() + b"\n")
            for _ in range(3):
                server.step()
            assert json.loads(client.recv(1 << 16)) == answer
    assert dict(guard.dropped) == {"socket": 2}
    server.close()
