"""run_program: one program, run to its end within a deadline."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

import pytest

from healthd.host.program import MAX_OUTPUT_BYTES, run_program


def test_run_program_limits_output_without_blocking():
    result = run_program((sys.executable, "-c", "print('x' * 99 + '\\n', end='y' * 4_000_000)"), 20.0)
    assert (result.status, result.stdout[:100], len(result.stdout)) == (0, "x" * 99 + "\n", MAX_OUTPUT_BYTES)


def test_run_program_kills_endless_output():
    began = time.monotonic()
    with pytest.raises(TimeoutError):
        run_program(("/bin/sh", "-c", "exec yes"), 0.5)
    assert time.monotonic() - began < 60.0


def test_run_program_passes_small_fixed_environment_and_no_input(monkeypatch):
    monkeypatch.setenv("SECRET", "x")
    argv = ("/bin/sh", "-c", 'cat; echo "$SECRET/$HEALTHD_CHECK/$LC_ALL/$PWD"')
    status, message, _ = run_program(argv, 20.0, {"HEALTHD_CHECK": "mine"})
    path = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
    assert (status, message) == (0, "/mine/C.UTF-8//\n")
    assert run_program(("/bin/sh", "-c", 'echo "$PATH"'), 20.0) == (0, f"{path}\n", "")


def test_run_program_passes_arguments_unchanged():
    assert run_program(("/bin/echo", "a b", "$HOME", "*"), 20.0) == (0, "a b $HOME *\n", "")


def test_run_program_starts_a_new_session():
    status, message, _ = run_program((sys.executable, "-c", "import os; print(os.getsid(0) == os.getpid())"), 20.0)
    assert (status, message) == (0, "True\n")


def test_run_program_leaves_no_child_and_no_descriptor():
    children = Path(f"/proc/self/task/{os.getpid()}/children")
    before, fds = children.read_text(), set(os.listdir("/proc/self/fd"))
    for script in ("exit 0", "sleep 1000 & exit 2", "kill -9 $$"):
        run_program(("/bin/sh", "-c", script), 20.0)
    assert set(os.listdir("/proc/self/fd")) == fds
    assert set(children.read_text().split()) <= set(before.split())


def test_run_program_distinguishes_signal_from_status():
    assert run_program(("/bin/sh", "-c", "kill -KILL $$"), 20.0)[0] == -signal.SIGKILL
