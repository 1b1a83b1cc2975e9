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


def end_of(running: Child) -> float:
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


def test_a_program_that_ends_gives_its_status_and_both_outputs() -> None:
    running = child("echo out; echo err >&2; exit 3")
    end_of(running)
    assert (running.status, running.output()) == (3, (b"out\n", "err\n"))


def test_a_program_that_a_signal_ends_says_so() -> None:
    running = child("kill -9 $$")
    end_of(running)
    assert running.status == -signal.SIGKILL


def test_what_is_no_text_is_shown_as_far_as_it_goes() -> None:
    running = child("printf 'a\\377b'")
    end_of(running)
    assert running.output()[0] == b"a\xffb"


def test_a_missing_program_is_status_127_and_a_sentence() -> None:
    running = Child(("/nonexistent/scontrol",), time.monotonic() + 120, time.monotonic, {"LC_ALL": "C"})
    end_of(running)
    assert running.status == 127
    assert "'/nonexistent/scontrol': No such file or directory" in running.output()[1]


def test_it_gets_our_environment_with_what_is_added_and_no_standard_input() -> None:
    program = "import os, sys; print(os.environ['PATH'] != '', os.environ['TZ'], repr(sys.stdin.read()))"
    argv = (sys.executable, "-c", program)
    running = Child(argv, time.monotonic() + 120, time.monotonic, {"TZ": "UTC"})
    end_of(running)
    assert running.output()[0] == b"True UTC ''\n"


def test_of_much_output_the_beginning_is_kept_and_the_program_is_not_held_up() -> None:
    running = child(f"head -c {3 * MAX_OUTPUT_BYTES} /dev/zero")
    end_of(running)
    assert (running.status, len(running.output()[0])) == (0, MAX_OUTPUT_BYTES)


def test_a_flood_keeps_nobody_from_other_work_and_ends_at_its_deadline() -> None:
    running = child("exec cat /dev/zero", seconds=5.0)
    steps = 1
    while not running.step():
        steps += 1
    assert steps > 10, "each step is short, so other work can run in between"
    assert running.status is None
    assert 0 < len(running.output()[0]) <= MAX_OUTPUT_BYTES


def test_a_grandchild_that_keeps_the_pipe_is_not_waited_for() -> None:
    running = child("sleep 600 & echo $!")
    assert end_of(running) < 300
    assert running.status == 0
    os.kill(int(running.output()[0]), signal.SIGKILL)


def test_one_that_closes_its_outputs_and_goes_on_is_no_busy_loop() -> None:
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


def test_an_overdue_program_is_killed_and_keeps_what_it_had_said() -> None:
    running = child("echo so far; sleep 600", seconds=5.0)  # enough time to print the output
    assert end_of(running) < 300
    assert (running.status, running.output()[0]) == (None, b"so far\n")


def test_a_stopped_program_is_overdue_too() -> None:
    running = child("kill -STOP $$", seconds=0.3)
    assert end_of(running) < 300
    assert running.status is None


def test_overdue_programs_do_not_stay_as_zombies() -> None:
    running = child("sleep 30", seconds=0.0)
    assert running.step()
    pid = pid_of(running)
    until(lambda: is_zombie(pid))
    end_of(child("true"))
    assert not Path(f"/proc/{pid}").exists()


def test_nothing_stays_open() -> None:
    before = len(os.listdir("/proc/self/fd"))
    for program in ("true", "echo x", "sleep 30"):
        end_of(child(program, seconds=0.2))
    assert len(os.listdir("/proc/self/fd")) == before


def is_zombie(pid: int) -> bool:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"


def test_one_that_was_killed_and_whose_end_somebody_else_noted_does_not_keep_the_next_from_starting() -> None:
    killed = child("sleep 60", seconds=0.05)
    end_of(killed)
    os.waitpid(pid_of(killed), 0)
    next_one = child("echo here")
    end_of(next_one)
    assert next_one.output()[0] == b"here\n"
