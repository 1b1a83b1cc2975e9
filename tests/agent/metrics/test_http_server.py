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
def page_for_good() -> str:
    return f"http://127.0.0.1:{serve(('127.0.0.1', 0), Pages(lambda: PLAIN))[0]}"


def client(page: str, said: bytes = b"") -> socket.socket:
    stream = socket.create_connection(("127.0.0.1", int(page.rpartition(":")[2])), timeout=240)
    stream.sendall(said)
    return stream


def read_all(stream: socket.socket) -> bytes:
    """Read until the connection is closed or reset."""
    answer = b""
    with suppress(ConnectionError):
        while chunk := stream.recv(1 << 16):
            answer += chunk
    return answer


def hung_up(stream: socket.socket) -> bool:
    return read_all(stream) == b""


def still_there(streams: list[socket.socket]) -> list[socket.socket]:
    ended, _, _ = select.select(streams, [], [], 0.3)
    return [stream for stream in streams if stream not in ended]


def test_a_scrape_gets_the_page(page: str) -> None:
    content_type, body = get(f"{page}/metrics")
    assert content_type.startswith("text/plain; version=")
    assert body == render(PLAIN)


def test_a_scrape_may_ask_for_openmetrics(page: str) -> None:
    content_type, body = get(f"{page}/metrics", Accept="application/openmetrics-text; version=1.0.0")
    assert content_type.startswith("application/openmetrics-text")
    assert body.endswith(b"# EOF\n")


def say(page: str, request: str) -> tuple[str, dict[str, str], str]:
    """Send a request without headers and return (status line, headers, body) of the answer."""
    with client(page, f"{request} HTTP/1.0\r\n\r\n".encode()) as stream:
        head, _, body = read_all(stream).decode().partition("\r\n\r\n")
    status, *headers = head.split("\r\n")
    return status, {name: value for name, _, value in (header.partition(": ") for header in headers)}, body


@pytest.mark.parametrize(
    ("request_line", "status", "words"),
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
def test_each_page_answers_as_http_has_it_and_names_no_version_of_python(
    page: str, request_line: str, status: str, words: str
) -> None:
    line, headers, body = say(page, request_line)
    assert line == f"HTTP/1.0 {status}"
    assert words in body
    assert headers["Server"] == "healthd"
    assert headers["Content-Length"] == str(len(body.encode()))
    assert headers.get("Allow") == ("GET, HEAD" if status.startswith("405") else None)


@pytest.mark.parametrize("path", ["/", "/metrics", "/-/healthy", "/nothing"])
def test_head_has_the_headers_of_get_and_no_body(page: str, path: str) -> None:
    line, headers, body = say(page, f"HEAD {path}")
    of_get = say(page, f"GET {path}")
    del headers["Date"], of_get[1]["Date"]
    assert (line, headers, body) == (*of_get[:2], "")


def test_a_broken_node_is_not_called_healthy() -> None:
    fault = Condition(
        "gpu_xid", "", "gpu_xid/79", "0000:61:00.0", Severity.CRITICAL, "GPU <fell> off the bus", Clears.REBOOT,
        ConditionState.OPEN, 1.0, 1.0, 1, "b",
    )  # fmt: skip
    broken = replace(PLAIN, verdict=Verdict(Health.UNHEALTHY, (fault,), (fault,)))
    pages = Pages(lambda: broken)
    alive, landing = pages.answer("/-/healthy", "", False), pages.answer("/", "", False).body.decode()
    assert alive.status == 200, "the agent is running"
    assert b"unhealthy" in alive.body
    assert b"healthd is healthy" not in alive.body
    assert "<strong>unhealthy</strong>" in landing
    assert "critical: gpu_xid/79 0000:61:00.0: GPU &lt;fell&gt; off the bus" in landing


@pytest.mark.parametrize(
    "change",
    [
        {"kernel_log": KernelLogStatus("kmsg", False, problem="permission denied")},
        {"mode": "drain", "slurm": SlurmStatus(problem="scontrol: not installed <here>")},
    ],
)
def test_a_healthy_node_whose_healthd_is_limited_is_a_warning_as_in_status(change: dict[str, Any]) -> None:
    healthy = replace(
        PLAIN, verdict=Verdict(Health.HEALTHY, (), ()), kernel_log=KernelLogStatus("kmsg", True), mode="observe"
    )
    limited = replace(healthy, **change)
    for snapshot, health in ((healthy, "healthy"), (limited, "warning")):
        shown = status_json(snapshot)
        pages = Pages(lambda snapshot=snapshot: snapshot)
        landing = pages.answer("/", "", False).body.decode()
        assert shown["health"] == health
        assert f"Health of the node: {health} ".encode() in pages.answer("/-/healthy", "", False).body
        assert f"<strong>{health}</strong>" in landing
        assert all(f"<li>{html.escape(limit)}</li>" in landing for limit in shown["limits"])


def test_the_first_page_leads_to_the_others_and_takes_no_html_from_a_name(page: str) -> None:
    for path in re.findall('href="([^"]+)"', say(page, "GET /")[2]):
        assert say(page, f"GET /{path}")[0] == "HTTP/1.0 200 OK"
    port, stop = serve(("127.0.0.1", 0), Pages(lambda: replace(PLAIN, node_name="<script>x</script>")))
    body = say(f"http://127.0.0.1:{port}", "GET /")[2]
    stop()
    assert "<script>" not in body
    assert "&lt;script&gt;" in body


def test_each_address_has_its_own_bounds() -> None:
    """Many clients of one address take no place on another."""
    pages = Pages(lambda: PLAIN)
    (crowded, stop), (free, stop_too) = (serve(("127.0.0.1", 0), pages) for _ in range(2))
    with ExitStack() as crowd:
        silent = crowd.enter_context(client(f"http://127.0.0.1:{free}"))
        for _ in range(2 * CLIENTS):
            crowd.enter_context(client(f"http://127.0.0.1:{crowded}", b"GET /metr"))
        assert get(f"http://127.0.0.1:{crowded}/metrics")[1] == render(PLAIN)
        assert get(f"http://127.0.0.1:{free}/metrics")[1] == render(PLAIN)
        assert still_there([silent]) == [silent]
    stop()
    stop_too()


def test_a_client_that_says_nothing_holds_up_neither_others_nor_the_stop(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_server, "CLIENT_SECONDS", 300.0)
    port, stop = serve(("127.0.0.1", 0), Pages(lambda: PLAIN))
    with socket.create_connection(("127.0.0.1", port)):
        get(f"http://127.0.0.1:{port}/metrics")
        began = time.monotonic()
        stop()
        assert time.monotonic() - began < 150
    with pytest.raises(OSError, match="refused"):
        socket.create_connection(("127.0.0.1", port), timeout=240)


def test_a_scrape_gets_through_a_crowd_of_slow_clients_at_once(page: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each client sends a byte now and then, so a timeout for each read would never end it."""
    monkeypatch.setattr(http_server, "CLIENT_SECONDS", 300.0)
    with ExitStack() as crowd:
        slow = [crowd.enter_context(client(page, b"GET /metr")) for _ in range(200)]
        for _ in range(10):
            for stream in slow:
                with suppress(OSError):  # the server closed it
                    stream.send(b"x")
            began = time.monotonic()
            assert get(f"{page}/metrics")[1] == render(PLAIN)
            assert time.monotonic() - began < 150


def test_the_oldest_goes_for_a_new_one_first_of_those_that_have_not_asked() -> None:
    release, asked = threading.Event(), threading.Event()

    def slowly() -> Snapshot:
        asked.set()
        release.wait(120)
        return PLAIN

    port, stop = serve(("127.0.0.1", 0), Pages(slowly))
    page = f"http://127.0.0.1:{port}"
    with ExitStack() as crowd:
        scrape = crowd.enter_context(client(page, b"GET /metrics HTTP/1.0\r\n\r\n"))
        assert asked.wait(60)
        silent = [crowd.enter_context(client(page)) for _ in range(CLIENTS - 1)]
        assert still_there(silent) == silent, "all of these have a place"
        late = crowd.enter_context(client(page))
        assert hung_up(silent[0]), "the oldest client without a request"
        assert still_there([*silent[1:], late]) == [*silent[1:], late]
        release.set()
        assert read_all(scrape).endswith(render(PLAIN)), "older, but it had sent its request"
    stop()


def test_who_drips_is_hung_up_on_when_his_time_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_server, "CLIENT_SECONDS", 0.5)
    port, stop = serve(("127.0.0.1", 0), Pages(lambda: PLAIN))
    with client(f"http://127.0.0.1:{port}", b"GET /") as stream:
        began = time.monotonic()
        with suppress(OSError):
            while time.monotonic() - began < 120:
                stream.send(b"x")
                time.sleep(0.05)
        assert time.monotonic() - began < 60
    stop()


def test_a_request_without_end_is_cut_off_at_its_bound(page: str) -> None:
    def answered(head_bytes: int) -> bytes:
        start = b"GET /metrics HTTP/1.0\r\nX: "
        with client(page, start + b"x" * (head_bytes - len(start) - 4) + b"\r\n\r\n") as stream:
            return read_all(stream)

    assert answered(MAX_HEAD_BYTES).endswith(render(PLAIN))
    assert answered(MAX_HEAD_BYTES + 1) == b""
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
def test_a_bad_accept_gets_the_plain_page_and_is_no_mistake_of_healthds(
    page: str, caplog: pytest.LogCaptureFixture, accept: str
) -> None:
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


def test_different_bad_accepts_are_logged_once(page: str, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        for number in range(20):
            get(f"{page}/metrics", Accept=f"application/openmetrics-text; version=a{number}")
    (record,) = caplog.records
    assert record.getMessage().endswith("application/openmetrics-text; version=a0")


@given(st.binary(max_size=3000))
@settings(max_examples=60, deadline=None)
def test_no_bytes_end_the_page(hostile: bytes) -> None:
    with client(page_for_good(), hostile) as stream:
        stream.shutdown(socket.SHUT_WR)
        read_all(stream)
    assert get(f"{page_for_good()}/metrics")[1] == render(PLAIN)
    assert not guard.dropped


def test_a_page_is_made_once_a_second_however_many_ask_and_anew_when_something_changed() -> None:
    """If nothing changed, only the process metrics are rendered again."""
    made, asked, shown = [], [], [PLAIN]
    families, processes = metrics.families, metrics.processes

    def counted(snapshot: Snapshot) -> list[Metric]:
        made.append(snapshot)
        return families(snapshot)

    def read(snapshot: Snapshot) -> list[Metric]:
        asked.append(snapshot)
        return processes(snapshot)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(metrics, "families", counted)
        patch.setattr(metrics, "processes", read)
        patch.setattr(http_server, "CACHE_SECONDS", float("inf"))
        port, stop = serve(("127.0.0.1", 0), Pages(lambda: shown[0]))
        page = f"http://127.0.0.1:{port}/metrics"
        for _ in range(5):
            get(page)
        assert (made, asked) == ([PLAIN], [PLAIN])
        shown[0] = replace(PLAIN, node_name="n2", mode="act")
        get(page)
        assert (made, asked) == ([PLAIN, shown[0]], [PLAIN, shown[0]])
        patch.setattr(http_server, "CACHE_SECONDS", 0.0)
        for _ in range(3):
            get(page)
        stop()
    assert (made, asked) == ([PLAIN, shown[0]], [PLAIN] + 4 * [shown[0]])


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
def test_a_page_of_kept_parts_is_the_page_made_anew(asked: list[tuple[Snapshot, bool, bool]]) -> None:
    """Each form is requested twice in any order, so that the second answer comes from the cache."""
    shown = [PLAIN]
    pages = Pages(lambda: shown[0])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(http_server, "CACHE_SECONDS", 0.0)
        for snapshot, openmetrics, zipped in (twice for each in asked for twice in (each, each)):
            shown[0] = snapshot
            answer = pages.answer("/metrics", http_server.OPENMETRICS if openmetrics else "", zipped)
            body = gzip.decompress(answer.body) if zipped else answer.body
            if openmetrics:
                families = [*metrics.families(snapshot), *metrics.processes(snapshot)]
                assert body.decode() == text(families, openmetrics=True) + END
                assert list(read_openmetrics(body.decode()))
            else:
                assert body == render(snapshot)


def test_what_healthd_costs_is_read_for_each_page_also_where_nothing_else_changed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(http_server, "CACHE_SECONDS", 0.0)
    snapshot = replace(PLAIN, processes={"daemon": (os.getpid(),)})
    pages = Pages(lambda: snapshot)

    def spent(zipped: bool) -> float:
        body = pages.answer("/metrics", "", zipped).body
        text = (gzip.decompress(body) if zipped else body).decode()
        found = re.search(r'^healthd_process_cpu_seconds_total\{process="daemon"\} (.*)$', text, re.MULTILINE)
        assert found
        return float(found[1])

    for zipped in (False, True):
        before = spent(zipped)
        worked = time.process_time()
        while time.process_time() < worked + 0.05:  # a few ticks of the kernel's clock
            pass
        assert spent(zipped) > before


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
def test_openmetrics_is_given_to_who_offers_to_read_it(accept: str, openmetrics: bool) -> None:
    """prometheus-client chooses the same way."""
    assert choose_encoder(accept)[1].startswith(http_server.OPENMETRICS) is openmetrics
    answer = Pages(lambda: PLAIN).answer("/metrics", accept, zipped=False)
    assert answer.content_type.startswith(http_server.OPENMETRICS if openmetrics else "text/plain; version=0.0.4")
    assert answer.body.endswith(b"# EOF\n") is openmetrics


def test_a_client_that_can_unzip_gets_fewer_bytes_of_the_same_page(page: str) -> None:
    with urllib.request.urlopen(
        urllib.request.Request(f"{page}/metrics", headers={"Accept-Encoding": "gzip"}), timeout=240
    ) as answer:
        assert answer.headers["Content-Encoding"] == "gzip"
        assert gzip.decompress(answer.read()) == render(PLAIN)


def test_a_port_in_use_is_one_sentence(page: str) -> None:
    port = int(page.rpartition(":")[2])
    with pytest.raises(OSError, match=rf"metrics.listen: cannot listen on 127.0.0.1:{port}: Address already in use"):
        serve(("127.0.0.1", port), Pages(lambda: PLAIN))


def test_a_page_that_cannot_be_made_is_said_in_one_line(caplog: pytest.LogCaptureFixture) -> None:
    def broken() -> Snapshot:
        raise RuntimeError("dictionary changed size during iteration")

    port, stop = serve(("127.0.0.1", 0), Pages(broken))
    with caplog.at_level(logging.ERROR), pytest.raises(ConnectionError):
        get(f"http://127.0.0.1:{port}/metrics")
    stop()
    assert [record.message.count("\n") for record in caplog.records] == [0]
    assert "dictionary changed size" in caplog.text
