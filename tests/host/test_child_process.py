"""Child: real programs that misbehave are never waited for and leave nothing behind."""

from __future__ import annotations

import os
import select
import signal
import sys
import time
from pathlib import Path

from waiting import until

from healthd.host.child_process import MAX_OUTPUT_BYTES, Child


def child(program: str, seconds: float = 120.0) -> Child:
    return Child(("/bin/sh", "-c", program), time.monotonic() + seconds, time.monotonic)


def run_to_end(running: Child) -> float:
    """Wait like the daemon and return the elapsed seconds."""
    began = time.monotonic()
    while not running.step():
        ready = select.poll()
        for descriptor, _ in running.waits():
            ready.register(descriptor, select.POLLIN)
        ready.poll(max(0.0, running.deadline - time.monotonic()) * 1000 + 1)
    return time.monotonic() - began


def pid_of(running: Child) -> int:
    return running._process.pid


def test_child_returns_status_and_both_outputs() -> None:
    running = child("echo out; echo err >&2; exit 3")
    run_to_end(running)
    assert (running.status, running.output()) == (3, (b"out\n", "err\n"))


def test_child_reports_signal_as_negative_status() -> None:
    running = child("kill -9 $$")
    run_to_end(running)
    assert running.status == -signal.SIGKILL


def test_child_returns_output_that_is_no_text() -> None:
    running = child("printf 'a\\377b'")
    run_to_end(running)
    assert running.output()[0] == b"a\xffb"


def test_missing_program_has_status_127_and_a_message() -> None:
    running = Child(("/nonexistent/scontrol",), time.monotonic() + 120, time.monotonic, {"LC_ALL": "C"})
    run_to_end(running)
    assert running.status == 127
    assert "'/nonexistent/scontrol': No such file or directory" in running.output()[1]


def test_child_inherits_environment_with_additions_and_no_stdin() -> None:
    program = "import os, sys; print(os.environ['PATH'] != '', os.environ['TZ'], repr(sys.stdin.read()))"
    argv = (sys.executable, "-c", program)
    running = Child(argv, time.monotonic() + 120, time.monotonic, {"TZ": "UTC"})
    run_to_end(running)
    assert running.output()[0] == b"True UTC ''\n"


def test_child_keeps_beginning_of_long_output_without_blocking() -> None:
    running = child(f"head -c {3 * MAX_OUTPUT_BYTES} /dev/zero")
    run_to_end(running)
    assert (running.status, len(running.output()[0])) == (0, MAX_OUTPUT_BYTES)


def test_endless_output_does_not_block_and_ends_at_deadline() -> None:
    running = child("exec cat /dev/zero", seconds=5.0)
    steps = 1
    while not running.step():
        steps += 1
    assert steps > 10, "each step is short, so other work can run in between"
    assert running.status is None
    assert 0 < len(running.output()[0]) <= MAX_OUTPUT_BYTES


def test_grandchild_with_open_pipe_is_not_awaited() -> None:
    running = child("sleep 600 & echo $!")
    assert run_to_end(running) < 300
    assert running.status == 0
    os.kill(int(running.output()[0]), signal.SIGKILL)


def test_closed_outputs_cause_no_busy_loop() -> None:
    running = child("exec >&- 2>&-; sleep 0.5")
    steps = 0
    while not running.step():
        steps += 1
        ready = select.poll()
        for descriptor, _ in running.waits():
            ready.register(descriptor, select.POLLIN)
        ready.poll(5000)
    assert running.status == 0
    assert steps < 10


def test_overdue_program_is_killed_and_keeps_its_output() -> None:
    running = child("echo so far; sleep 600", seconds=5.0)  # enough time to print the output
    assert run_to_end(running) < 300
    assert (running.status, running.output()[0]) == (None, b"so far\n")


def test_stopped_program_is_overdue() -> None:
    running = child("kill -STOP $$", seconds=0.3)
    assert run_to_end(running) < 300
    assert running.status is None


def test_overdue_program_leaves_no_zombie() -> None:
    running = child("sleep 30", seconds=0.0)
    assert running.step()
    pid = pid_of(running)
    until(lambda: is_zombie(pid))
    run_to_end(child("true"))
    assert not Path(f"/proc/{pid}").exists()


def test_child_leaves_no_descriptor_open() -> None:
    before = len(os.listdir("/proc/self/fd"))
    for program in ("true", "echo x", "sleep 30"):
        run_to_end(child(program, seconds=0.2))
    assert len(os.listdir("/proc/self/fd")) == before


def is_zombie(pid: int) -> bool:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"


def test_child_starts_after_another_one_was_reaped_elsewhere() -> None:
    killed = child("sleep 60", seconds=0.05)
    run_to_end(killed)
    os.waitpid(pid_of(killed), 0)
    next_child = child("echo here")
    run_to_end(next_child)
    assert next_child.output()[0] == b"here\n"
