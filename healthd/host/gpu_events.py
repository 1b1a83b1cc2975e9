"""A process that receives GPU events from NVML while a job uses a GPU.

    python -m healthd.host.gpu_events SETUP        SETUP: JSON, see Setup

It is a separate process because NVML can hang (docs/adr/0005). If it hangs, the daemon abandons it but never kills it.
NVML is open only while a process of a job has a GPU open, and only for these GPUs: they are in use anyway, and cannot
be reset. Between two waits, the process checks its standard input and ends if this is closed. It writes one JSON line
for each event to standard output, and a line each ALIVE_SECONDS.

    {"event": {...}, "since": 1.8e9}     a GpuEvent that occurred after `since` (epoch seconds)
    {"dropped": 12}                      events that were not sent, because too many came
    {"problem": "..."}                   why no events can be received, or "" if there is no problem
    {}                                   the process is alive
"""

from __future__ import annotations

import fcntl
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any, NamedTuple

from msgspec.structs import asdict

from healthd.common.codec import load
from healthd.common.errors import HealthdError
from healthd.common.values import Value
from healthd.host.host import Host, fake_nvml_opener
from healthd.host.job_processes import has_job_without_cgroup
from healthd.host.oom import raise_score
from healthd.host.open_gpus import DRIVER, OpenGpus, find_open_gpus, gpus_by_minor
from healthd.host.wakeup import poll
from healthd.nvidia.gpu_event import GpuEvent
from healthd.nvidia.nvml import Nvml, NvmlError, open_real
from healthd.nvidia.nvml_events import EventSet, open_events

JOBS_SECONDS = 5.0  # interval between searches for GPUs that jobs have open
CGROUP_CALLS = 12  # searches between two searches for jobs without cgroups
NO_CGROUPS = (
    "jobs run without Slurm's cgroups, so healthd cannot find their GPUs; enable proctrack/cgroup or task/cgroup"
)
WAIT_MILLISECONDS = 1000
ALIVE_SECONDS = 30.0
RETRY_SECONDS = 60.0  # delay after NVML failed
MAX_EVENTS, LIMIT_SECONDS = 100, 10.0  # MAX_EVENTS in LIMIT_SECONDS are sent
REPEAT_SECONDS = 1.0  # an equal event within this time is not sent
LOCK_SECONDS = 5.0

Send = Callable[[Mapping[str, Any]], None]


class Setup(Value, frozen=True):
    """root        directory with /proc and the cgroups
    fake_nvml   the daemon's setting
    lock        a file that this process locks, so that only one process receives events; it has "PID START_TIME"
    """

    root: str = "/"
    fake_nvml: str = ""
    lock: str = ""


class Limit(NamedTuple):
    """State of the rate limit: start of the period, events sent in it, events dropped since the last report, and the
    time at which each recent event was sent.
    """

    since: float = 0.0
    sent: int = 0
    dropped: int = 0
    recent: Mapping[GpuEvent, float] = {}


def admit(limit: Limit, event: GpuEvent, now: float) -> tuple[Limit, bool]:
    """Return the next state, and whether the event is sent. A repeated event is not counted as dropped."""
    if not 0.0 <= now - limit.since < LIMIT_SECONDS:
        limit = Limit(now, dropped=limit.dropped, recent=limit.recent)
    if 0.0 <= now - limit.recent.get(event, -REPEAT_SECONDS) < REPEAT_SECONDS:
        return limit, False
    if limit.sent >= MAX_EVENTS:
        return limit._replace(dropped=limit.dropped + 1), False
    recent = {seen: at for seen, at in limit.recent.items() if 0.0 <= now - at < REPEAT_SECONDS}
    return limit._replace(sent=limit.sent + 1, recent={**recent, event: now}), True


class JobGpus(NamedTuple):
    """PCI addresses of the GPUs that jobs have open, and why they cannot be found, or ""."""

    pcis: frozenset[str] = frozenset()
    problem: str = ""


class JobGpuFinder:
    """Finds the GPUs that jobs have open. `now` returns this process's CPU seconds."""

    def __init__(self, root: str, now: Callable[[], float] = time.process_time) -> None:
        self._root, self._now = root, now
        self._open = OpenGpus()
        self._addresses: Mapping[int, str] = {}
        self._calls, self._is_without_cgroups = 0, False

    def find(self) -> JobGpus:
        before = self._open.minors
        self._open = find_open_gpus(self._root, self._open, self._now)
        minors = self._open.minors
        if not minors:
            return JobGpus(problem=NO_CGROUPS if self._has_job_without_cgroup() else "")
        self._is_without_cgroups = False
        if minors != before:
            self._addresses = gpus_by_minor(Host(self._root))
        pcis = frozenset(self._addresses[minor] for minor in minors if minor in self._addresses)
        return JobGpus(pcis, "" if pcis else f"a job has /dev/nvidia{min(minors)} open, but {DRIVER} does not list it")

    def _has_job_without_cgroup(self) -> bool:
        """Search all processes, but not each time."""
        if self._calls % CGROUP_CALLS == 0:
            self._is_without_cgroups = has_job_without_cgroup(self._root)
        self._calls += 1
        return self._is_without_cgroups


class Receiver:
    """Receives events of the GPUs that `find_gpus()` returns. `open_nvml` opens NVML, and `send` takes one line."""

    def __init__(self, open_nvml: Callable[[], Nvml], find_gpus: Callable[[], JobGpus], send: Send) -> None:
        self._open_nvml, self._find_gpus, self._send = open_nvml, find_gpus, send
        self._nvml: Nvml | None = None
        self._events: EventSet | None = None
        self._pcis: frozenset[str] = frozenset()  # of the GPUs that are open
        self._limit = Limit()
        self._nvml_problem = self._reported = ""
        self._jobs_at = self._alive_at = self._retry_at = 0.0
        self._empty_at = 0.0  # epoch seconds at which NVML had no event

    @property
    def is_open(self) -> bool:
        return self._events is not None

    def step(self, now: float, clock: float) -> None:
        """Wait for one event for at most a second if NVML is open. `now` is monotonic, `clock` epoch seconds."""
        if now >= self._jobs_at:
            self._jobs_at = now + JOBS_SECONDS
            self._follow_jobs(self._find_gpus(), now, clock)
        if now >= self._alive_at:
            self._alive_at = now + ALIVE_SECONDS
            self._send({"dropped": self._limit.dropped} if self._limit.dropped else {})
            self._limit = self._limit._replace(dropped=0)
        if self._events is None:
            return
        try:
            event = self._events.wait(WAIT_MILLISECONDS)
        except NvmlError as error:
            self._fail(now, str(error))
            return
        if event is None:
            self._empty_at = clock
            return
        self._limit, is_admitted = admit(self._limit, event, now)
        if is_admitted:
            self._send({"event": asdict(event), "since": self._empty_at})

    def _follow_jobs(self, found: JobGpus, now: float, clock: float) -> None:
        if self._events is not None and found.pcis != self._pcis:
            self.close()  # NVML closes a GPU only when all are closed
        if self._events is None and found.pcis and now >= self._retry_at:
            self._empty_at = clock
            try:
                self._nvml = self._open_nvml()
                self._events, self._pcis = open_events(self._nvml, found.pcis), found.pcis
                self._nvml_problem = ""
            except HealthdError as error:
                self._fail(now, str(error))
        self._report(found.problem or self._nvml_problem)

    def _fail(self, now: float, why: str) -> None:
        self.close()
        self._retry_at, self._nvml_problem = now + RETRY_SECONDS, why
        self._report(why)

    def _report(self, problem: str) -> None:
        if problem != self._reported:
            self._reported = problem
            self._send({"problem": problem[:300]})

    def close(self) -> None:
        self._pcis = frozenset()
        events, self._events = self._events, None
        nvml, self._nvml = self._nvml, None
        for opened in (events, nvml):
            if opened is not None:
                with suppress(NvmlError):
                    opened.close()


def main() -> None:
    raise_score()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C in a terminal is for the daemon, which then ends this process
    setup = load(Setup, json.loads(sys.argv[1]))
    open_nvml = fake_nvml_opener(setup.fake_nvml) if setup.fake_nvml else open_real
    receiver = Receiver(open_nvml, JobGpuFinder(setup.root).find, send)
    try:
        if setup.lock and not _wait_for_lock(setup.lock):
            return
        while not poll([(0, False)], 0.0 if receiver.is_open else JOBS_SECONDS):
            receiver.step(time.monotonic(), time.time())
    except BrokenPipeError:
        pass
    finally:
        receiver.close()


def send(line: Mapping[str, Any]) -> None:
    """Write a line. It is shorter than PIPE_BUF, and the daemon reads within seconds."""
    os.write(1, json.dumps(line).encode() + b"\n")


def _wait_for_lock(path: str) -> bool:
    """Wait until no other process receives events, such as one that hangs in NVML. Return False if stdin is closed."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    waited = False
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            if waited:  # a process that does not hang ends within seconds
                send({"problem": "an earlier process that receives GPU events hangs in the driver"})
            waited = True
        else:
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, f"{os.getpid()} {_start_time()}\n".encode(), 0)
            if waited:
                send({"problem": ""})
            return True
        if poll([(0, False)], LOCK_SECONDS):
            return False


def _start_time() -> str:
    """Return field 22 of this process's stat. With the pid, it identifies the process until the next boot."""
    with open("/proc/self/stat", encoding="utf-8", errors="replace") as file:
        return file.read().rpartition(")")[2].split()[19]


if __name__ == "__main__":
    main()
