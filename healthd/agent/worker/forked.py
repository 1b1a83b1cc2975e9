"""A worker for a command. It is a fork of this process, which has already imported everything that a worker needs.

Use it only for a command that exits after its round. The daemon instead starts a separate program
(`client.start_program`), because its worker must use the installed files and must not inherit state from a process that
is weeks old.
"""

from __future__ import annotations

import gc
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from math import inf
from typing import NoReturn

from healthd.agent.settings import registry
from healthd.agent.settings.registry import Check
from healthd.agent.worker import process
from healthd.agent.worker.process import Setup

MAX_POLL_SECONDS = 0.05  # longest pause between two polls for the exit


class ForkedProcess:
    """A fork of this process, with the methods of subprocess.Popen that the client needs."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None

    def poll(self) -> int | None:
        if self.returncode is None:
            try:
                pid, status = os.waitpid(self.pid, os.WNOHANG)
            except ChildProcessError:  # SIGCHLD is ignored, so the status is unknown, as with subprocess.Popen
                pid, status = self.pid, 0
            if pid:
                self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Return the exit status, or the negative signal number. Raises subprocess.TimeoutExpired."""
        end = inf if timeout is None else time.monotonic() + timeout
        pause = 0.0005
        while (status := self.poll()) is None:  # like subprocess.Popen, which polls too
            remaining = end - time.monotonic()
            if remaining <= 0:
                raise subprocess.TimeoutExpired("worker", timeout or 0.0)
            pause = min(2 * pause, MAX_POLL_SECONDS, remaining)
            time.sleep(pause)
        return status

    def kill(self) -> None:
        if self.poll() is None:
            with suppress(ProcessLookupError):  # SIGCHLD is ignored, and it has just exited
                os.kill(self.pid, signal.SIGKILL)


def can_fork() -> bool:
    """Return True if a fork of this process can replace a new process.

    A site's file that was imported here, even if it was rejected, may have loaded any library (such as NVML) or started
    threads. The threads' locks would stay locked in a fork.
    """
    return not registry.has_loaded_site_file() and len(os.listdir("/proc/self/task")) == 1


def start(checks: Mapping[str, Check], setup: Setup, stream: socket.socket) -> ForkedProcess:
    """Start a worker that has these checks. Raises OSError."""
    for output in (sys.stdout, sys.stderr):
        if output is not None:
            output.flush()  # otherwise the fork would write this process's buffered text again
    # From the start, only the parent handles Ctrl-C.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        pid = os.fork()
        if not pid:
            _serve(checks, setup, stream)
        return ForkedProcess(pid)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _serve(checks: Mapping[str, Check], setup: Setup, stream: socket.socket) -> NoReturn:
    status = 1
    try:
        _detach_from_parent(stream.fileno())
        process.serve(setup, stream, checks)
        status = 0
    except SystemExit as system_exit:
        status = system_exit.code if isinstance(system_exit.code, int) else 1
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        os._exit(status)  # skip the parent's exit handlers


def _detach_from_parent(stream: int) -> None:
    """Drop everything that a separate program would not inherit: session, terminal, directory, signal handlers and open
    files.

    An abandoned worker must not keep its parent's pipes, locks or sockets open.
    """
    gc.freeze()  # a garbage collection would copy each page of the parent's memory
    os.setsid()
    os.chdir("/")
    signal.set_wakeup_fd(-1)
    for number in signal.valid_signals():
        if callable(signal.getsignal(number)):
            signal.signal(number, signal.SIG_IGN if number == signal.SIGINT else signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    for name in os.listdir("/proc/self/fd"):
        if int(name) > 2 and int(name) != stream:
            with suppress(OSError):  # the descriptor that lists the directory
                os.close(int(name))
