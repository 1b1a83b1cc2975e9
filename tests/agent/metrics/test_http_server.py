"""Tests of the metrics page over HTTP with real clients: slow, silent, many, hostile, and Prometheus' own."""

from __future__ import annotations

import functools
import gzip
import html
import logging
import os
import re
import select
import socket
import threading
import time
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from typing import Any

import pytest
from fakes import PLAIN_SNAPSHOT as PLAIN
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace
from prometheus_client.exposition import choose_encoder
from prometheus_client.openmetrics.parser import text_string_to_metric_families as read_openmetrics

from healthd.agent.metrics import families as metrics
from healthd.agent.metrics import http_server
from healthd.agent.metrics.exposition import END, Metric, text
from healthd.agent.metrics.families import render
from healthd.agent.metrics.http_server import CLIENTS, MAX_HEAD_BYTES, Pages, serve
from healthd.agent.reporting.status import Snapshot, status_json
from healthd.common import guard
from healthd.common.model import (
    Clears,
    Condition,
    ConditionState,
    Health,
    KernelLogStatus,
    Severity,
    SlurmStatus,
    Verdict,
)


@pytest.fixture
def page() -> Iterator[str]:
    port, stop = serve(("127.0.0.1", 0), Pages(lambda: PLAIN))
    yield f"http://127.0.0.1:{port}"
    stop()


def get(url: str, **headers: str) -> tuple[str, bytes]:
    with urllib.request.urlopen(urllib.request.Request(url, headers=headers), timeout=240) as answer:
        return answer.headers["Content-Type"], answer.read()


@functools.cache
def permanent_page() -> str:
    return f"http://127.0.0.1:{serve(('127.0.0.1', 0), Pages(lambda: PLAIN))[0]}"


def client(page: str, data: bytes = b"") -> socket.socket:
    stream = socket.create_connection(("127.0.0.1", int(page.rpartition(":")[2])), timeout=240)
    stream.sendall(data)
    return stream


def read_all(stream: socket.socket) -> bytes:
    """Read until the connection is closed or reset."""
    answer = b""
    with suppress(ConnectionError):
        while chunk := stream.recv(1 << 16):
            answer += chunk
    return answer


def is_closed(stream: socket.socket) -> bool:
    return read_all(stream) == b""


def still_open(streams: list[socket.socket]) -> list[socket.socket]:
    closed_streams, _, _ = select.select(streams, [], [], 0.3)
    return [stream for stream in streams if stream not in closed_streams]


def test_scrape_returns_page(page: str) -> None:
    content_type, body = get(f"{page}/metrics")
    assert content_type.startswith("text/plain; version=")
    assert body == render(PLAIN)


def test_scrape_returns_openmetrics_on_request(page: str) -> None:
    content_type, body = get(f"{page}/metrics", Accept="application/openmetrics-text; version=1.0.0")
    assert content_type.startswith("application/openmetrics-text")
    assert body.endswith(b"# EOF\n")


def send(page: str, request: str) -> tuple[str, dict[str, str], str]:
    """Send a request without headers and return (status line, headers, body) of the answer."""
    with client(page, f"{request} HTTP/1.0\r\n\r\n".encode()) as stream:
        head_text, _, body = read_all(stream).decode().partition("\r\n\r\n")
    status, *headers = head_text.split("\r\n")
    return status, {name: value for name, _, value in (header.partition(": ") for header in headers)}, body


@pytest.mark.parametrize(
    ("request_line", "status", "expected_text"),
    [
        ("GET /", "200 OK", "healthd on n1"),
        ("GET /?x=1", "200 OK", "version 0.1.0, mode observe"),
        ("GET /-/healthy", "200 OK", "healthd is running."),
        ("GET /etc/passwd", "404 Not Found", "Pages: / and /metrics and /-/healthy."),
        ("GET /metrics/", "404 Not Found", "Pages: "),
        ("POST /metrics", "405 Method Not Allowed", "Only GET and HEAD."),
        ("DELETE /", "405 Method Not Allowed", "Only GET and HEAD."),
    ],
)
def test_server_answers_each_path_with_correct_status(
    page: str, request_line: str, status: str, expected_text: str
) -> None:
    line, headers, body = send(page, request_line)
    assert line == f"HTTP/1.0 {status}"
    assert expected_text in body
    assert headers["Server"] == "healthd"
    assert headers["Content-Length"] == str(len(body.encode()))
    assert headers.get("Allow") == ("GET, HEAD" if status.startswith("405") else None)


@pytest.mark.parametrize("path", ["/", "/metrics", "/-/healthy", "/nothing"])
def test_head_returns_same_headers_as_get(page: str, path: str) -> None:
    line, headers, body = send(page, f"HEAD {path}")
    get_answer = send(page, f"GET {path}")
    del headers["Date"], get_answer[1]["Date"]
    assert (line, headers, body) == (*get_answer[:2], "")


def test_healthy_page_says_unhealthy_for_broken_node() -> None:
    fault = Condition(
        "gpu_xid", "", "gpu_xid/79", "0000:61:00.0", Severity.CRITICAL, "GPU <fell> off the bus", Clears.REBOOT,
        ConditionState.OPEN, 1.0, 1.0, 1, "b",
    )  # fmt: skip
    broken_node = replace(PLAIN, verdict=Verdict(Health.UNHEALTHY, (fault,), (fault,)))
    pages = Pages(lambda: broken_node)
    health_page, landing = pages.answer("/-/healthy", "", False), pages.answer("/", "", False).body.decode()
    assert health_page.status == 200, "the agent is running"
    assert b"unhealthy" in health_page.body
    assert b"healthd is healthy" not in health_page.body
    assert "<strong>unhealthy</strong>" in landing
    assert "critical: gpu_xid/79 0000:61:00.0: GPU &lt;fell&gt; off the bus" in landing


@pytest.mark.parametrize(
    "change",
    [
        {"kernel_log": KernelLogStatus("kmsg", False, problem="permission denied")},
        {"mode": "drain", "slurm": SlurmStatus(problem="scontrol: not installed <here>")},
    ],
)
def test_limited_healthd_is_shown_as_warning(change: dict[str, Any]) -> None:
    healthy = replace(
        PLAIN, verdict=Verdict(Health.HEALTHY, (), ()), kernel_log=KernelLogStatus("kmsg", True), mode="observe"
    )
    limited = replace(healthy, **change)
    for snapshot, health in ((healthy, "healthy"), (limited, "warning")):
        status = status_json(snapshot)
        pages = Pages(lambda snapshot=snapshot: snapshot)
        landing = pages.answer("/", "", False).body.decode()
        assert status["health"] == health
        assert f"Health of the node: {health} ".encode() in pages.answer("/-/healthy", "", False).body
        assert f"<strong>{health}</strong>" in landing
        assert all(f"<li>{html.escape(limit)}</li>" in landing for limit in status["limits"])


def test_landing_page_links_work_and_names_are_escaped(page: str) -> None:
    for path in re.findall('href="([^"]+)"', send(page, "GET /")[2]):
        assert send(page, f"GET /{path}")[0] == "HTTP/1.0 200 OK"
    port, stop = serve(("127.0.0.1", 0), Pages(lambda: replace(PLAIN, node_name="<script>x</script>")))
    body = send(f"http://127.0.0.1:{port}", "GET /")[2]
    stop()
    assert "<script>" not in body
    assert "&lt;script&gt;" in body


def test_each_address_has_own_client_limit() -> None:
    """Many clients of one address take no place on another."""
    pages = Pages(lambda: PLAIN)
    (crowded_port, stop), (free_port, stop_free) = (serve(("127.0.0.1", 0), pages) for _ in range(2))
    with ExitStack() as crowd:
        silent_client = crowd.enter_context(client(f"http://127.0.0.1:{free_port}"))
        for _ in range(2 * CLIENTS):
            crowd.enter_context(client(f"http://127.0.0.1:{crowded_port}", b"GET /metr"))
        assert get(f"http://127.0.0.1:{crowded_port}/metrics")[1] == render(PLAIN)
        assert get(f"http://127.0.0.1:{free_port}/metrics")[1] == render(PLAIN)
        assert still_open([silent_client]) == [silent_client]
    stop()
    stop_free()


def test_silent_client_blocks_neither_others_nor_stop(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_server, "CLIENT_SECONDS", 300.0)
    port, stop = serve(("127.0.0.1", 0), Pages(lambda: PLAIN))
    with socket.create_connection(("127.0.0.1", port)):
        get(f"http://127.0.0.1:{port}/metrics")
        started = time.monotonic()
        stop()
        assert time.monotonic() - started < 150
    with pytest.raises(OSError, match="refused"):
        socket.create_connection(("127.0.0.1", port), timeout=240)


def test_scrape_succeeds_beside_many_slow_clients(page: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each client sends a byte now and then, so a timeout for each read would never end it."""
    monkeypatch.setattr(http_server, "CLIENT_SECONDS", 300.0)
    with ExitStack() as crowd:
        slow = [crowd.enter_context(client(page, b"GET /metr")) for _ in range(200)]
        for _ in range(10):
            for stream in slow:
                with suppress(OSError):  # the server closed it
                    stream.send(b"x")
            started = time.monotonic()
            assert get(f"{page}/metrics")[1] == render(PLAIN)
            assert time.monotonic() - started < 150


def test_oldest_client_without_request_is_closed_first() -> None:
    release, requested = threading.Event(), threading.Event()

    def render_slowly() -> Snapshot:
        requested.set()
        release.wait(120)
        return PLAIN

    port, stop = serve(("127.0.0.1", 0), Pages(render_slowly))
    page = f"http://127.0.0.1:{port}"
    with ExitStack() as crowd:
        scrape = crowd.enter_context(client(page, b"GET /metrics HTTP/1.0\r\n\r\n"))
        assert requested.wait(60)
        silent_clients = [crowd.enter_context(client(page)) for _ in range(CLIENTS - 1)]
        assert still_open(silent_clients) == silent_clients, "all of these have a place"
        late_client = crowd.enter_context(client(page))
        assert is_closed(silent_clients[0]), "the oldest client without a request"
        assert still_open([*silent_clients[1:], late_client]) == [*silent_clients[1:], late_client]
        release.set()
        assert read_all(scrape).endswith(render(PLAIN)), "older, but it had sent its request"
    stop()


def test_slow_request_is_closed_after_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_server, "CLIENT_SECONDS", 0.5)
    port, stop = serve(("127.0.0.1", 0), Pages(lambda: PLAIN))
    with client(f"http://127.0.0.1:{port}", b"GET /") as stream:
        started = time.monotonic()
        with suppress(OSError):
            while time.monotonic() - started < 120:
                stream.send(b"x")
                time.sleep(0.05)
        assert time.monotonic() - started < 60
    stop()


def test_oversized_request_head_is_closed(page: str) -> None:
    def answer_to(head_bytes: int) -> bytes:
        start = b"GET /metrics HTTP/1.0\r\nX: "
        with client(page, start + b"x" * (head_bytes - len(start) - 4) + b"\r\n\r\n") as stream:
            return read_all(stream)

    assert answer_to(MAX_HEAD_BYTES).endswith(render(PLAIN))
    assert answer_to(MAX_HEAD_BYTES + 1) == b""
    assert get(f"{page}/metrics")[1] == render(PLAIN)


@pytest.mark.parametrize(
    "accept",
    [
        "application/openmetrics-text; version=abc",
        "application/openmetrics-text; version",
        "text/plain; version=\x1b[2J",
        "application/openmetrics-text; escaping",
        "," * 5000,
        "\xff\xfe",
    ],
)
def test_invalid_accept_header_returns_plain_page(page: str, caplog: pytest.LogCaptureFixture, accept: str) -> None:
    request = f"GET /metrics HTTP/1.0\r\nAccept: {accept}\r\n\r\n".encode("latin-1")
    with caplog.at_level(logging.INFO):
        for _ in range(3):
            with client(page, request) as stream:
                answer = read_all(stream)
                assert answer.startswith(b"HTTP/1.0 200 ")
    assert len(caplog.records) <= 1, "logged at most once"
    assert "\x1b" not in caplog.text
    assert "Traceback" not in caplog.text
    assert not guard.dropped


def test_different_invalid_accept_headers_are_logged_once(page: str, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        for number in range(20):
            get(f"{page}/metrics", Accept=f"application/openmetrics-text; version=a{number}")
    (record,) = caplog.records
    assert record.getMessage().endswith("application/openmetrics-text; version=a0")


@given(st.binary(max_size=3000))
@settings(max_examples=60, deadline=None)
def test_server_survives_any_bytes(hostile: bytes) -> None:
    with client(permanent_page(), hostile) as stream:
        stream.shutdown(socket.SHUT_WR)
        read_all(stream)
    assert get(f"{permanent_page()}/metrics")[1] == render(PLAIN)
    assert not guard.dropped


def test_page_is_cached_for_a_second_and_rendered_again_on_change() -> None:
    """If nothing changed, only the process metrics are rendered again."""
    family_calls, process_calls, current = [], [], [PLAIN]
    families, processes = metrics.families, metrics.processes

    def count_families(snapshot: Snapshot) -> list[Metric]:
        family_calls.append(snapshot)
        return families(snapshot)

    def count_processes(snapshot: Snapshot) -> list[Metric]:
        process_calls.append(snapshot)
        return processes(snapshot)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(metrics, "families", count_families)
        patch.setattr(metrics, "processes", count_processes)
        patch.setattr(http_server, "CACHE_SECONDS", float("inf"))
        port, stop = serve(("127.0.0.1", 0), Pages(lambda: current[0]))
        page = f"http://127.0.0.1:{port}/metrics"
        for _ in range(5):
            get(page)
        assert (family_calls, process_calls) == ([PLAIN], [PLAIN])
        current[0] = replace(PLAIN, node_name="n2", mode="act")
        get(page)
        assert (family_calls, process_calls) == ([PLAIN, current[0]], [PLAIN, current[0]])
        patch.setattr(http_server, "CACHE_SECONDS", 0.0)
        for _ in range(3):
            get(page)
        stop()
    assert (family_calls, process_calls) == ([PLAIN, current[0]], [PLAIN] + 4 * [current[0]])


SNAPSHOTS = st.builds(
    lambda number, word, processes: replace(
        PLAIN, workers_started_total=number, commands={word: number}, node_name=word, processes=processes
    ),
    st.integers(0, 3),
    st.text(max_size=5),
    st.sampled_from([{}, {"daemon": (2**40,)}]),  # an ended process, so that its metrics never change
)


@given(st.lists(st.tuples(SNAPSHOTS, st.booleans(), st.booleans()), min_size=1, max_size=12))
@settings(deadline=None)
def test_cached_page_equals_new_page(requests: list[tuple[Snapshot, bool, bool]]) -> None:
    """Each form is requested twice in any order, so that the second answer comes from the cache."""
    current = [PLAIN]
    pages = Pages(lambda: current[0])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(http_server, "CACHE_SECONDS", 0.0)
        for snapshot, openmetrics, zipped in (repeated for request in requests for repeated in (request, request)):
            current[0] = snapshot
            answer = pages.answer("/metrics", http_server.OPENMETRICS if openmetrics else "", zipped)
            body = gzip.decompress(answer.body) if zipped else answer.body
            if openmetrics:
                families = [*metrics.families(snapshot), *metrics.processes(snapshot)]
                assert body.decode() == text(families, openmetrics=True) + END
                assert list(read_openmetrics(body.decode()))
            else:
                assert body == render(snapshot)


def test_process_metrics_are_read_for_each_page(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(http_server, "CACHE_SECONDS", 0.0)
    snapshot = replace(PLAIN, processes={"daemon": (os.getpid(),)})
    pages = Pages(lambda: snapshot)

    def cpu_seconds(zipped: bool) -> float:
        body = pages.answer("/metrics", "", zipped).body
        text = (gzip.decompress(body) if zipped else body).decode()
        match = re.search(r'^healthd_process_cpu_seconds_total\{process="daemon"\} (.*)$', text, re.MULTILINE)
        assert match
        return float(match[1])

    for zipped in (False, True):
        first_value = cpu_seconds(zipped)
        cpu_start = time.process_time()
        while time.process_time() < cpu_start + 0.05:  # a few ticks of the kernel's clock
            pass
        assert cpu_seconds(zipped) > first_value


@pytest.mark.parametrize(
    ("accept", "openmetrics"),
    [
        ("", False),
        ("*/*", False),
        ("text/html,application/xhtml+xml,application/xml;q=0.9,*/*;q=0.8", False),
        ("application/openmetrics-text", True),
        ("application/openmetrics-text; version=1.0.0; charset=utf-8", True),
        ("application/openmetrics-text;version=1.0.0;escaping=allow-utf-8;q=0.5,text/plain;version=0.0.4;q=0.2", True),
        ("application/openmetrics-text;version=0.0.1;q=0.75,text/plain;version=0.0.4;q=0.5,*/*;q=0.1", False),
        ("application/openmetrics-text;version=0.0.1,application/openmetrics-text;version=1.0.0", True),
        ("text/plain;version=1.0.0;escaping=allow-utf-8,application/openmetrics-text;version=1.0.0", False),
        ("text/plain;version=0.0.4,application/openmetrics-text;version=1.0.0", True),
    ],
)
def test_choose_encoder_follows_accept_header(accept: str, openmetrics: bool) -> None:
    """prometheus-client chooses the same way."""
    assert choose_encoder(accept)[1].startswith(http_server.OPENMETRICS) is openmetrics
    answer = Pages(lambda: PLAIN).answer("/metrics", accept, zipped=False)
    assert answer.content_type.startswith(http_server.OPENMETRICS if openmetrics else "text/plain; version=0.0.4")
    assert answer.body.endswith(b"# EOF\n") is openmetrics


def test_gzip_is_sent_on_request(page: str) -> None:
    with urllib.request.urlopen(
        urllib.request.Request(f"{page}/metrics", headers={"Accept-Encoding": "gzip"}), timeout=240
    ) as answer:
        assert answer.headers["Content-Encoding"] == "gzip"
        assert gzip.decompress(answer.read()) == render(PLAIN)


def test_serve_reports_port_in_use(page: str) -> None:
    port = int(page.rpartition(":")[2])
    with pytest.raises(OSError, match=rf"metrics.listen: cannot listen on 127.0.0.1:{port}: Address already in use"):
        serve(("127.0.0.1", port), Pages(lambda: PLAIN))


def test_error_in_page_is_logged_in_single_line(caplog: pytest.LogCaptureFixture) -> None:
    def fail() -> Snapshot:
        raise RuntimeError("dictionary changed size during iteration")

    port, stop = serve(("127.0.0.1", 0), Pages(fail))
    with caplog.at_level(logging.ERROR), pytest.raises(ConnectionError):
        get(f"http://127.0.0.1:{port}/metrics")
    stop()
    assert [record.message.count("\n") for record in caplog.records] == [0]
    assert "dictionary changed size" in caplog.text
