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

from tests.cli.test_hook import PROLOG, SHELLS, run

HOLDS = """\
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
def holding(tmp_path: Path, *how: str) -> Iterator[tuple[subprocess.Popen[str], int]]:
    """Run a process that holds the lock as a validation does. Yield it and the pid of the program that it runs, or
    0."""
    argv = [sys.executable, "-c", HOLDS, str(tmp_path / "validation.lock"), *how]
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


def is_held(tmp_path: Path) -> bool:
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
def test_a_prolog_asks_a_validation_to_end_and_waits_until_it_has(tmp_path: Path, shell: str) -> None:
    with holding(tmp_path) as (process, _):
        done = run(tmp_path, PROLOG, shell=shell, SLURM_JOB_ID="7")
        assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
        assert not is_held(tmp_path)
        assert process.wait(240) == -signal.SIGTERM


@pytest.mark.parametrize("shell", SHELLS)
def test_one_that_does_not_hear_is_killed_with_the_programs_that_it_runs(tmp_path: Path, shell: str) -> None:
    with holding(tmp_path, "deaf", "program") as (process, program):
        done = run(tmp_path, PROLOG, shell=shell)
        assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
        assert not is_held(tmp_path)
        assert process.wait(240) == -signal.SIGKILL
        until(lambda: has_ended(program), "the program that it ran has ended")


def test_one_that_stands_still_is_killed(tmp_path: Path) -> None:
    with holding(tmp_path) as (process, _):
        process.send_signal(signal.SIGSTOP)
        assert run(tmp_path, PROLOG).returncode == 0
        assert process.wait(240) in (-signal.SIGTERM, -signal.SIGKILL)  # SIGTERM is pending when SIGKILL arrives


def test_a_process_that_only_has_the_number_of_an_old_validation_is_left_alone(tmp_path: Path) -> None:
    with holding(tmp_path / "..") as (other, _):  # the process holds another lock
        (tmp_path / "validation.lock").write_text(f"{other.pid}\n")
        assert run(tmp_path, PROLOG).returncode == 0
        assert other.poll() is None


@pytest.mark.parametrize("left", ["", "\n", "0\n", "-1\n", "1 2\n", "4194305\n", "999999999999\n", "\xff\n", "\0\0\n"])
def test_what_a_validation_left_in_its_lock_holds_up_no_job(tmp_path: Path, left: str) -> None:
    (tmp_path / "validation.lock").write_text(left, "latin-1")
    done = run(tmp_path, PROLOG)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
