"""SeparateProgram: requests are served once, by systemd or by a child process, and survive kills."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import pytest
from waiting import until

from healthd.common import ownership
from healthd.host.separate_program import OpenRequest, SeparateProgram, is_running, request_file, serve, taken_file

SERVE = """
import sys
from healthd.host.separate_program import serve
def work(request):
    with open(sys.argv[2], "a") as file:
        file.write(request.text + chr(10))
    if request.text == "fail":
        raise SystemExit(3)
serve(sys.argv[1], "evidence", work)
"""


def program(folder: Path, is_managed: bool = False) -> SeparateProgram:
    argv = (sys.executable, "-c", SERVE, str(folder), str(folder / "served"))
    return SeparateProgram("evidence", argv, str(folder), 60.0, is_managed, time.monotonic)


def served(folder: Path) -> list[str]:
    path = folder / "served"
    return path.read_text().splitlines() if path.exists() else []


def test_request_without_systemd_is_served_by_child(tmp_path: Path) -> None:
    separate = program(tmp_path)
    separate.request("first")
    until(separate.step)
    assert (served(tmp_path), separate.is_open, separate.problem) == (["first"], False, "")
    assert not os.path.exists(request_file(str(tmp_path), "evidence"))


def test_request_under_systemd_starts_no_child(tmp_path: Path) -> None:
    separate = program(tmp_path, is_managed=True)
    separate.request("first")
    assert not separate.step()
    assert list(separate.waits()) == []
    serve(str(tmp_path), "evidence", lambda request: None)
    separate._poll_at = 0.0
    assert separate.step()


def test_unserved_request_is_a_problem_after_a_minute(tmp_path: Path) -> None:
    now = 1000.0
    separate = SeparateProgram("evidence", ("true",), str(tmp_path), 60.0, True, lambda: now)
    separate.request("first")
    separate.step()
    assert separate.problem == ""
    now += 61
    separate.step()
    assert separate.problem
    os.unlink(separate.path)
    now += 6
    assert separate.step()
    assert separate.problem == ""


def test_request_of_earlier_daemon_is_adopted(tmp_path: Path) -> None:
    assert not program(tmp_path).adopt()
    program(tmp_path).request("first")
    later = program(tmp_path)
    assert later.adopt()
    until(later.step)
    assert served(tmp_path) == ["first"]


def test_failed_program_leaves_its_request(tmp_path: Path) -> None:
    separate = program(tmp_path)
    separate.request("fail")
    until(lambda: not separate.step() and served(tmp_path) and separate._child is None)
    assert separate.is_open
    assert served(tmp_path) == ["fail"]


def test_missing_program_is_not_served(tmp_path: Path) -> None:
    separate = SeparateProgram("evidence", ("/nonexistent",), str(tmp_path), 60.0, False, time.monotonic)
    separate.request("first")
    until(lambda: not separate.step() and separate._child is None)
    assert separate.is_open


@pytest.mark.parametrize("second", ["second", "first"])
def test_serve_also_serves_a_request_that_comes_meanwhile(tmp_path: Path, second: str) -> None:
    separate, requests = program(tmp_path, is_managed=True), []
    separate.request("first")

    def work(request: OpenRequest) -> None:
        requests.append(request)
        assert is_running(str(tmp_path), "evidence")
        assert not serve(str(tmp_path), "evidence", requests.append)
        assert not request.is_replaced()
        if request.number == 1:
            separate.request(second)
            assert request.is_replaced()

    assert serve(str(tmp_path), "evidence", work)
    assert [(request.text, request.number) for request in requests] == [("first", 1), (second, 2)]
    assert not is_running(str(tmp_path), "evidence")
    assert not os.path.exists(request_file(str(tmp_path), "evidence"))


@pytest.mark.parametrize("newer", ["", "newer"])
def test_request_taken_by_killed_program_is_served(tmp_path: Path, newer: str) -> None:
    """The program was killed between its rename and the test whether it had served this request."""
    Path(taken_file(str(tmp_path), "evidence")).write_text("taken")
    separate = program(tmp_path)
    if newer:
        separate.request(newer)
    assert separate.adopt()
    until(separate.step)
    assert served(tmp_path) == [newer or "taken"]
    assert not os.path.exists(taken_file(str(tmp_path), "evidence"))


def test_serve_keeps_request_if_work_raises(tmp_path: Path) -> None:
    program(tmp_path, is_managed=True).request("first")

    def fail(request: OpenRequest) -> None:
        raise ValueError(request.text)

    with pytest.raises(ValueError, match="first"):
        serve(str(tmp_path), "evidence", fail)
    assert os.path.exists(request_file(str(tmp_path), "evidence"))


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file to another user")
def test_serve_refuses_request_of_another_user(tmp_path: Path) -> None:
    program(tmp_path, is_managed=True).request("first")
    os.chown(request_file(str(tmp_path), "evidence"), 65534, 65534)
    requests: list[OpenRequest] = []
    with pytest.raises(ownership.Untrusted):
        serve(str(tmp_path), "evidence", requests.append)
    assert requests == []


def test_serve_without_request_does_nothing(tmp_path: Path) -> None:
    requests: list[OpenRequest] = []
    assert serve(str(tmp_path), "evidence", requests.append)
    assert requests == []


def test_program_that_ends_after_its_request_was_served_leaves_no_deadline(tmp_path: Path) -> None:
    """Otherwise the daemon would never sleep again."""
    argv = ("/bin/sh", "-c", f"rm {tmp_path}/evidence.request; sleep 8")
    separate = SeparateProgram("evidence", argv, str(tmp_path), 60.0, False, time.monotonic)
    separate.request("first")
    until(separate.step)
    until(lambda: not separate.step() and separate._child is None)
    assert separate.deadline == float("inf")
