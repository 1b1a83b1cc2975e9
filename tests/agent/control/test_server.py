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
from other_user import NOBODY, as_user, crowd, only_root, told_by

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


class Served:
    """A server, the requests it received, and a clock that can be advanced."""

    def __init__(self, path: str) -> None:
        self.ahead = 0.0
        self.asked: list[tuple[dict[str, Any], str, bool]] = []
        self.answer: dict[str, Any] = {"done": "yes"}
        self.path = path
        self.server = ControlServer(path, self._answer, self.monotonic)
        self.server.open()

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

    def until(self, reached: Callable[[], bool], seconds: float = 120.0) -> int:
        """Serve until `is_reached` returns True, and return how often the server woke."""
        end, wakes = time.monotonic() + seconds, 0
        while not reached():
            assert time.monotonic() < end, "timed out"
            ready = select.poll()
            for descriptor, writes in self.server.waits():
                ready.register(descriptor, select.POLLIN | (select.POLLOUT if writes else 0))
            ready.poll(20)
            self.server.step()
            wakes += 1
        return wakes

    def said_to(self, stream: socket.socket) -> Any:
        """Return the answer once the server closes the connection, or None if there is none."""
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
    directory = tempfile.mkdtemp(prefix="healthd.")
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


def test_an_open_file_that_is_handed_over_holds_up_nobody(served: Served) -> None:
    """Closing a passed file may take days. Linux 6.16 and later can refuse it."""
    stream = served.client(b"")
    try:
        known = stream.getsockopt(socket.SOL_SOCKET, SO_PASSRIGHTS) >= 0
    except OSError:
        known = False
    with pytest.raises(PermissionError) if known else nullcontext():
        socket.send_fds(stream, [b" "], [0])
    stream.send(b'{"command": "status"}\n')
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


def test_who_was_turned_away_and_then_hears_nothing_says_why_he_was(tmp_path: Path) -> None:
    """The client must not report "no answer": that would mean that the daemon hangs."""
    with socket.socket(socket.AF_UNIX) as listening, ThreadPoolExecutor(1) as threads:
        listening.bind(str(tmp_path / "healthd.sock"))
        listening.listen()
        said = threads.submit(send_request, str(tmp_path), {"command": "status"}, 5.0)
        stream, _ = listening.accept()
        with stream:
            stream.recv(1 << 16)
            stream.send(control_server.TOO_MANY_CONNECTIONS)
        with pytest.raises(RefusedByDaemon, match="too many connections"):  # the retry gets no answer
            said.result(120)


def test_half_a_line_is_let_go_after_a_while(served: Served) -> None:
    stream = served.client(b'{"command"')
    served.until(lambda: len(served.server._clients) == 1)
    assert served.server.deadline <= served.monotonic() + CLIENT_TIMEOUT_SECONDS
    served.ahead = CLIENT_TIMEOUT_SECONDS + 0.1
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
    assert served.said_to(served.client(b"{}\n")) == served.answer, "other clients are served"
    served.ahead = CLIENT_TIMEOUT_SECONDS + 0.1
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
    served.ahead = CLIENT_TIMEOUT_SECONDS + 0.1
    assert served.said_to(late) == {"done": "yes"}
    for stream in silent:
        stream.close()


def test_a_socket_that_a_killed_daemon_left_is_taken_over(tmp_path: Path) -> None:
    path = str(tmp_path / "healthd.sock")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as left:
        left.bind(path)
    server = ControlServer(path, lambda *_: {}, time.monotonic)
    server.open()
    server.close()
    assert not os.path.exists(path)


def asked_by_root(served: Served, request: dict[str, Any]) -> dict[str, Any]:
    """Return the answer that the real client gets as root, while the server runs."""
    with ThreadPoolExecutor(1) as threads:
        answer = threads.submit(send_request, os.path.dirname(served.path), request, 60.0)
        served.until(answer.done)
        return answer.result()


def client_of(uid: int, path: str, patience_seconds: float) -> int:
    """Run the real client as this user. Its answer can be read from the returned descriptor."""

    def tell(writing: int) -> None:
        try:
            said = str(send_request(os.path.dirname(path), {"command": "status"}, patience_seconds))
        except (DaemonUnreachable, RefusedByDaemon) as error:
            said = f"{type(error).__name__}: {error}"
        os.write(writing, said.encode())

    return told_by(uid, tell)


def told_by_the_client(served: Served, uid: int, patience_seconds: float) -> str:
    said = client_of(uid, served.path, patience_seconds)
    served.until(lambda: bool(select.select([said], [], [], 0)[0]))
    words = os.read(said, 4096).decode()
    os.close(said)
    return words


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> float:
    """Raise the client timeout, so that it does not expire before the test ends on a busy machine."""
    seconds = 500.0
    monkeypatch.setattr(control_server, "CLIENT_TIMEOUT_SECONDS", seconds)
    return seconds


def users_of(served: Served) -> Counter[int]:
    return Counter(client.uid for client in served.server._clients)


@only_root
@pytest.mark.parametrize("command", ["status", "pause", "job-ended"])
def test_eighty_connections_of_nobody_do_not_lock_root_out(patient: float, served: Served, command: str) -> None:
    with crowd(NOBODY, served.path, 80) as taken:
        came = 0

        def all_came() -> bool:
            nonlocal came
            came += len(os.read(taken, 100)) if select.select([taken], [], [], 0)[0] else 0
            return came == 80

        served.until(all_came)
        began = time.monotonic()
        assert asked_by_root(served, {"command": command}) == {"done": "yes"}
        assert time.monotonic() - began < patient, "no client had to time out first"
        assert users_of(served) == {NOBODY: MAX_CLIENTS_PER_USER}


@only_root
def test_all_other_users_together_leave_places_for_root_and_who_has_none_is_told_so(
    patient: float, served: Served
) -> None:
    with ExitStack() as crowds:
        for uid in range(2000, 2005):
            crowds.enter_context(crowd(uid, served.path, MAX_CLIENTS_PER_USER))
        served.until(lambda: len(served.server._clients) == MAX_UNPRIVILEGED_CLIENTS)
        answer = as_user(NOBODY, served.path, b"{}\n")
        served.until(lambda: bool(select.select([answer], [], [], 0)[0]))
        assert json.loads(os.read(answer, 4096)) == {
            "error": "too many connections of this user are open",
            "again": True,
        }
        os.close(answer)
        streams = [served.client() for _ in range(MAX_CLIENTS - MAX_UNPRIVILEGED_CLIENTS)]
        served.until(lambda: len(served.server._clients) == MAX_CLIENTS)
        assert max((count, uid) for uid, count in users_of(served).items() if uid)[0] == MAX_CLIENTS_PER_USER
        for stream in streams:
            stream.close()


@only_root
def test_who_has_no_place_is_told_why_and_gets_in_when_one_is_free(patient: float, served: Served) -> None:
    """Run the real client as that user several times: sometimes it has sent its request when it is refused."""
    with crowd(NOBODY, served.path, MAX_CLIENTS_PER_USER):
        served.until(lambda: users_of(served)[NOBODY] == MAX_CLIENTS_PER_USER)
        for _ in range(4):
            said = told_by_the_client(served, NOBODY, patience_seconds=3.0)
            assert said == "RefusedByDaemon: too many connections of this user are open"
        waiting = client_of(NOBODY, served.path, patience_seconds=60)
        served.ahead = patient + 0.1  # the other clients time out
        served.until(lambda: bool(select.select([waiting], [], [], 0)[0]), seconds=60)
        assert os.read(waiting, 4096) == b"{'done': 'yes'}"
        os.close(waiting)


@only_root
def test_one_user_more_or_less_at_his_limit(patient: float, served: Served) -> None:
    with crowd(NOBODY, served.path, MAX_CLIENTS_PER_USER - 1):
        served.until(lambda: users_of(served)[NOBODY] == MAX_CLIENTS_PER_USER - 1)
        answer = as_user(NOBODY, served.path, b"{}\n")
        served.until(lambda: bool(select.select([answer], [], [], 0)[0]))
        assert json.loads(os.read(answer, 4096)) == {"done": "yes"}, "this user still had one place"
        os.close(answer)
        with crowd(NOBODY, served.path, 2), crowd(2000, served.path, 1):
            served.until(lambda: users_of(served) == {NOBODY: MAX_CLIENTS_PER_USER, 2000: 1})


@only_root
def test_who_connects_in_a_loop_does_not_keep_the_daemon_busy(served: Served) -> None:
    with crowd(NOBODY, served.path, 100_000):
        served.until(lambda: users_of(served)[NOBODY] == MAX_CLIENTS_PER_USER)
        end = time.monotonic() + 1.0
        wakes = served.until(lambda: time.monotonic() > end)
        assert wakes < 1.0 / ACCEPT_PAUSE_SECONDS * (MAX_CLIENTS_PER_USER + 4), "each accepted client may wake it"
        assert asked_by_root(served, {"command": "status"}) == {"done": "yes"}


def test_the_client_waits_for_a_place_in_a_full_queue() -> None:
    with tempfile.TemporaryDirectory(prefix="healthd.") as directory, ThreadPoolExecutor(1) as threads:
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        listener.bind(f"{directory}/healthd.sock")
        listener.listen(0)
        first = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        first.connect(f"{directory}/healthd.sock")
        answer = threads.submit(send_request, directory, {"command": "status"}, 60.0)
        time.sleep(0.2)
        assert not answer.done(), "the queue is full, and the client retries"
        for said in (b"", b'{"done": "yes"}\n'):
            with listener.accept()[0] as stream:
                stream.sendall(said)
                stream.shutdown(socket.SHUT_WR)
                answer.exception(60) if said else None
        assert answer.result() == {"done": "yes"}
        first.close()
        listener.close()


def test_the_client_gives_up_on_a_queue_that_stays_full(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        listener.bind(str(tmp_path / "healthd.sock"))
        listener.listen(0)
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as first:
            first.connect(str(tmp_path / "healthd.sock"))
            with pytest.raises(DaemonUnreachable, match=r"no connection within 0.1 s"):
                send_request(str(tmp_path), {"command": "status"}, 0.1)


@only_root
def test_another_user_may_ask_but_is_known_as_one_who_may_not_command(served: Served) -> None:
    answer = as_user(NOBODY, served.path, b'{"command": "pause"}\n')
    served.until(lambda: bool(select.select([answer], [], [], 0)[0]))
    assert json.loads(os.read(answer, 4096)) == {"done": "yes"}
    os.close(answer)
    ((_, who, may),) = served.asked
    assert str(NOBODY) in who
    assert not may


def test_a_request_on_which_healthd_fails_gets_an_answer_and_costs_no_other_client(tmp_path: Path) -> None:
    path = str(tmp_path / "s")

    def fails(request: dict[str, Any], *_: object) -> dict[str, Any]:
        return {"done": 1 / request["by"], "cannot be sent": {1, 2} if request["by"] == 7 else 0}

    server = ControlServer(path, fails, time.monotonic)
    server.open()
    mistake = "internal error in healthd with this request: "
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
