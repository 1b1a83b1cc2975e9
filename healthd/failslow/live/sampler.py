"""Receives samples of this node's counters from a separate process (sampling.py).

This module never blocks, and it never kills the process. If the process hangs in NVML, it is abandoned and its pipes
are closed. No other sampling process is started while the hanging process exists (docs/adr/0005).
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Any

from healthd.common.codec import dump
from healthd.common.text import printable
from healthd.failslow.live.sampling import ALIVE_SECONDS, Setup
from healthd.failslow.live.series import Sample
from healthd.failslow.model import Kind
from healthd.host.wakeup import FOREVER

STEP_SECONDS = 2.0
SILENT_SECONDS = 5 * ALIVE_SECONDS
RESTART_SECONDS = 60.0  # delay after the process ends; doubled after each failure
MAX_RESTART_SECONDS = 3600.0
MAX_PARTIAL_LINE = 1 << 18  # maximum bytes of an incomplete line
READ_BYTES = 1 << 16
MAX_SENTENCE = 300

Gpu = Mapping[str, Any]

_closing: list[subprocess.Popen[bytes]] = []  # not waited for


class Sampler:
    """The client of the sampling process.

    Attributes:
        deadline: time of the next step (monotonic).
        problems: the reasons why sources provide no data.
        job: the job on this node if there is exactly one, otherwise "".
        share: share of a core used in the last minute.
        gpus: latest NVML values of each GPU, by PCI address: {"celsius", "sm_mhz", "reasons", "pcie"}.
    """

    def __init__(
        self, setup: Setup, command: tuple[str, ...] = (sys.executable, "-m", "healthd.failslow.live.sampling")
    ) -> None:
        self.setup = setup
        self.deadline = 0.0
        self.job = ""
        self.share = 0.0
        self.gpus: Mapping[str, Gpu] = {}
        self._command = command
        self._process: subprocess.Popen[bytes] | None = None
        self._hung: subprocess.Popen[bytes] | None = None  # a process that hung; its pipes are closed
        self._incoming = b""
        self._last_output_at = 0.0
        self._restart_at, self._restart_seconds = 0.0, RESTART_SECONDS
        self._problems: dict[str, str] = {}

    @property
    def problems(self) -> tuple[str, ...]:
        return tuple(self._problems.values())

    def step(self, now: float) -> Iterator[Sample]:
        """Yield the samples since the last step."""
        self.deadline = now + STEP_SECONDS
        if self._hung is not None and self._hung.poll() is not None:
            self._hung = None
            self._problems.pop("hang", None)
        if self._process is None:
            if now < self._restart_at or self._hung is not None:
                return
            self._start(now)
        yield from self._read(now)
        if self._process is not None and now - self._last_output_at > SILENT_SECONDS:
            self._abandon()

    def close(self) -> None:
        """Close the pipes. The process then ends between two samples."""
        self._close_pipes()
        _closing.extend(process for process in (self._process, self._hung) if process is not None)
        self._process = self._hung = None

    # --- inside

    def _start(self, now: float) -> None:
        _closing[:] = [process for process in _closing if process.poll() is None]  # reaps ended processes
        self._last_output_at, self._incoming = now, b""
        self._restart_at = now + self._restart_seconds
        try:
            self._process = subprocess.Popen(
                [*self._command, json.dumps(dump(self.setup))],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                start_new_session=True,
                cwd="/",  # `-m` searches for modules in the current directory
            )
        except OSError as error:
            self._problems["process"] = f"cannot start sampling: {error.strerror}"
            return
        assert self._process.stdout is not None
        os.set_blocking(self._process.stdout.fileno(), False)

    def _read(self, now: float) -> Iterator[Sample]:
        if self._process is None:
            return
        assert self._process.stdout is not None
        try:
            chunk = os.read(self._process.stdout.fileno(), READ_BYTES)
        except BlockingIOError:
            return
        if not chunk:
            self._handle_end(now)
            return
        self._last_output_at = now
        *lines, self._incoming = (self._incoming + chunk).split(b"\n")
        self._incoming = self._incoming[-MAX_PARTIAL_LINE:]
        for line in lines:
            with suppress(ValueError, KeyError, TypeError, AttributeError, RecursionError):  # incomplete or invalid
                yield from self._receive(json.loads(line))

    def _receive(self, message: Mapping[str, Any]) -> Iterator[Sample]:
        if "sample" in message:
            job, series, time, seconds = message["sample"]
            self._restart_seconds = RESTART_SECONDS
            yield Sample(str(job), str(series), float(time), float(seconds), Kind.ITERATION, int(message["steps"]))
        elif "job" in message:
            self.job = str(message["job"])
            self.gpus = {}
        elif "gpus" in message:
            self.gpus = dict(message["gpus"])
        elif "share" in message:
            self.share = float(message["share"])
            self._problems.pop("process", None)
        elif "problem" in message:
            source, sentence = message["problem"]
            self._problems.pop(source, None)
            if sentence:
                self._problems[source] = printable(sentence)[:MAX_SENTENCE]

    def _handle_end(self, now: float) -> None:
        """Handle the end of the process.

        The process either reported that it stopped because of its cost, or it failed and is restarted.
        """
        assert self._process is not None
        process, self.job, self.gpus = self._process, "", {}
        self._close_pipes()
        self._process = None
        if process.poll() is None:
            self._hung = process  # it has closed its output and is about to end
        if "cost" in self._problems:
            self._restart_at = FOREVER
            return
        self._restart_at, self._restart_seconds = (
            now + self._restart_seconds,
            min(2 * self._restart_seconds, MAX_RESTART_SECONDS),
        )
        self._problems["process"] = "sampling ended unexpectedly and will be restarted"

    def _abandon(self) -> None:
        self._close_pipes()
        self._hung, self._process = self._process, None
        self.job, self.gpus = "", {}
        self._problems["hang"] = "sampling may hang in the driver; it resumes once the hanging process has ended"

    def _close_pipes(self) -> None:
        if self._process is not None:
            for pipe in (self._process.stdin, self._process.stdout):
                if pipe is not None:
                    with suppress(OSError):
                        pipe.close()
