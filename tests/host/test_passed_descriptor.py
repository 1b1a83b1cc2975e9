"""Files that clients pass to healthd's sockets on a kernel that cannot refuse them (before Linux 6.16)."""

from __future__ import annotations

import os
import signal
import socket
import struct
import time
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest

from healthd.agent.control.server import ControlServer
from healthd.failslow.live.receiver import Receiver
from healthd.host import passed_descriptor, wakeup

LINGERS_SECONDS = 600
FILES = 20


@pytest.fixture(autouse=True)
def old_kernel(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Use a socket option that no kernel has, and restore the SIGALRM handler of this process."""
    monkeypatch.setattr(passed_descriptor, "SO_PASSRIGHTS", 9999)
    before, timer = signal.getsignal(signal.SIGALRM), signal.setitimer(signal.ITIMER_REAL, 0)
    yield
    assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)
    signal.signal(signal.SIGALRM, before)
    signal.setitimer(signal.ITIMER_REAL, *timer)


@pytest.fixture
def hand_over() -> Iterator[object]:
    """Return hand_over(stream, data), which passes files that only the receiver keeps open and that linger at close."""
    with ExitStack() as peers:

        def send(stream: socket.socket, data: bytes) -> None:
            files = []
            for _ in range(FILES):
                with socket.create_server(("127.0.0.1", 0)) as listening:
                    listening.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
                    file = socket.create_connection(listening.getsockname())
                    peers.enter_context(listening.accept()[0])  # never reads
                file.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, LINGERS_SECONDS))
                file.setblocking(False)
                with suppress(BlockingIOError):
                    while True:
                        file.send(bytes(1 << 16))
                file.setblocking(True)
                files.append(file)
            socket.send_fds(stream, [data], [file.fileno() for file in files])
            for file in files:
                file.close()  # the message keeps it open: this does not close it

        yield send


def connected(path: str, kind: int) -> socket.socket:
    stream = socket.socket(socket.AF_UNIX, kind)
    stream.connect(path)
    return stream


@pytest.fixture
def time_limit() -> Iterator[None]:
    start = time.monotonic()
    yield
    assert time.monotonic() - start < LINGERS_SECONDS / 2


def test_control_server_answers_request_with_lingering_files_at_once(tmp_path, hand_over, time_limit):
    server = ControlServer(str(tmp_path / "sock"), lambda *_: {"done": "yes"}, time.monotonic)
    server.open()
    with connected(str(tmp_path / "sock"), socket.SOCK_STREAM) as stream:
        hand_over(stream, b'{"command": "status"}\n')
        server.step()
        assert stream.recv(100) == b'{"done": "yes"}\n'
    server.close()


def test_control_server_close_is_not_delayed_by_unread_files(tmp_path, hand_over, time_limit):
    server = ControlServer(str(tmp_path / "sock"), lambda *_: {}, time.monotonic)
    server.open()
    with connected(str(tmp_path / "sock"), socket.SOCK_STREAM) as stream:
        server.step()
        hand_over(stream, b"x")
        server.close()


@pytest.mark.parametrize("in_a_job", [False, True])
def test_receiver_is_not_delayed_by_lingering_files(tmp_path, hand_over, time_limit, in_a_job):
    proc_folder = tmp_path / f"proc/{os.getpid()}"
    proc_folder.mkdir(parents=True)
    if in_a_job:
        Path(proc_folder / "cgroup").write_text("0::/system.slice/slurmstepd.scope/job_7/step_0/user/task_0\n")
    receiver = Receiver(str(tmp_path / "sock"), str(tmp_path), 4, 4)
    with connected(str(tmp_path / "sock"), socket.SOCK_SEQPACKET) as stream:
        hand_over(stream, b"x")
        for step in range(3):
            assert list(receiver.step(float(step))) == []
        dropped = receiver.dropped_counts()
        assert (dropped.malformed, dropped.strangers) == ((1, 0) if in_a_job else (0, 1))
    receiver.close()


def test_alarm_signal_does_not_stop_the_daemon():
    before = [(number, signal.getsignal(number)) for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)]
    try:
        woken = wakeup.wake_on_signals()
        signal.signal(signal.SIGALRM, lambda _number, _frame: None)
        os.kill(os.getpid(), signal.SIGALRM)
        assert wakeup.signals(woken) == b""
        os.kill(os.getpid(), signal.SIGALRM)
        os.kill(os.getpid(), signal.SIGHUP)
        assert wakeup.signals(woken) == bytes([signal.SIGHUP])
    finally:
        os.close(signal.set_wakeup_fd(-1))
        os.close(woken)
        for number, handler in before:
            signal.signal(number, handler)
