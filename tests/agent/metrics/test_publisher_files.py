"""Tests of the publisher while the mount with the web configuration or a certificate hangs."""

from __future__ import annotations

import logging
import threading
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from fakes import PLAIN_SNAPSHOT as PLAIN
from waiting import until

from healthd.agent.metrics import certificates, publisher
from healthd.agent.metrics.publisher import Publisher
from healthd.agent.settings.config import MetricsConfig, Settings

pytestmark = pytest.mark.one_python  # PyYAML comes with healthd[web]


@contextmanager
def hung_files(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Make stat(2) of the files hang."""
    resume, stamp = threading.Event(), certificates._stamp

    def hang(path: str) -> certificates.Stamp | None:
        resume.wait(600)
        return stamp(path)

    with monkeypatch.context() as patch:
        patch.setattr(certificates, "_stamp", hang)
        patch.setattr(publisher, "FILES_TIMEOUT_SECONDS", 0.1)
        patch.setattr(certificates, "HUNG_SECONDS", 0.1)
        yield
        resume.set()


def make_publisher(tmp_path: Path, listen: str) -> Publisher:
    path = tmp_path / "web.yml"
    path.write_text("http_server_config: {headers: {X-Frame-Options: deny}}\n")
    new_publisher = Publisher(Settings(metrics=MetricsConfig(listen=listen, web_config=str(path))))
    new_publisher.snapshot = PLAIN
    return new_publisher


def test_hung_mount_at_start_delays_page_and_not_daemon(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page_publisher = make_publisher(tmp_path, "127.0.0.1:0")
    with hung_files(monkeypatch):
        for _ in range(3):
            page_publisher.serve_metrics()
            assert "web.yml: no answer; the file" in page_publisher.web_problem
        assert sum(thread.name == "metrics files" for thread in threading.enumerate()) == 1

    def is_served() -> bool:
        page_publisher.serve_metrics()
        return page_publisher.web_problem == "" and bool(page_publisher._stop_metrics)

    until(is_served, "the mount works again", 60)
    page_publisher.close()


def test_hung_mount_while_serving_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    page_publisher = make_publisher(tmp_path, "127.0.0.1:0")
    with caplog.at_level(logging.INFO):
        page_publisher.serve_metrics()
    assert page_publisher.web_problem == ""
    url = caplog.messages[-1].removeprefix("metrics on ").replace("/metrics", "/-/healthy")
    with hung_files(monkeypatch):
        page_publisher.serve_metrics()
        assert "no answer" in page_publisher.web_problem
        with urllib.request.urlopen(url, timeout=240) as answer:
            assert answer.status == 200

    def is_resolved() -> bool:
        page_publisher.serve_metrics()
        return page_publisher.web_problem == ""

    until(is_resolved, "the mount works again", 60)
    page_publisher.close()


def test_ipv6_address_is_logged_in_brackets(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    page_publisher = make_publisher(tmp_path, "[::1]:0")
    with caplog.at_level(logging.INFO):
        page_publisher.serve_metrics()
    assert "metrics on http://[::1]:" in caplog.text
    page_publisher.close()
