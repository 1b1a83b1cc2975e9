"""Tests of how the prolog of a job ends a validation: SIGTERM, then SIGKILL, with a time limit."""

from __future__ import annotations

import fcntl
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
from waiting import until

from tests.cli.test_hook import PROLOG, SHELLS, run_script

HOLDER = """\
import fcntl, os, signal, subprocess, sys, time
if "deaf" in sys.argv:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
program = subprocess.Popen(["sleep", "600"], start_new_session=True) if "program" in sys.argv else None
lock = os.open(sys.argv[1], os.O_RDWR | os.O_CREAT | os.O_CLOEXEC)
fcntl.flock(lock, fcntl.LOCK_EX)
os.write(lock, f"{os.getpid()}\\n".encode())
print(program.pid if program else 0, flush=True)
time.sleep(600)
"""


@contextmanager
def hold_lock(tmp_path: Path, *options: str) -> Iterator[tuple[subprocess.Popen[str], int]]:
    """Run a process that holds the lock as a validation does. Yield it and the pid of the program that it runs, or
    0."""
    argv = [sys.executable, "-c", HOLDER, str(tmp_path / "validation.lock"), *options]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True) as process:
        program = 0
        try:
            assert process.stdout is not None
            program = int(process.stdout.readline())
            yield process, program
        finally:
            process.kill()
            if program:
                with suppress(ProcessLookupError):
                    os.kill(program, signal.SIGKILL)


def is_locked(tmp_path: Path) -> bool:
    with open(tmp_path / "validation.lock") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        return False


def has_ended(pid: int) -> bool:
    """Return True if the process does not exist or is a zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except (FileNotFoundError, ProcessLookupError):
        return True


@pytest.mark.parametrize("shell", SHELLS)
def test_prolog_terminates_validation_and_waits_for_its_end(tmp_path: Path, shell: str) -> None:
    with hold_lock(tmp_path) as (process, _):
        result = run_script(tmp_path, PROLOG, shell=shell, SLURM_JOB_ID="7")
        assert (result.returncode, result.stdout, result.stderr) == (0, "", "")
        assert not is_locked(tmp_path)
        assert process.wait(240) == -signal.SIGTERM


@pytest.mark.parametrize("shell", SHELLS)
def test_prolog_kills_validation_ignoring_sigterm_and_its_program(tmp_path: Path, shell: str) -> None:
    with hold_lock(tmp_path, "deaf", "program") as (process, program):
        result = run_script(tmp_path, PROLOG, shell=shell)
        assert (result.returncode, result.stdout, result.stderr) == (0, "", "")
        assert not is_locked(tmp_path)
        assert process.wait(240) == -signal.SIGKILL
        until(lambda: has_ended(program), "the program that it ran has ended")


def test_prolog_kills_stopped_validation(tmp_path: Path) -> None:
    with hold_lock(tmp_path) as (process, _):
        process.send_signal(signal.SIGSTOP)
        assert run_script(tmp_path, PROLOG).returncode == 0
        assert process.wait(240) in (-signal.SIGTERM, -signal.SIGKILL)  # SIGTERM is pending when SIGKILL arrives


def test_prolog_spares_process_with_pid_of_old_validation(tmp_path: Path) -> None:
    with hold_lock(tmp_path / "..") as (other, _):  # the process holds another lock
        (tmp_path / "validation.lock").write_text(f"{other.pid}\n")
        assert run_script(tmp_path, PROLOG).returncode == 0
        assert other.poll() is None


@pytest.mark.parametrize(
    "content", ["", "\n", "0\n", "-1\n", "1 2\n", "4194305\n", "999999999999\n", "\xff\n", "\0\0\n"]
)
def test_prolog_ignores_invalid_content_of_lock_file(tmp_path: Path, content: str) -> None:
    (tmp_path / "validation.lock").write_text(content, "latin-1")
    result = run_script(tmp_path, PROLOG)
    assert (result.returncode, result.stdout, result.stderr) == (0, "", "")
