"""Runs external programs until they end, reach their deadline or are stopped on request. No program is left running.

Each program leads its own session and process group. To end a program, its whole group gets SIGTERM, and SIGKILL a
second later. The kernel sends SIGKILL if this process dies first (prctl(2), PR_SET_PDEATHSIG).
"""

from __future__ import annotations

import contextlib
import ctypes
import glob
import os
import select
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

MAX_OUTPUT_BYTES = 1 << 20
TERM_SECONDS, KILL_SECONDS = 1.0, 0.5  # time to wait after each of the two signals
# time that the other programs get after the last command has ended, such as a server without its client
LAST_SECONDS = 2.0
STEP_SECONDS = 0.05
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER, _PR_GET_CHILD_SUBREAPER = 1, 36, 37
_libc = ctypes.CDLL(None, use_errno=True)


class Command(NamedTuple):
    """A command to run.

    The command starts when a TCP server on this machine listens on `port`, or immediately if `port` is 0.
    """

    argv: tuple[str, ...]
    environment: Mapping[str, str] = {}
    port: int = 0


class FinishedProgram(NamedTuple):
    """A program's result.

    Attributes:
        status: its exit status, minus its signal number if a signal ended it, or None if it never ran.
        ending: "ended" (by itself), "overdue", "stopped" (on request), "missing" (it could not be started; stderr has
            the reason).
        is_hanging: True if even SIGKILL did not end it, because it hangs in the kernel.
    """

    status: int | None
    stdout: str
    stderr: str
    ending: str
    is_hanging: bool = False


def end_on_signals() -> int:
    """Return a file descriptor that becomes readable on SIGTERM, SIGINT, SIGHUP or SIGUSR1. Each signal is one byte."""
    reading, writing = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1):
        signal.signal(number, lambda _number, _frame: None)
    return reading


def adopt_orphans() -> None:
    """Make this process adopt orphans of a program, even from another session, so that `run` ends them too.

    It uses PR_SET_CHILD_SUBREAPER (prctl(2)). Call it only in a process that has no other children.
    """
    _libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def is_stop_requested(stop: int) -> bool:
    return stop >= 0 and bool(select.select([stop], [], [], 0)[0])


def run(commands: Sequence[Command], seconds: float, stop: int = -1) -> list[FinishedProgram]:
    """Run all commands in parallel for at most `seconds`, and return when all have ended.

    Args:
        stop: descriptor that ends all commands when it becomes readable, or -1.
    """
    deadline = time.monotonic() + seconds
    running: list[_RunningProgram | None] = [None] * len(commands)
    missing: dict[int, str] = {}
    ending = "ended"
    try:
        while True:
            for number, command in enumerate(commands):
                if (
                    running[number] is None
                    and number not in missing
                    and (not command.port or is_listening(command.port))
                ):
                    try:
                        running[number] = _RunningProgram(command)
                    except OSError as error:
                        missing[number] = f"{command.argv[0]}: {error.strerror}"
            started = [program for program in running if program is not None]
            for program in started:
                program.read()
            last = running[-1]
            ended = [program.has_ended() for program in started]
            # The client cannot connect to a server that has ended, so do not wait for it.
            is_server_gone = len(started) < len(commands) and all(ended)
            if len(commands) > 1 and (missing or is_server_gone or (last is not None and last.has_ended())):
                deadline = min(deadline, time.monotonic() + LAST_SECONDS) if ending == "ended" else deadline
                ending = "done"
            if len(started) + len(missing) == len(commands) and all(ended):
                break
            if is_stop_requested(stop):
                ending = "stopped"
                break
            if time.monotonic() >= deadline:
                ending = "overdue" if ending != "done" else ending
                break
            ready = [fd for program in started for fd in program.open] + ([stop] if stop >= 0 else [])
            select.select(ready, [], [], STEP_SECONDS)
    finally:
        hanging = _end([program for program in running if program is not None])
        _end_orphans()
    our_ending = ending if ending in ("stopped", "overdue") else "ended"
    return [
        FinishedProgram(None, "", missing[number], "missing")
        if number in missing
        else FinishedProgram(None, "", "it was never started", our_ending if our_ending != "ended" else "missing")
        if program is None
        else program.result(our_ending, program in hanging)
        for number, program in enumerate(running)
    ]


class _RunningProgram:
    """One running program and its output so far."""

    def __init__(self, command: Command) -> None:
        parent = os.getpid()

        def die_with_us() -> None:
            _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
            if os.getppid() != parent:  # this process's parent has died in the meantime
                os.kill(os.getpid(), signal.SIGKILL)

        self._process = subprocess.Popen(
            command.argv,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            cwd="/",
            env={**os.environ, "LC_ALL": "C", **command.environment},
            start_new_session=True,
            preexec_fn=die_with_us,
        )
        assert self._process.stdout is not None
        assert self._process.stderr is not None
        self._output = {self._process.stdout.fileno(): bytearray(), self._process.stderr.fileno(): bytearray()}
        for descriptor in self._output:
            os.set_blocking(descriptor, False)
        self.open = set(self._output)
        self._ended_by_us = False

    def read(self) -> None:
        """Read the pipes. Keep the first 1 MiB from each and discard the rest."""
        for descriptor in list(self.open):
            with contextlib.suppress(BlockingIOError):
                for _ in range(32):
                    piece = os.read(descriptor, 1 << 16)
                    buffer = self._output[descriptor]
                    buffer += piece[: MAX_OUTPUT_BYTES - len(buffer)]
                    if not piece:
                        self.open.discard(descriptor)
                        break

    def has_ended(self) -> bool:
        """Return True if the program has ended.

        The program is not reaped, so its pid and group number are not reused yet.
        """
        return os.waitid(os.P_PID, self._process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None

    def kill(self, number: int) -> None:
        """Send a signal to the program's group.

        Members of the group may still run although the program itself has ended.
        """
        self._ended_by_us = self._ended_by_us or not self.has_ended()
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, number)

    def reap(self) -> bool:
        """Reap the program and read its final output. Return True if it has ended."""
        self.read()
        if not self.has_ended():
            return False
        self._process.wait()
        return True

    def result(self, ending: str, is_hanging: bool) -> FinishedProgram:
        out, err = (bytes(text).decode("utf-8", "replace") for text in self._output.values())
        for pipe in (self._process.stdout, self._process.stderr):
            if pipe is not None:
                pipe.close()
        return FinishedProgram(self._process.returncode, out, err, ending if self._ended_by_us else "ended", is_hanging)


def _end(running: Sequence[_RunningProgram]) -> list[_RunningProgram]:
    """End all running programs and all other processes in their groups. Return the programs that cannot be ended."""
    if any(not program.has_ended() for program in running):
        for program in running:
            program.kill(signal.SIGTERM)
        _wait(lambda: all(program.has_ended() for program in running), TERM_SECONDS)
    for program in running:
        program.kill(signal.SIGKILL)
    _wait(lambda: all(program.has_ended() for program in running), KILL_SECONDS)
    return [program for program in running if not program.reap()]


def _end_orphans() -> None:
    """Kill the children that `adopt_orphans` adopted, and the orphans that they leave."""
    adopts = ctypes.c_int(0)
    _libc.prctl(_PR_GET_CHILD_SUBREAPER, ctypes.byref(adopts), 0, 0, 0)
    until = time.monotonic() + KILL_SECONDS
    while adopts.value and (orphans := _children()):
        for pid in orphans:
            with contextlib.suppress(ProcessLookupError, ChildProcessError):
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, os.WNOHANG)
        if time.monotonic() >= until:  # it hangs in the kernel
            return
        time.sleep(0.01)


def _children() -> list[int]:
    found: list[int] = []
    for path in glob.glob("/proc/self/task/*/children"):
        with contextlib.suppress(OSError), open(path, encoding="ascii") as file:
            found += map(int, file.read().split())
    return found


def _wait(done: Callable[[], bool], seconds: float) -> None:
    until = time.monotonic() + seconds
    while not done() and time.monotonic() < until:
        time.sleep(0.01)


def is_listening(port: int) -> bool:
    """Return True if a server on this machine listens on this TCP port.

    It reads /proc/net/tcp, in which the state 0A means LISTEN (proc(5)).
    """
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        with contextlib.suppress(OSError), open(table, encoding="ascii", errors="replace") as file:
            for line in file:
                columns = line.split()
                if len(columns) > 3 and columns[3] == "0A" and columns[1].endswith(f":{port:04X}"):
                    return True
    return False
