"""Samples of this node's counters, from a separate process (sampling.py).

This module never blocks and never kills. A process that hangs in NVML is abandoned with closed pipes, and no other one
is started while it exists (docs/adr/0005).
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
AGAIN_SECONDS = 60.0  # after its end; doubled after each failure
LONGEST_SECONDS = 3600.0
MOST_BYTES = 1 << 18  # of an incomplete line
READ_BYTES = 1 << 16
LONGEST_SENTENCE = 300

Gpu = Mapping[str, Any]

_closed: list[subprocess.Popen[bytes]] = []  # not waited for


class Sampler:
    """Client of the sampling process.

    deadline: time of the next step (monotonic). problems: why a source gives no data. job: the only job on this node,
    or "". share: share of a core in the last minute. gpus: latest NVML values of each GPU, by PCI address: {"celsius",
    "sm_mhz", "reasons", "pcie"}.
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
        self._left: subprocess.Popen[bytes] | None = None  # a process that hung; its pipes are closed
        self._incoming = b""
        self._heard = 0.0
        self._again_at, self._again = 0.0, AGAIN_SECONDS
        self._trouble: dict[str, str] = {}

    @property
    def problems(self) -> tuple[str, ...]:
        return tuple(self._trouble.values())

    def step(self, now: float) -> Iterator[Sample]:
        """Yield the samples since the last step."""
        self.deadline = now + STEP_SECONDS
        if self._left is not None and self._left.poll() is not None:
            self._left = None
            self._trouble.pop("hang", None)
        if self._process is None:
            if now < self._again_at or self._left is not None:
                return
            self._start(now)
        yield from self._read(now)
        if self._process is not None and now - self._heard > SILENT_SECONDS:
            self._leave()

    def close(self) -> None:
        """Close the pipes. The process then ends between two samples."""
        self._close_pipes()
        _closed.extend(process for process in (self._process, self._left) if process is not None)
        self._process = self._left = None

    # --- inside

    def _start(self, now: float) -> None:
        _closed[:] = [process for process in _closed if process.poll() is None]  # reaps ended processes
        self._heard, self._incoming = now, b""
        self._again_at = now + self._again
        try:
            self._process = subprocess.Popen(
                [*self._command, json.dumps(dump(self.setup))],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                start_new_session=True,
                cwd="/",  # `-m` searches modules in the current directory
            )
        except OSError as error:
            self._trouble["process"] = f"cannot start sampling: {error.strerror}"
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
            self._ended(now)
            return
        self._heard = now
        *lines, self._incoming = (self._incoming + chunk).split(b"\n")
        self._incoming = self._incoming[-MOST_BYTES:]
        for line in lines:
            with suppress(ValueError, KeyError, TypeError, AttributeError, RecursionError):  # incomplete or invalid
                yield from self._hear(json.loads(line))

    def _hear(self, said: Mapping[str, Any]) -> Iterator[Sample]:
        if "sample" in said:
            job, series, time, seconds = said["sample"]
            self._again = AGAIN_SECONDS
            yield Sample(str(job), str(series), float(time), float(seconds), Kind.ITERATION, int(said["steps"]))
        elif "job" in said:
            self.job = str(said["job"])
            self.gpus = {}
        elif "gpus" in said:
            self.gpus = dict(said["gpus"])
        elif "share" in said:
            self.share = float(said["share"])
            self._trouble.pop("process", None)
        elif "problem" in said:
            what, sentence = said["problem"]
            self._trouble.pop(what, None)
            if sentence:
                self._trouble[what] = printable(sentence)[:LONGEST_SENTENCE]

    def _ended(self, now: float) -> None:
        """Handle the end of the process: it stopped because of its cost and reported that, or it failed and is
        restarted.
        """
        assert self._process is not None
        process, self.job, self.gpus = self._process, "", {}
        self._close_pipes()
        self._process = None
        if process.poll() is None:
            self._left = process  # it has closed its output and is about to end
        if "cost" in self._trouble:
            self._again_at = FOREVER
            return
        self._again_at, self._again = now + self._again, min(2 * self._again, LONGEST_SECONDS)
        self._trouble["process"] = "sampling ended unexpectedly and will be restarted"

    def _leave(self) -> None:
        self._close_pipes()
        self._left, self._process = self._process, None
        self.job, self.gpus = "", {}
        self._trouble["hang"] = "sampling may hang in the driver; it resumes once that process has ended"

    def _close_pipes(self) -> None:
        if self._process is not None:
            for pipe in (self._process.stdin, self._process.stdout):
                if pipe is not None:
                    with suppress(OSError):
                        pipe.close()
