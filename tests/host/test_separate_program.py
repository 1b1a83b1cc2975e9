"""SeparateProgram: requests are served once, by systemd or by a child process, and survive kills."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import pytest
from waiting import until

from healthd.host.separate_program import SeparateProgram, is_running, request_file, serve

SERVE = """
import sys
from healthd.host.separate_program import serve
def work(text):
    with open(sys.argv[2], "a") as file:
        file.write(text + chr(10))
    if text == "fail":
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
    serve(str(tmp_path), "evidence", lambda text: None)
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


def test_serve_also_serves_a_request_that_comes_meanwhile(tmp_path: Path) -> None:
    separate, texts = program(tmp_path, is_managed=True), []
    separate.request("first")

    def work(text: str) -> None:
        texts.append(text)
        assert is_running(str(tmp_path), "evidence")
        assert not serve(str(tmp_path), "evidence", texts.append)
        if text == "first":
            separate.request("second")

    assert serve(str(tmp_path), "evidence", work)
    assert texts == ["first", "second"]
    assert not is_running(str(tmp_path), "evidence")


def test_serve_keeps_request_if_work_raises(tmp_path: Path) -> None:
    program(tmp_path, is_managed=True).request("first")

    def fail(text: str) -> None:
        raise ValueError(text)

    with pytest.raises(ValueError, match="first"):
        serve(str(tmp_path), "evidence", fail)
    assert os.path.exists(request_file(str(tmp_path), "evidence"))


def test_serve_without_request_does_nothing(tmp_path: Path) -> None:
    texts: list[str] = []
    assert serve(str(tmp_path), "evidence", texts.append)
    assert texts == []


def test_program_that_ends_after_its_request_was_served_leaves_no_deadline(tmp_path: Path) -> None:
    """Otherwise the daemon would never sleep again."""
    argv = ("/bin/sh", "-c", f"rm {tmp_path}/evidence.request; sleep 8")
    separate = SeparateProgram("evidence", argv, str(tmp_path), 60.0, False, time.monotonic)
    separate.request("first")
    until(separate.step)
    until(lambda: not separate.step() and separate._child is None)
    assert separate.deadline == float("inf")
