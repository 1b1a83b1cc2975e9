"""Asks several things at once, each in a process of its own: what hangs in one of them (a dead file server, a
broken driver) neither holds up the others nor the doctor. A process that does not answer in time is left behind: one in
D state cannot be ended."""

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

from healthd.agent.doctor.result import Line, fails
from healthd.common.text import without_class
from healthd.common.values import Value

Area = tuple[str, float, Callable[[], Sequence[Line]]]  # its name, within how many seconds, what looks


class Unanswered(Value, frozen=True):
    """why: a sentence without its full stop. pid: of the process that hangs, None if it ended without an answer."""

    why: str
    pid: int | None = None

    def line(self, topic: str) -> Line:
        return fails(topic, self.why, *((f"cat /proc/{self.pid}/stack", "dmesg") if self.pid else ()))


def ask(areas: Sequence[Area]) -> list[Line]:
    """The lines of all areas, in their order. One that did not answer in its time, or died, is a line too."""
    lines: list[Line] = []
    answers = values([(seconds, lambda look=look: tuple(look())) for _, seconds, look in areas])  # type: ignore[misc]
    for (name, _, _), answer in zip(areas, answers, strict=True):
        lines += [answer.line(name)] if isinstance(answer, Unanswered) else answer
    return lines


def values(looks: Sequence[tuple[float, Callable[[], Any]]]) -> list[Any]:
    """What each returns within its seconds, in their order; Unanswered where it hangs, raises or dies. Each runs in a
    copy of this process: what it returns comes back pickled, what it changes or prints does not."""
    sys.stdout.flush()
    sys.stderr.flush()
    began = time.monotonic()
    started = [(seconds, *_start(look)) for seconds, look in looks]
    answers: list[Any] = []
    for seconds, pid, pipe in started:
        said = _read(pipe, began + seconds)
        os.close(pipe)
        if said is None:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
            answers.append(Unanswered(f"no answer within {seconds:g} s: what is asked hangs", pid))
        else:  # our own words, through our own pipe
            answers.append(pickle.loads(said) if said else Unanswered("the process that looked died"))
        with suppress(ChildProcessError):
            os.waitpid(pid, os.WNOHANG)
    return answers


def _start(look: Callable[[], Any]) -> tuple[int, int]:
    """The process that looks, and where its answer can be read."""
    reads, writes = os.pipe()
    pid = os.fork()
    if pid:
        os.close(writes)
        return pid, reads
    try:
        os.close(reads)
        # Should it be left behind, whoever reads what we print must not wait for its end too.
        nowhere = os.open(os.devnull, os.O_RDWR)
        for descriptor in (0, 1, 2):
            os.dup2(nowhere, descriptor)
        try:
            answer = pickle.dumps(look())
        except Exception as error:  # one area's mistake must not take the others away
            why = without_class(f"{type(error).__name__}: {error}")
            answer = pickle.dumps(Unanswered(f"could not be looked at: {why}"))
        with os.fdopen(writes, "wb") as pipe:
            pipe.write(answer)
    finally:
        os._exit(0)


def _read(pipe: int, deadline: float) -> bytes | None:
    """All that is written until the other end closes; None at the deadline."""
    said = bytearray()
    while True:
        ready, _, _ = select.select([pipe], [], [], max(0.0, deadline - time.monotonic()))
        if not ready:
            return None
        chunk = os.read(pipe, 1 << 16)
        if not chunk:
            return bytes(said)
        said += chunk
