"""Tests of finding running daemons by their command lines."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from healthd.cli.daemons import daemon_command, describe, describe_daemons, find_daemons


@pytest.mark.parametrize(
    ("words", "command"),
    [
        (["/opt/healthd/bin/python", "/usr/bin/healthd", "run"], "healthd run"),
        (["python3", "-m", "healthd", "run", "--mode", "act"], "healthd run --mode act"),
        (["python3", "/usr/bin/healthd", "status"], ""),
        (["vi", "healthd"], ""),
        (["healthd"], ""),
        ([], ""),
    ],
)
def test_daemon_command_recognises_daemons(words, command):
    assert daemon_command(words) == command


@given(st.lists(st.text()))
def test_daemon_command_accepts_any_words(words):
    assert daemon_command(words) == "" or "run" in words


@pytest.fixture
def daemon_process() -> Iterator[subprocess.Popen[bytes]]:
    """Run a process whose command line looks like that of a daemon."""
    program = "import sys; print(flush=True); sys.stdin.read()"
    process = subprocess.Popen(
        [sys.executable, "-c", program, "healthd", "run", "--runtime-dir", "/tmp/elsewhere"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert process.stdout is not None
    process.stdout.readline()
    yield process
    process.communicate()


def test_describe_shows_pid_age_and_options_of_daemon(daemon_process):
    (info,) = [process.info for process in find_daemons() if process.pid == daemon_process.pid]
    description = describe([info])
    assert description.endswith("): healthd run --runtime-dir /tmp/elsewhere")
    assert f"{daemon_process.pid} (" in description
    assert " s, " in description


def test_describe_names_three_daemons_and_count():
    command = ["healthd", "run", "--runtime-dir", "/tmp/" + "x " * 900]
    info = {"pid": 812, "username": "root", "create_time": None, "status": "sleeping", "cmdline": command}
    description = describe([info] * 7)
    assert description.count("process 812 (root") == 3
    assert description.endswith(", and 4 more")
    assert len(description) < 3 * 140
    assert describe([]) == ""


def test_describe_daemons_omits_this_process():
    assert f"process {os.getpid()} " not in describe_daemons()
