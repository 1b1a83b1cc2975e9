"""A worker of a command: a copy of this process, which has imported already all that a worker needs.

Only for a command, which ends with its round. A daemon starts a program (runner.executed()): its worker must be of the
files that lie there, and have nothing of a process that is weeks old.
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

LONGEST_PAUSE_SECONDS = 0.05  # between two looks for its end


class Copy:
    """A copy of this process, with what the runner asks of a subprocess.Popen."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None

    def poll(self) -> int | None:
        if self.returncode is None:
            try:
                pid, status = os.waitpid(self.pid, os.WNOHANG)
            except ChildProcessError:  # SIGCHLD is ignored here: nobody will ever know, as with subprocess.Popen
                pid, status = self.pid, 0
            if pid:
                self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Its exit status, or minus the signal. Raises subprocess.TimeoutExpired."""
        end = inf if timeout is None else time.monotonic() + timeout
        pause = 0.0005
        while (status := self.poll()) is None:  # as subprocess.Popen does it, which needs nothing of the kernel
            left = end - time.monotonic()
            if left <= 0:
                raise subprocess.TimeoutExpired("worker", timeout or 0.0)
            pause = min(2 * pause, LONGEST_PAUSE_SECONDS, left)
            time.sleep(pause)
        return status

    def kill(self) -> None:
        if self.poll() is None:
            with suppress(ProcessLookupError):  # SIGCHLD is ignored, and it ended just now
                os.kill(self.pid, signal.SIGKILL)


def can_serve() -> bool:
    """Whether a copy of this process is as good as a new one. A site's file that was imported here, also one that was
    refused, may have loaded any library (NVML among them) and started threads, whose locks a copy would have and never
    get."""
    return not registry.has_run_a_site_file() and len(os.listdir("/proc/self/task")) == 1


def start(checks: Mapping[str, Check], setup: Setup, stream: socket.socket) -> Copy:
    """A worker that knows these checks. Raises OSError."""
    for ours in (sys.stdout, sys.stderr):
        if ours is not None:
            ours.flush()  # else the copy has the same text to write
    # Ctrl-C is for the parent, from the first moment on.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        pid = os.fork()
        if not pid:
            _serve(checks, setup, stream)
        return Copy(pid)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _serve(checks: Mapping[str, Check], setup: Setup, stream: socket.socket) -> NoReturn:
    status = 1
    try:
        _forget_the_parent(stream.fileno())
        process.serve(setup, stream, checks)
        status = 0
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else 1
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        os._exit(status)  # what the parent does at its end is not ours to do


def _forget_the_parent(stream: int) -> None:
    """What a program would not have of it: its session and terminal, its directory, what it does at signals, its open
    files. Who hangs, and is left behind, must keep no pipe, lock or socket of it open."""
    gc.freeze()  # to look through what was there would copy each page of it
    os.setsid()
    os.chdir("/")
    signal.set_wakeup_fd(-1)
    for number in signal.valid_signals():
        if callable(signal.getsignal(number)):
            signal.signal(number, signal.SIG_IGN if number == signal.SIGINT else signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    for name in os.listdir("/proc/self/fd"):
        if int(name) > 2 and int(name) != stream:
            with suppress(OSError):  # the one by which they were listed
                os.close(int(name))
