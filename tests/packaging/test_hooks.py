"""The example hooks in packaging/hooks, run as programs against a local server, as healthd runs them."""

from __future__ import annotations

import base64
import json
import os
import re
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest

from healthd.agent.hooks.payload import sample
from healthd.agent.hooks.runner import Attempt, run_hook
from healthd.agent.settings.config import HOOKS

pytestmark = pytest.mark.one_python

EXAMPLES = Path(__file__).parents[2] / "packaging/hooks"
PAGE = (Path(__file__).parents[2] / "docs/hooks.md").read_text("utf-8")
SETTINGS_WITH_ADDRESS = {"slack": "SLACK_WEBHOOK_URL", "pagerduty": "PAGERDUTY_URL", "ticket": "TICKET_URL"}
TIME = "2026-11-22T12:11:20.123Z"


class Server:
    """A server that answers each request with `status`, or never if it is 0. `requests` are (headers, document).

    `raw`, if it is not empty, is sent instead of an HTTP answer. A redirect leads to the same server. `searches` are
    (path, query); a search finds the tickets that were created with the label.
    """

    def __init__(self, status: int = 200) -> None:
        self.status, self.raw = status, b""
        self.requests: list[tuple[dict[str, str], dict[str, Any]]] = []
        self.searches: list[tuple[str, dict[str, Any]]] = []
        self._ended = threading.Event()
        server = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                answer = {"key": "HPC-12"}
                if "search" in self.path:
                    answer = server.search(self.path, json.loads(body))
                else:
                    server.requests.append((dict(self.headers), json.loads(body)))
                if not server.status:
                    server._ended.wait(120)
                    return
                if server.raw:
                    self.wfile.write(server.raw)
                    return
                self.send_response(server.status)
                if 300 <= server.status < 400:
                    self.send_header("Location", f"{server.url}/secret")
                self.end_headers()
                self.wfile.write(json.dumps(answer).encode())

            def do_GET(self) -> None:
                server.requests.append((dict(self.headers), {}))
                self.send_response(200)
                self.end_headers()

            def log_message(self, *_: object) -> None:
                pass

        self._http = HTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._http.server_address[1]}/hook"
        self._thread = threading.Thread(target=self._http.serve_forever, kwargs={"poll_interval": 0.05})
        self._thread.start()

    def close(self) -> None:
        self._ended.set()
        self._http.shutdown()
        self._thread.join(120)
        self._http.server_close()

    def search(self, path: str, query: dict[str, Any]) -> dict[str, Any]:
        self.searches.append((path, query))
        labels = [name for document in self.documents for name in document["fields"]["labels"]]
        is_found = any(f'labels = "{name}"' in query["jql"] for name in labels)
        return {"issues": [{"id": "1", "key": "HPC-12"}] if is_found else []}

    @property
    def documents(self) -> list[dict[str, Any]]:
        return [document for _, document in self.requests]


@pytest.fixture
def server() -> Iterator[Server]:
    running = Server()
    yield running
    running.close()


def settings(folder: Path, url: str = "http://127.0.0.1:9/", **extra: str) -> Path:
    values = dict.fromkeys(SETTINGS_WITH_ADDRESS.values(), url)
    values |= {"PAGERDUTY_ROUTING_KEY": "key", "TICKET_TOKEN": "secret", "TICKET_PROJECT": "HPC"}
    values |= {"RMA_FOLDER": str(folder / "rma"), **extra}
    path = folder / "hooks.env"
    path.write_text("# comment\n" + "".join(f"{name}={value}\n" for name, value in values.items()))
    path.chmod(0o600)
    return path


def event(hook: str = "on_drain", **changes: Any) -> dict[str, Any]:
    found = sample(hook, "c1", "gpu-1", TIME)
    del found["test"]
    return {**found, **changes}


def run(name: str, path: Path, document: dict[str, Any], seconds: float = 60.0) -> Attempt:
    """Run an example with the test's interpreter, because healthd is not installed in /opt here."""
    argv = (sys.executable, "-I", str(EXAMPLES / name), "--settings", str(path))
    os.environ["no_proxy"] = "127.0.0.1"
    return run_hook(document["hook"], argv, document, seconds)


@pytest.mark.parametrize("name", sorted(SETTINGS_WITH_ADDRESS))
@pytest.mark.parametrize("hook", HOOKS)
def test_example_sends_each_event(name, hook, tmp_path, server):
    attempt = run(name, settings(tmp_path, server.url), event(hook))
    assert attempt.error == ""
    (document,) = server.documents
    assert "gpu-1" in json.dumps(document)
    assert "gpu_xid/79" in json.dumps(document)


@pytest.mark.parametrize("name", sorted(SETTINGS_WITH_ADDRESS))
def test_rejected_event_is_a_failure_with_status(name, tmp_path, server):
    server.status = 500
    assert "500" in run(name, settings(tmp_path, server.url), event()).error


@pytest.mark.parametrize("name", sorted(SETTINGS_WITH_ADDRESS))
def test_server_that_does_not_answer_is_a_failure(name, tmp_path, server):
    server.status = 0
    began = time.monotonic()
    assert run(name, settings(tmp_path, server.url), event(), seconds=3.0).error
    assert time.monotonic() - began < 60
    assert len(server.requests) + len(server.searches) == 1


@pytest.mark.parametrize("name", sorted(SETTINGS_WITH_ADDRESS))
def test_failure_does_not_print_secret_address(name, tmp_path):
    attempt = run(name, settings(tmp_path, "http://127.0.0.1:9/services/T0/secret"), event())
    assert attempt.error
    assert "secret" not in attempt.error + attempt.output


@pytest.mark.parametrize("status", [300, 301, 302, 303, 304, 307, 308])
@pytest.mark.parametrize("name", sorted(SETTINGS_WITH_ADDRESS))
def test_redirect_is_a_failure_and_not_followed(name, status, tmp_path, server):
    server.status = status
    attempt = run(name, settings(tmp_path, server.url), event())
    assert str(status) in attempt.error
    assert "secret" not in attempt.error + attempt.output
    assert len(server.requests) + len(server.searches) == 1


@pytest.mark.parametrize("raw", [b"garbage\r\n\r\n", b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n99\r\n{"])
@pytest.mark.parametrize("name", sorted(SETTINGS_WITH_ADDRESS))
def test_damaged_answer_is_a_failure_without_secret_address(name, raw, tmp_path, server):
    server.raw = raw
    attempt = run(name, settings(tmp_path, f"{server.url}/secret"), event())
    assert "127.0.0.1" in attempt.error
    assert "secret" not in attempt.error + attempt.output
    assert "Traceback" not in attempt.output


@pytest.mark.parametrize(
    "url", ["http://127.0.0.1:secret/", "http://127.0.0.1/a secret/hook", "secret", "http://[secret/"]
)
@pytest.mark.parametrize("name", sorted(SETTINGS_WITH_ADDRESS))
def test_invalid_address_is_not_printed(name, url, tmp_path):
    attempt = run(name, settings(tmp_path, url), event())
    assert "invalid" in attempt.error
    assert "secret" not in attempt.error + attempt.output


@pytest.mark.parametrize("name", ["pagerduty", "rma", "slack", "ticket"])
def test_example_refuses_settings_that_others_can_read(name, tmp_path, server):
    path = settings(tmp_path, server.url)
    path.chmod(0o644)
    assert "chmod" in run(name, path, event()).error
    assert server.requests == []


@pytest.mark.parametrize(("name", "setting"), sorted(SETTINGS_WITH_ADDRESS.items()))
def test_missing_setting_is_named(name, setting, tmp_path):
    setting = "PAGERDUTY_ROUTING_KEY" if name == "pagerduty" else setting
    assert setting in run(name, settings(tmp_path, **{setting: ""}), event()).error
    assert "no such file" in run(name, tmp_path / "none", event()).error


def test_slack_escapes_text_of_users(tmp_path, server):
    run("slack", settings(tmp_path, server.url), event(reason="<!channel> & `x`"))
    assert "&lt;!channel&gt; &amp; 'x'" in server.documents[0]["text"]


def test_slack_names_operator_and_marks_test(tmp_path, server):
    path = settings(tmp_path, server.url)
    run("slack", path, event("on_resume", who="an operator"))
    run("slack", path, event(test=True))
    resumed, test = (document["text"] for document in server.documents)
    assert "an operator" in resumed
    assert test.startswith("TEST")


def test_pagerduty_resolves_alert_of_drain(tmp_path, server):
    path = settings(tmp_path, server.url)
    for hook in ("on_drain", "on_resume"):
        assert run("pagerduty", path, event(hook)).error == ""
    drain, resume = server.documents
    assert (drain["event_action"], resume["event_action"]) == ("trigger", "resolve")
    assert drain["dedup_key"] == resume["dedup_key"] == "healthd/c1/gpu-1"
    assert (drain["routing_key"], drain["payload"]["severity"]) == ("key", "critical")
    assert drain["payload"]["custom_details"]["id"] == "test-1"


def test_ticket_has_fields_of_jira_and_authorization(tmp_path, server):
    assert "HPC-12" in run("ticket", settings(tmp_path, server.url), event()).output
    changed = event(drained_at="2026-11-23T12:00:00.000Z")
    run("ticket", settings(tmp_path, server.url, TICKET_USER="me", TICKET_TYPE="Bug"), changed)
    (bearer, issue), (basic, bug) = server.requests
    assert bearer["Authorization"] == "Bearer secret"
    assert basic["Authorization"] == "Basic " + base64.b64encode(b"me:secret").decode()
    assert issue["fields"]["project"] == {"key": "HPC"}
    assert (issue["fields"]["issuetype"], bug["fields"]["issuetype"]) == ({"name": "Task"}, {"name": "Bug"})
    assert "1650522012345" in issue["fields"]["description"]


def test_ticket_is_created_once_for_each_drain(tmp_path, server):
    path = settings(tmp_path, server.url)
    assert run("ticket", path, event(previous_reason="healthd: other")).error == ""
    assert len(server.requests) == 1, "a Reason that changed does not prove that a ticket exists"
    again = run("ticket", path, event(id="test-2", reason="healthd: worse", previous_reason="healthd: gpu_xid/79"))
    assert (again.error, len(server.requests)) == ("", 1)
    assert "HPC-12" in again.output
    run("ticket", path, event("on_repair_failed"))
    run("ticket", path, event(drained_at="2026-11-23T12:00:00.000Z"))
    labels = [document["fields"]["labels"][-1] for document in server.documents]
    assert len(set(labels)) == len(server.requests) == 3
    assert labels[0] == "healthd-c1-gpu-1-2026-11-22T12-11-20.123Z"


def test_ticket_search_has_address_of_server(tmp_path, server):
    run("ticket", settings(tmp_path, server.url), event())
    run("ticket", settings(tmp_path, server.url, TICKET_USER="me"), event())
    other = server.url.replace("hook", "my/search")
    run("ticket", settings(tmp_path, server.url, TICKET_SEARCH_URL=other), event())
    assert [path for path, _ in server.searches] == ["/search", "/search/jql", "/my/search"]


@pytest.mark.parametrize("raw", [b"[]", b"{}", b'{"issues": 1}', b'{"issues": [{}]}', b"<html>"])
def test_ticket_without_answer_to_search_is_not_created(raw, tmp_path, server):
    server.raw = b"HTTP/1.1 200 OK\r\n\r\n" + raw
    assert "list of issues" in run("ticket", settings(tmp_path, server.url), event()).error
    assert server.requests == []


def conditions(*parts: tuple[str, str, str]) -> list[dict[str, Any]]:
    (base,) = event()["conditions"]
    named = [{**base, "code": code, "check": code.partition("/")[0], "subject": subject} for code, subject, _ in parts]
    for found, (_, _, serial) in zip(named, parts, strict=True):
        found.pop("serial")
        if serial:
            found["serial"] = serial
    return named


def test_rma_writes_one_file_for_each_gpu(tmp_path):
    found = conditions(
        ("gpu_xid/79", "0000:1b:00.0", "165"),
        ("gpu_access/lost", "0000:1b:00.0", "165"),
        ("gpu_ecc/uncorrected", "0000:43:00.0", ""),
        ("mount/missing", "/data", ""),
    )
    path = settings(tmp_path)
    assert run("rma", path, event(conditions=found)).error == ""
    evidence = "/var/lib/healthd/evidence/1.tar.gz"
    assert run("rma", path, event("on_repair_failed", conditions=found, evidence=evidence)).error == ""
    files = sorted((tmp_path / "rma").iterdir())
    assert [file.name for file in files] == [
        "gpu-1-0000-43-00.0-2026-11-22T12-11-20.123Z.txt",
        "gpu-1-165-2026-11-22T12-11-20.123Z.txt",
    ]
    text = files[1].read_text()
    assert "GPU serial number: 165\n" in text
    assert f"Evidence: {evidence}\n" in text
    assert text.count("Fault:") == 2
    assert (tmp_path / "rma").stat().st_mode & 0o777 == 0o700


def test_rma_file_name_has_no_path(tmp_path):
    assert run("rma", settings(tmp_path), event(conditions=conditions(("gpu_xid/79", "../../etc/x", "")))).error == ""
    (file,) = (tmp_path / "rma").iterdir()
    assert file.name.startswith("gpu-1-..-..-etc-x")


def test_rma_reports_folder_that_cannot_be_written(tmp_path):
    (tmp_path / "rma").write_text("")
    assert str(tmp_path / "rma") in run("rma", settings(tmp_path), event()).error


def test_examples_are_programs_and_documented_with_all_settings():
    env = (EXAMPLES / "hooks.env").read_text()
    names = {path.name for path in EXAMPLES.iterdir()} - {"hooks.env"}
    assert names == set(re.findall(r"(?m)^\| \[(\w+)\]\(\.\./packaging/hooks/", PAGE))
    for name in names:
        path = EXAMPLES / name
        assert os.access(path, os.X_OK), name
        assert path.read_text().startswith("#!/opt/healthd/bin/python -I\n"), "the path in docs/deploy.md"
        used = set(re.findall(r'"((?:SLACK|PAGERDUTY|TICKET|RMA)_\w+)"', path.read_text()))
        assert used
        assert all(f"`{setting}`" in PAGE and f"#{setting}=" in env for setting in used), used


def test_page_has_each_field_of_document():
    document = json.loads(PAGE.split("```json\n")[1].split("```")[0])
    assert document.keys() == sample("on_drain", "c1", "n1", TIME).keys() - {"test"}
    (condition,) = document["conditions"]
    assert condition.keys() == sample("on_drain", "c1", "n1", TIME)["conditions"][0].keys()
    for field in (*document, "previous_reason", "who", "evidence", "repair", "test"):
        assert f"`{field}`" in PAGE, field
