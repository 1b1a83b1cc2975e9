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
def hung(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Make stat(2) of the files hang."""
    back, stamp = threading.Event(), certificates._stamp

    def hang(path: str) -> certificates.Stamp | None:
        back.wait(600)
        return stamp(path)

    with monkeypatch.context() as patch:
        patch.setattr(certificates, "_stamp", hang)
        patch.setattr(publisher, "FILES_TIMEOUT_SECONDS", 0.1)
        patch.setattr(certificates, "HUNG_SECONDS", 0.1)
        yield
        back.set()


def publishing(tmp_path: Path, listen: str) -> Publisher:
    path = tmp_path / "web.yml"
    path.write_text("http_server_config: {headers: {X-Frame-Options: deny}}\n")
    found = Publisher(Settings(metrics=MetricsConfig(listen=listen, web_config=str(path))))
    found.snapshot = PLAIN
    return found


def test_at_the_start_a_hung_mount_holds_up_the_page_and_not_the_daemon(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shown = publishing(tmp_path, "127.0.0.1:0")
    with hung(monkeypatch):
        for _ in range(3):
            shown.serve_metrics()
            assert "web.yml: no answer; the file" in shown.web_problem
        assert sum(thread.name == "metrics files" for thread in threading.enumerate()) == 1

    def served() -> bool:
        shown.serve_metrics()
        return shown.web_problem == "" and bool(shown._stop_metrics)

    until(served, "the mount works again", 60)
    shown.close()


def test_later_it_holds_up_neither_and_is_a_trouble(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    shown = publishing(tmp_path, "127.0.0.1:0")
    with caplog.at_level(logging.INFO):
        shown.serve_metrics()
    assert shown.web_problem == ""
    url = caplog.messages[-1].removeprefix("metrics on ").replace("/metrics", "/-/healthy")
    with hung(monkeypatch):
        shown.serve_metrics()
        assert "no answer" in shown.web_problem
        with urllib.request.urlopen(url, timeout=240) as answer:
            assert answer.status == 200

    def is_over() -> bool:
        shown.serve_metrics()
        return shown.web_problem == ""

    until(is_over, "the mount works again", 60)
    shown.close()


def test_the_log_has_an_ipv6_address_in_brackets(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    shown = publishing(tmp_path, "[::1]:0")
    with caplog.at_level(logging.INFO):
        shown.serve_metrics()
    assert "metrics on http://[::1]:" in caplog.text
    shown.close()
