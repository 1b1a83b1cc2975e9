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
def test_a_daemon_is_told_by_its_command_line(words, command):
    assert daemon_command(words) == command


@given(st.lists(st.text()))
def test_any_command_line_is_read(words):
    assert daemon_command(words) == "" or "run" in words


@pytest.fixture
def one() -> Iterator[subprocess.Popen[bytes]]:
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


def test_a_daemon_that_runs_is_told_with_its_process_its_age_and_its_options(one):
    (mine,) = [process.info for process in find_daemons() if process.pid == one.pid]
    told = describe([mine])
    assert told.endswith("): healthd run --runtime-dir /tmp/elsewhere")
    assert f"{one.pid} (" in told
    assert " s, " in told


def test_many_daemons_are_three_in_short_and_a_count():
    command = ["healthd", "run", "--runtime-dir", "/tmp/" + "x " * 900]
    about = {"pid": 812, "username": "root", "create_time": None, "status": "sleeping", "cmdline": command}
    told = describe([about] * 7)
    assert told.count("process 812 (root") == 3
    assert told.endswith(", and 4 more")
    assert len(told) < 3 * 140
    assert describe([]) == ""


def test_this_process_is_none():
    assert f"process {os.getpid()} " not in describe_daemons()
