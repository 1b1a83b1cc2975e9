"""Run tests in parallel, each in its own process.

A test that hangs (on a dead file server or a broken driver) does not delay the other tests or the doctor. A process
that does not answer in time is abandoned, because a process in D state cannot be killed.
"""

from __future__ import annotations

import os
import pickle
import select
import signal
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

from healthd.agent.doctor.result import Line, failed_line
from healthd.common.text import strip_error_class
from healthd.common.values import Value

Area = tuple[str, float, Callable[[], Sequence[Line]]]  # name, time limit in seconds, test


class Unanswered(Value, frozen=True):
    """A missing answer. `why` is a sentence without its full stop. `pid` is that of the hung process, or None if the
    process exited.
    """

    why: str
    pid: int | None = None

    def line(self, topic: str) -> Line:
        return failed_line(topic, self.why, *((f"cat /proc/{self.pid}/stack", "dmesg") if self.pid else ()))


def run_areas(areas: Sequence[Area]) -> list[Line]:
    """Return the lines for all areas, in order. An area that times out or dies gets a line that reports this."""
    lines: list[Line] = []
    answers = call_all([(seconds, lambda test=test: tuple(test())) for _, seconds, test in areas])  # type: ignore[misc]
    for (name, _, _), answer in zip(areas, answers, strict=True):
        lines += [answer.line(name)] if isinstance(answer, Unanswered) else answer
    return lines


def call_all(calls: Sequence[tuple[float, Callable[[], Any]]]) -> list[Any]:
    """Return the calls' results, in order. If a call hangs, raises or dies, its result is Unanswered.

    Each call runs in a fork of this process. Only the pickled result is passed back; changes and output are lost.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    began = time.monotonic()
    started = [(seconds, *_start(call)) for seconds, call in calls]
    answers: list[Any] = []
    for seconds, pid, pipe in started:
        output = _read(pipe, began + seconds)
        os.close(pipe)
        if output is None:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
            answers.append(Unanswered(f"no answer within {seconds:g} s: the test hangs", pid))
        else:  # safe: pickled by this program and read from its own pipe
            answers.append(pickle.loads(output) if output else Unanswered("the test process died"))
        with suppress(ChildProcessError):
            os.waitpid(pid, os.WNOHANG)
    return answers


def _start(call: Callable[[], Any]) -> tuple[int, int]:
    """Start a process for the call. Return its pid and the pipe for its result."""
    read_end, write_end = os.pipe()
    pid = os.fork()
    if pid:
        os.close(write_end)
        return pid, read_end
    try:
        os.close(read_end)
        # If the process is left behind, a reader of our output must not wait for it to exit.
        null = os.open(os.devnull, os.O_RDWR)
        for descriptor in (0, 1, 2):
            os.dup2(null, descriptor)
        try:
            answer = pickle.dumps(call())
        except Exception as error:  # an exception in one area must not affect the others
            why = strip_error_class(f"{type(error).__name__}: {error}")
            answer = pickle.dumps(Unanswered(f"could not be tested: {why}"))
        with os.fdopen(write_end, "wb") as pipe:
            pipe.write(answer)
    finally:
        os._exit(0)


def _read(pipe: int, deadline: float) -> bytes | None:
    """Return all data until the other end closes, or None if the deadline passes."""
    output = bytearray()
    while True:
        ready, _, _ = select.select([pipe], [], [], max(0.0, deadline - time.monotonic()))
        if not ready:
            return None
        chunk = os.read(pipe, 1 << 16)
        if not chunk:
            return bytes(output)
        output += chunk
