"""Shortage of threads, processes or descriptors: counted and reported, without an endless loop or end of the daemon."""

from __future__ import annotations

import errno
import gc
import os
import select
import socket
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from fakes import PLAIN_SNAPSHOT as PLAIN
from waiting import until

from healthd.agent.control.server import ControlServer
from healthd.agent.metrics.http_server import Pages, serve
from healthd.agent.metrics.publisher import Publisher
from healthd.agent.settings.config import Settings
from healthd.host import shortage
from healthd.host.child_process import Child
from healthd.host.shortage import DESCRIPTORS, PROCESSES, REPORT_SECONDS, THREADS, SpareDescriptor


@pytest.fixture(autouse=True)
def reset_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shortage, "counts", type(shortage.counts)())
    monkeypatch.setattr(shortage, "_last", {})


@pytest.fixture
def listener(tmp_path: Path) -> Iterator[socket.socket]:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as made:
        made.bind(str(tmp_path / "listener"))
        made.listen(128)
        made.setblocking(False)
        yield made


def connected(path: str) -> socket.socket:
    stream = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    stream.connect(path)
    stream.settimeout(120)
    return stream


def failing(number: int) -> Callable[..., Any]:
    def fail(*_: object, **__: object) -> Any:
        raise OSError(number, os.strerror(number))

    return fail


def no_thread(_: threading.Thread) -> None:
    raise RuntimeError("can't start new thread")


def test_spare_descriptor_closes_all_waiting_connections(listener: socket.socket) -> None:
    spare = SpareDescriptor()
    clients = [connected(listener.getsockname()) for _ in range(5)]
    spare.shed(listener, b"no room\n")
    for client in clients:
        assert client.recv(64) == b"no room\n"
        assert client.recv(64) == b""
        client.close()
    assert not select.select([listener], [], [], 0)[0], "no connection waits any more, so the loop sleeps"
    assert shortage.counts[DESCRIPTORS] == 1
    spare.shed(listener)
    spare.close()


def test_problems_reports_shortage_for_a_limited_time(monkeypatch: pytest.MonkeyPatch) -> None:
    shortage.record(THREADS)
    recorded_at = time.time()
    assert len(list(shortage.problems(recorded_at))) == 1
    assert list(shortage.problems(recorded_at + REPORT_SECONDS + 1)) == []


@pytest.mark.parametrize(
    ("number", "resource"),
    [
        (errno.EAGAIN, PROCESSES),
        (errno.ENOMEM, PROCESSES),
        (errno.EMFILE, DESCRIPTORS),
        (errno.ENFILE, DESCRIPTORS),
        (errno.ENOENT, None),
    ],
)
def test_child_records_shortage_if_it_cannot_start(
    monkeypatch: pytest.MonkeyPatch, number: int, resource: str | None
) -> None:
    monkeypatch.setattr("subprocess.Popen", failing(number))
    with pytest.raises(OSError, match=os.strerror(number)):
        Child(("true",), time.monotonic() + 60, time.monotonic)
    assert dict(shortage.counts) == ({resource: 1} if resource else {})


def test_child_without_pidfd_is_monitored_by_its_pipes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "pidfd_open", failing(errno.EMFILE))
    started = Child(("echo", "done"), time.monotonic() + 120, time.monotonic)
    while not started.step():
        ready = select.poll()
        for descriptor, _ in started.waits():
            ready.register(descriptor, select.POLLIN)
        ready.poll(20)
    assert (started.status, started.output()[0].strip()) == (0, b"done")


def test_control_server_without_descriptors_closes_connection_and_pauses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = str(tmp_path / "healthd.sock")
    server = ControlServer(path, lambda request, peer, allowed: {"done": "yes"}, time.monotonic)
    server.open()
    client = connected(path)
    client.sendall(b'{"command": "status"}\n')
    with monkeypatch.context() as patched:
        patched.setattr(type(server._listener), "accept", once(failing(errno.EMFILE), socket.socket.accept))
        server.step()
    assert b'"again": true' in client.recv(4096)
    assert shortage.counts[DESCRIPTORS] == 1
    assert server._listener.fileno() not in [descriptor for descriptor, _ in server.waits()], "the listener pauses"
    assert server.deadline > time.monotonic() - 1
    client.close()
    server.close()


def once(first: Callable[..., Any], second: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that calls `first` the first time and `second` afterwards."""
    calls = iter([first])
    return lambda *args: next(calls, second)(*args)


def test_metrics_page_works_after_accept_without_descriptors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shortage, "ACCEPT_PAUSE_SECONDS", 0.01)
    port, stop = serve(("127.0.0.1", 0), Pages(lambda: PLAIN))
    try:
        with monkeypatch.context() as patched:
            patched.setattr(socket.socket, "accept", once(failing(errno.EMFILE), socket.socket.accept))
            with pytest.raises(OSError):  # noqa: PT011 -- refused, reset or closed
                urllib.request.urlopen(f"http://127.0.0.1:{port}/-/healthy", timeout=120)
        assert shortage.counts[DESCRIPTORS] == 1
        until(lambda: is_served(port), "the page is served again")
    finally:
        stop()


def is_served(port: int) -> bool:
    """Return False if the connection is still closed."""
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/-/healthy", timeout=120) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False


def test_metrics_page_that_cannot_listen_leaves_no_descriptor_open(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("socketserver.socket.socket", failing(errno.EAFNOSUPPORT))
    gc.collect()  # closes descriptors that earlier tests left to the garbage collector
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(5):
        with pytest.raises(OSError, match="cannot listen on"):
            serve(("::1", 0), Pages(lambda: PLAIN))
    assert len(os.listdir("/proc/self/fd")) == before


def test_metrics_page_works_after_clients_without_a_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    port, stop = serve(("127.0.0.1", 0), Pages(lambda: PLAIN))
    try:
        with monkeypatch.context() as patched:
            patched.setattr(threading.Thread, "start", no_thread)
            for _ in range(40):  # more than may be served at the same time
                with pytest.raises(OSError):  # noqa: PT011
                    urllib.request.urlopen(f"http://127.0.0.1:{port}/-/healthy", timeout=120)
        assert shortage.counts[THREADS] == 40
        assert urllib.request.urlopen(f"http://127.0.0.1:{port}/-/healthy", timeout=120).status == 200
    finally:
        stop()


@pytest.fixture
def publisher(tmp_path: Path) -> Iterator[Publisher]:
    config = Settings(runtime_dir=str(tmp_path))
    metrics = type(config.metrics)(listen="127.0.0.1:0")
    made = Publisher(type(config)(runtime_dir=str(tmp_path), metrics=metrics))
    made.snapshot = PLAIN
    yield made
    made.close()


def test_publisher_serves_metrics_once_a_thread_can_be_started(
    publisher: Publisher, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", no_thread)
        publisher.serve_metrics()
    assert shortage.counts[THREADS] == 1
    publisher.serve_metrics()
    assert publisher.metrics_problems == ()
    assert not publisher._unserved_addresses()


def test_publisher_reports_page_whose_listener_gets_no_thread(
    publisher: Publisher, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The thread that reads the files starts, the listener thread does not."""
    start = threading.Thread.start

    def all_but_the_listener(thread: threading.Thread) -> None:
        no_thread(thread) if thread.name == "metrics" else start(thread)

    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", all_but_the_listener)
        publisher.serve_metrics()
    (problem,) = publisher.metrics_problems
    assert "no thread" in problem
    publisher.serve_metrics()
    assert publisher.metrics_problems == ()


def test_publisher_starts_no_thread_once_its_page_is_served(
    publisher: Publisher, monkeypatch: pytest.MonkeyPatch
) -> None:
    publisher.serve_metrics()
    monkeypatch.setattr(threading.Thread, "start", no_thread)
    publisher.serve_metrics()
    assert shortage.counts == {}
