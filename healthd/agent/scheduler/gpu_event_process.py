"""The daemon's side of the process that receives GPU events from NVML (`python -m healthd.host.gpu_events`).

The process runs only with `events = true` in [nvml]. The daemon never waits for it. A process that sends nothing for
HUNG_SECONDS hangs in NVML: its pipes are closed, it is never killed, and a new process starts only after it has ended,
because it locks a file. A repair must not reset GPUs before the process has ended.
"""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from typing import Any, NamedTuple

from healthd.agent.evidence.case import Process
from healthd.agent.evidence.stuck import alive
from healthd.agent.kernel_log import gpu_events
from healthd.agent.kernel_log.gpu_events import Held
from healthd.agent.worker.client import start_time
from healthd.common.codec import ConvertError, load
from healthd.common.model import KernelEvent
from healthd.common.text import printable
from healthd.host import shortage
from healthd.host.wakeup import FOREVER
from healthd.nvidia.gpu_event import GpuEvent

log = logging.getLogger("healthd")

LOCK = "gpu_events.lock"  # in the runtime directory
HUNG_SECONDS = 150.0  # the process sends a line each 30 s
MIN_RETRY_SECONDS, MAX_RETRY_SECONDS = 1.0, 300.0
PROVEN_SECONDS = 600.0  # a process that ran this long is restarted without a longer delay
READ_BYTES = 1 << 16
MAX_LINE = 1 << 14  # bytes of an incomplete line that are kept
STOP_SECONDS = 0.2
ENDING_SECONDS = 1.0  # interval of checking whether a process has ended, while a repair waits for it
NOT_RUNNING = "not received"


class _Ending(NamedTuple):
    """A process whose pipes are closed, and which has not ended yet. `process` is None if an earlier daemon started it.

    `since` is the monotonic time of its last line.
    """

    identity: Process
    process: subprocess.Popen[bytes] | None
    since: float

    def is_alive(self) -> bool:
        if self.process is not None and self.process.poll() is not None:
            return False
        return bool(alive((self.identity,)))


_abandoned: list[subprocess.Popen[bytes]] = []  # abandoned children; the references prevent a ResourceWarning


class Received(NamedTuple):
    """Events whose line has not come, to be handled like kernel events, and names of events in AFTER_EVENTS."""

    events: tuple[KernelEvent, ...] = ()
    triggers: tuple[str, ...] = ()


class GpuEventProcess:
    """Starts and monitors the process. `problem` is the reason why no events are received, or "".

    `dropped` is the number of events that were not handled because too many came.
    """

    def __init__(
        self,
        is_enabled: bool,
        setup: Mapping[str, str],
        boot_id: str,
        monotonic: Callable[[], float],
        now: Callable[[], float],
        hung_seconds: float = HUNG_SECONDS,
        command: tuple[str, ...] = (sys.executable, "-m", "healthd.host.gpu_events"),
    ) -> None:
        self.problem = ""
        self.dropped = 0
        self._is_enabled, self._setup, self._boot_id = is_enabled, setup, boot_id
        self._monotonic, self._now, self._hung_seconds, self._command = monotonic, now, hung_seconds, command
        self._process: subprocess.Popen[bytes] | None = None
        self._incoming = b""
        self._started_at = self._last_line_at = self._start_at = 0.0
        self._retry_seconds = MIN_RETRY_SECONDS
        self._held: tuple[Held, ...] = ()
        self._ending: tuple[_Ending, ...] = ()
        self._is_kept_closed = False

    @property
    def pids(self) -> tuple[int, ...]:
        own = () if self._process is None else (self._process.pid,)
        return (*own, *(ending.identity.pid for ending in self._ending))

    @property
    def may_use_gpus(self) -> bool:
        """True while a process exists. Whether it has NVML open is not known."""
        self._forget_ended()
        return self._process is not None or bool(self._ending)

    @property
    def is_hung(self) -> bool:
        """True while a process that hangs in the driver exists."""
        self._forget_ended()
        monotonic = self._monotonic()
        return any(monotonic - ending.since >= self._hung_seconds for ending in self._ending)

    def adopt_earlier(self) -> None:
        """Find a process of an earlier daemon that still exists, also without `events = true`."""
        try:
            with open(self._setup.get("lock", ""), encoding="ascii") as file:
                pid, start = map(int, file.read(64).split())
        except (OSError, ValueError):
            return  # there was no such process since the boot
        self._ending = (*self._ending, _Ending(Process(pid, start), None, self._monotonic()))
        self._forget_ended()

    def keep_closed(self, is_kept_closed: bool) -> None:
        """End the process and start none while `is_kept_closed`, because a repair resets GPUs."""
        if is_kept_closed and not self._is_kept_closed:
            self._abandon()
        self._is_kept_closed = is_kept_closed

    @property
    def deadline(self) -> float:
        """Return the monotonic time of the next step."""
        if self._is_kept_closed and self._ending:
            return self._monotonic() + ENDING_SECONDS
        if not self._is_enabled:
            return FOREVER
        next_start = FOREVER if self._is_kept_closed else self._start_at
        next_step = next_start if self._process is None else self._last_line_at + self._hung_seconds
        if self._held:
            release = min(entry.release for entry in self._held)
            next_step = min(next_step, self._monotonic() + max(0.0, release - self._now()))
        return next_step

    def waits(self) -> Iterator[tuple[int, bool]]:
        if self._process is not None and self._process.stdout is not None:
            yield self._process.stdout.fileno(), False

    def step(self, recorded: Iterable[KernelEvent]) -> Received:
        """Advance one step. `recorded` has the events of the kernel log so far."""
        if not self._is_enabled:
            return Received()
        monotonic = self._monotonic()
        if self._process is None and not self._is_kept_closed and monotonic >= self._start_at:
            self._start(monotonic)
        names = [name for line in self._read(monotonic) for name in self._take(line)]
        if self._process is not None and monotonic - self._last_line_at >= self._hung_seconds:
            self._fail("the receiving process hangs in the driver")
        self._held, events = gpu_events.release(self._held, recorded, self._now())
        return Received(events, tuple(dict.fromkeys(names)))

    def close(self, recorded: Iterable[KernelEvent] = ()) -> tuple[KernelEvent, ...]:
        """Close the pipes, which makes the process end. Return the events that still wait for a line and that no
        recorded event covers.
        """
        self._is_enabled = False
        self._abandon()
        self._held, events = gpu_events.release(self._held, recorded, FOREVER)
        return events

    def _start(self, monotonic: float) -> None:
        self._forget_ended()
        self._incoming = b""
        try:
            self._process = subprocess.Popen(
                [*self._command, json.dumps(dict(self._setup))],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                start_new_session=True,
                cwd="/",  # `-m` looks for modules in the current directory
            )
        except OSError as error:
            shortage.record_failed_start(error)
            self._delay_start(monotonic, f"cannot start it: {error}")
            return
        assert self._process.stdout is not None
        os.set_blocking(self._process.stdout.fileno(), False)
        self._started_at = self._last_line_at = monotonic

    def _read(self, monotonic: float) -> list[bytes]:
        if self._process is None:
            return []
        assert self._process.stdout is not None
        try:
            chunk = os.read(self._process.stdout.fileno(), READ_BYTES)
        except BlockingIOError:
            return []
        if not chunk:
            self._fail("it ended")
            return []
        self._last_line_at = monotonic
        if monotonic - self._started_at >= PROVEN_SECONDS:
            self._retry_seconds = MIN_RETRY_SECONDS
        *lines, self._incoming = (self._incoming + chunk).split(b"\n")
        self._incoming = self._incoming[-MAX_LINE:]
        return lines

    def _take(self, line: bytes) -> tuple[str, ...]:
        """Handle one line of the process, and return the names of its events in AFTER_EVENTS."""
        try:
            message = json.loads(line)
            if not isinstance(message, dict):
                raise ConvertError("not an object")
            return self._take_message(message)
        except (ValueError, RecursionError, ConvertError) as error:
            self.dropped += 1
            log.warning("a GPU event could not be read: %s", printable(str(error))[:200])
            return ()

    def _take_message(self, message: dict[str, Any]) -> tuple[str, ...]:
        if "problem" in message:
            self._set_problem(printable(str(message["problem"]))[:300])
        elif self.problem.startswith(NOT_RUNNING):
            self._set_problem("")
        if isinstance(count := message.get("dropped"), int):
            self.dropped += count
            log.warning("%d GPU events were not handled, because too many came", count)
            return gpu_events.triggers(GpuEvent("", overflow=True))
        if "event" not in message:
            return ()
        event = load(GpuEvent, message["event"])
        now = self._now()
        since = message.get("since")
        held = gpu_events.hold(event, since if isinstance(since, float) else now, now, self._boot_id)
        self._held = (*self._held, *held)
        return gpu_events.triggers(event)

    def _set_problem(self, problem: str) -> None:
        if problem != self.problem:
            log.warning("GPU events: %s", problem or "received again")
        self.problem = problem

    def _fail(self, why: str) -> None:
        self._abandon()
        self._delay_start(self._monotonic(), why)

    def _delay_start(self, monotonic: float, why: str) -> None:
        self._set_problem(f"{NOT_RUNNING}: {why}")
        self._start_at = monotonic + self._retry_seconds
        self._retry_seconds = min(2 * self._retry_seconds, MAX_RETRY_SECONDS)

    def _abandon(self) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                with suppress(OSError):
                    pipe.close()
        with suppress(subprocess.TimeoutExpired):
            process.wait(STOP_SECONDS)
            return
        if (start := start_time(process.pid)) is not None:
            _abandoned.append(process)
            self._ending = (*self._ending, _Ending(Process(process.pid, start), process, self._last_line_at))

    def _forget_ended(self) -> None:
        if self._ending:
            self._ending = tuple(ending for ending in self._ending if ending.is_alive())
            _abandoned[:] = [process for process in _abandoned if process.poll() is None]
