"""The daemon's side of the live process (`python -m healthd.failslow.live`), which monitors jobs for fail-slow.

The process runs only while the check `failslow` has a source. The daemon never waits for the process, and reads only
single bytes from it (defined in healthd/failslow/live/process.py). A process that hangs, exits or uses too much memory
is ended and restarted, with increasing delays. The check reads the results from a file.
"""

from __future__ import annotations

import json
import logging
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from healthd.agent.settings.configured import Configured
from healthd.common.codec import dump
from healthd.common.model import RunName
from healthd.host import shortage
from healthd.host.wakeup import FOREVER

log = logging.getLogger("healthd")

RUN = RunName("failslow")
HUNG_SECONDS = 180.0  # the process sends a byte each minute
MIN_RETRY_SECONDS, MAX_RETRY_SECONDS = 1.0, 300.0
PROVEN_SECONDS = 600.0  # a process that ran this long is restarted without a longer delay
MAX_MEMORY_BYTES = 384 << 20
STOP_SECONDS = 0.5
CHANGED = b"c"


class FailslowProcess:
    """Starts and monitors the live process. `problem` is the reason why a required process is not running, or ""."""

    def __init__(
        self,
        configured: Configured,
        monotonic: Callable[[], float],
        hung_seconds: float = HUNG_SECONDS,
        max_memory_bytes: int = MAX_MEMORY_BYTES,
    ) -> None:
        self.problem = ""
        self._monotonic = monotonic
        self._hung_seconds, self._max_memory_bytes = hung_seconds, max_memory_bytes
        self._process: subprocess.Popen[bytes] | None = None
        self._channel: socket.socket | None = None
        self._unkillable: subprocess.Popen[bytes] | None = (
            None  # a process that SIGKILL does not end; while it exists, no other is started
        )
        self._started_at = self._last_message_at = self._start_at = 0.0
        self._retry_seconds = MIN_RETRY_SECONDS
        self.reconfigure(configured)

    def reconfigure(self, configured: Configured) -> None:
        """Apply the settings at the start and after a reload. The process keeps its state for running jobs."""
        settings = configured.settings
        self._locations = {"runtime_dir": settings.runtime_dir, "root": settings.root, "fake_nvml": settings.nvml.fake}
        self._check_settings = _read_check_settings(configured)
        if not self._check_settings:
            self._end()
            self.problem, self._retry_seconds, self._start_at = "", MIN_RETRY_SECONDS, 0.0
        elif self._channel is not None:
            try:
                self._channel.send(json.dumps({"settings": self._check_settings}).encode() + b"\n")
            except OSError:  # the process hangs or has just exited; the next process gets the settings when it starts
                self._end()

    @property
    def pids(self) -> tuple[int, ...]:
        return () if self._process is None else (self._process.pid,)

    @property
    def deadline(self) -> float:
        if self._process is not None:
            return self._last_message_at + self._hung_seconds
        return self._start_at if self._check_settings else FOREVER

    def waits(self) -> Iterator[tuple[int, bool]]:
        if self._channel is not None:
            yield self._channel.fileno(), False

    def step(self) -> bool:
        """Advance one step. Return True if the file that the check reads has changed."""
        received = self._receive()
        now = self._monotonic()
        if self._process is not None:
            if now - self._last_message_at >= self._hung_seconds:
                self._fail(f"no message for {now - self._last_message_at:.0f} s")
            elif received and (used := _memory_bytes(self._process.pid)) > self._max_memory_bytes:
                self._fail(f"it used {used >> 20} MiB of memory")
        elif self._check_settings and now >= self._start_at:
            self._start(now)
        return CHANGED in received

    def close(self) -> None:
        """Close the channel, which makes the process exit. Kill the process if it does not."""
        self._check_settings = {}
        self._end()
        if self._unkillable is not None:
            self._unkillable.returncode = 0  # avoid a warning, because the process may outlive the daemon

    def _start(self, now: float) -> None:
        if self._unkillable is not None:
            if self._unkillable.poll() is None:
                self._start_at = now + MAX_RETRY_SECONDS
                return
            self._unkillable = None
        try:
            own_end, child_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        except OSError as error:
            shortage.record_failed_start(error)
            self._delay_start(now, f"cannot start it: {error}")
            return
        setup = json.dumps({"locations": self._locations, "settings": self._check_settings})
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "healthd.failslow.live", str(child_end.fileno()), setup],
                pass_fds=[child_end.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                start_new_session=True,
                cwd="/",  # `-m` looks for modules in the current directory
            )
        except OSError as error:
            shortage.record_failed_start(error)
            own_end.close()
            self._delay_start(now, f"cannot start it: {error}")
            return
        finally:
            child_end.close()
        own_end.setblocking(False)
        self._channel = own_end
        self._started_at = self._last_message_at = now

    def _receive(self) -> bytes:
        if self._channel is None or self._process is None:
            return b""
        try:
            received = self._channel.recv(4096)
        except BlockingIOError:
            return b""
        except OSError:
            received = b""
        if not received:
            self._fail("it ended")
            return b""
        self._last_message_at = self._monotonic()
        if self.problem:
            log.info("fail-slow monitoring is running again")
        self.problem = ""
        return received

    def _fail(self, why: str) -> None:
        now = self._monotonic()
        if now - self._started_at >= PROVEN_SECONDS:
            self._retry_seconds = MIN_RETRY_SECONDS
        self._end()
        self._delay_start(now, why)

    def _delay_start(self, now: float, why: str) -> None:
        log.warning("fail-slow monitoring is not running: %s; next attempt in %.0f s", why, self._retry_seconds)
        self.problem = f"fail-slow monitoring is not running: {why}"
        self._start_at = now + self._retry_seconds
        self._retry_seconds = min(2 * self._retry_seconds, MAX_RETRY_SECONDS)

    def _end(self) -> None:
        process, self._process = self._process, None
        channel, self._channel = self._channel, None
        if channel is not None:
            channel.close()
        if process is None:
            return
        try:
            process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            try:
                process.wait(STOP_SECONDS)
            except subprocess.TimeoutExpired:
                self._unkillable = process


def _read_check_settings(configured: Configured) -> Mapping[str, Any]:
    """Return the check's settings, or {} if monitoring is not configured."""
    table = configured.loaded.tables.get(RUN, {})
    return dump(table) if table.get("client") or table.get("sample") else {}


def _memory_bytes(pid: int) -> int:
    """Return a process's resident memory, or 0 if it is unknown."""
    try:
        with open(f"/proc/{pid}/statm", encoding="ascii") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError, IndexError):
        return 0
