"""The daemon's side of the live process (`python -m healthd.failslow.live`), which watches jobs for fail-slow.

It is there only while the check `failslow` has a source. The daemon never waits for it and reads single bytes from it
only (healthd/failslow/live/process.py has them): one that hangs, ends or takes too much memory is ended and started
again, later each time. What it found the check reads from a file.
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
HUNG_SECONDS = 180.0  # it says something each minute
FIRST_AGAIN_SECONDS, LONGEST_AGAIN_SECONDS = 1.0, 300.0
PROVEN_SECONDS = 600.0  # one that lived so long is started again at once
MOST_MEMORY_BYTES = 384 << 20
STOP_SECONDS = 0.5
CHANGED = b"c"


class Watching:
    """`trouble`: why it does not run though it should, "" = it does or need not."""

    def __init__(
        self,
        configured: Configured,
        monotonic: Callable[[], float],
        hung_seconds: float = HUNG_SECONDS,
        most_memory_bytes: int = MOST_MEMORY_BYTES,
    ) -> None:
        self.problem = ""
        self._monotonic = monotonic
        self._hung_seconds, self._most_memory_bytes = hung_seconds, most_memory_bytes
        self._process: subprocess.Popen[bytes] | None = None
        self._channel: socket.socket | None = None
        self._left: subprocess.Popen[bytes] | None = None  # not even SIGKILL ends it: nobody takes its place
        self._began = self._spoke = self._start_at = 0.0
        self._again_seconds = FIRST_AGAIN_SECONDS
        self.reconfigure(configured)

    def reconfigure(self, configured: Configured) -> None:
        """At the start and after a reload, which costs nothing of what was learned of running jobs."""
        settings = configured.settings
        self._place = {"runtime_dir": settings.runtime_dir, "root": settings.root, "fake_nvml": settings.nvml.fake}
        self._wanted = _wanted(configured)
        if not self._wanted:
            self._end()
            self.problem, self._again_seconds, self._start_at = "", FIRST_AGAIN_SECONDS, 0.0
        elif self._channel is not None:
            try:
                self._channel.send(json.dumps({"watched": self._wanted}).encode() + b"\n")
            except OSError:  # it hangs, or ended just now: the next one is told at its start
                self._end()

    @property
    def pids(self) -> tuple[int, ...]:
        return () if self._process is None else (self._process.pid,)

    @property
    def deadline(self) -> float:
        if self._process is not None:
            return self._spoke + self._hung_seconds
        return self._start_at if self._wanted else FOREVER

    def waits(self) -> Iterator[tuple[int, bool]]:
        if self._channel is not None:
            yield self._channel.fileno(), False

    def step(self) -> bool:
        """True: what the check reads has changed."""
        said = self._hear()
        now = self._monotonic()
        if self._process is not None:
            if now - self._spoke >= self._hung_seconds:
                self._fail(f"it said nothing for {now - self._spoke:.0f} s")
            elif said and (used := _memory_bytes(self._process.pid)) > self._most_memory_bytes:
                self._fail(f"it took {used >> 20} MiB of memory")
        elif self._wanted and now >= self._start_at:
            self._start(now)
        return CHANGED in said

    def close(self) -> None:
        """It ends by itself when its channel does; one that does not is killed."""
        self._wanted = {}
        self._end()
        if self._left is not None:
            self._left.returncode = 0  # nobody waits for it: it outlives us on purpose

    def _start(self, now: float) -> None:
        if self._left is not None:
            if self._left.poll() is None:
                self._start_at = now + LONGEST_AGAIN_SECONDS
                return
            self._left = None
        try:
            ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        except OSError as error:
            shortage.record_failed_start(error)
            self._put_off(now, f"it cannot be started: {error}")
            return
        setup = json.dumps({"place": self._place, "watched": self._wanted})
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "healthd.failslow.live", str(theirs.fileno()), setup],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                start_new_session=True,
                cwd="/",  # `-m` looks for modules in the current directory
            )
        except OSError as error:
            shortage.record_failed_start(error)
            ours.close()
            self._put_off(now, f"it cannot be started: {error}")
            return
        finally:
            theirs.close()
        ours.setblocking(False)
        self._channel = ours
        self._began = self._spoke = now

    def _hear(self) -> bytes:
        if self._channel is None or self._process is None:
            return b""
        try:
            said = self._channel.recv(4096)
        except BlockingIOError:
            return b""
        except OSError:
            said = b""
        if not said:
            self._fail("it ended")
            return b""
        self._spoke = self._monotonic()
        if self.problem:
            log.info("fail-slow is watched again")
        self.problem = ""
        return said

    def _fail(self, why: str) -> None:
        now = self._monotonic()
        if now - self._began >= PROVEN_SECONDS:
            self._again_seconds = FIRST_AGAIN_SECONDS
        self._end()
        self._put_off(now, why)

    def _put_off(self, now: float, why: str) -> None:
        log.warning("fail-slow is not watched: %s; the next attempt is in %.0f s", why, self._again_seconds)
        self.problem = f"fail-slow is not watched: {why}"
        self._start_at = now + self._again_seconds
        self._again_seconds = min(2 * self._again_seconds, LONGEST_AGAIN_SECONDS)

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
                self._left = process


def _wanted(configured: Configured) -> Mapping[str, Any]:
    """The check's table, {} where nothing is to be watched."""
    table = configured.loaded.tables.get(RUN, {})
    return dump(table) if table.get("client") or table.get("sample") else {}


def _memory_bytes(pid: int) -> int:
    """What of its memory is in RAM."""
    try:
        with open(f"/proc/{pid}/statm", encoding="ascii") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError, IndexError):
        return 0
