"""A process that samples counters, detects a rhythm and reports how long iterations took.

    python -m healthd.failslow.live.sampling SETUP        SETUP: JSON, see Setup

It is a separate process because NVML can hang (docs/adr/0005). If it hangs, its parent (sampler.py) abandons it but
never kills it. Between two samples, the process checks its standard input and ends if this is closed. It writes a few
JSON lines per minute to standard output.

It samples only while exactly one job is on this node, and only if the job has been there for at least a minute. With
several jobs, the counters could not be attributed to one of them, and a shorter job has too few iterations. NVML is
open only while a job is sampled and has a GPU open itself. If a driver has no other user, opening it takes seconds, and
closing it loses its error counts.

Budget: sampling may take 0.1 % of a core. The cost of a sample depends on the driver, the adapters' firmware and the
number of GPUs and ports. It is therefore measured over each minute. If it is too high:

1. take half as many samples, if the detected rhythm remains visible;
2. sample half of the GPUs or ports, because all GPUs and ports of a job have the same rhythm;
3. take half as many samples, even if the rhythm is no longer visible;
4. take no samples.
"""

from __future__ import annotations

import enum
import fcntl
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from healthd.common.codec import load
from healthd.common.errors import HealthdError
from healthd.failslow.live.counters import GPU_SOURCES, IB, CounterTotal, GpuCounters, IbPorts, Source
from healthd.failslow.live.iterations import MIN_PERIOD, STRIDE, Iteration, Iterations, detectable_periods
from healthd.failslow.live.job_gpus import RunningJobs, find_jobs
from healthd.host.host import Host, fake_nvml_opener
from healthd.host.oom import raise_score
from healthd.host.wakeup import FOREVER, poll

JOBS_SECONDS = 10.0  # interval between queries for jobs
SETTLED_SECONDS = 60.0
GPUS_SECONDS = 30.0
ALIVE_SECONDS = 60.0
RETRY_SECONDS = 60.0  # delay after a source could not be opened
WAIT_SECONDS, QUIET_WAITS = 1.0, 5  # time to wait for the previous sampling process to end

MAX_SHARE = 0.001  # share of a core
BUDGET_SECONDS = 60.0
MAX_INTERVAL_SECONDS = 5.0  # longest interval between samples; iterations below 100 s are then not visible

Send = Callable[[Mapping[str, Any]], None]


@dataclass(frozen=True, slots=True)
class Setup:
    """The process's configuration.

    Attributes:
        sources: names from counters.SOURCES.
        seconds: interval between two samples.
        fake_nvml: the daemon's setting.
        lock: a file that a sampling process locks, so that only one process samples at a time; "" for none.
        settled_seconds: minimum time that a job must have been on this node.
    """

    sources: tuple[str, ...]
    seconds: float
    root: str = "/"
    fake_nvml: str = ""
    lock: str = ""
    settled_seconds: float = SETTLED_SECONDS


class Reduction(enum.Enum):
    SLOWER = "slower"
    FEWER = "fewer"
    STOP = "nothing"


@dataclass(slots=True)
class Budget:
    """The CPU budget. `started` has the monotonic time and this process's CPU seconds at the start of the
    measurement."""

    started: tuple[float, float]
    shares: list[float] = field(default_factory=list)  # shares in the last minutes

    def share(self, now: float, cpu: float) -> float | None:
        """Return the share of a core used in the last minute, or None if the minute is not over."""
        since, before = self.started
        if now - since < BUDGET_SECONDS:
            return None
        self.started = (now, cpu)
        self.shares = [*self.shares[-9:], (cpu - before) / (now - since)]
        return self.shares[-1]


def choose_reduction(seconds: float, period: float | None, can_narrow: bool) -> Reduction:
    """Return the next way to reduce the cost.

    Args:
        period: shortest detected period in seconds, or None.
    """
    if period is not None and 2 * seconds * MIN_PERIOD <= period:
        return Reduction.SLOWER
    if can_narrow:
        return Reduction.FEWER
    return Reduction.SLOWER if 2 * seconds <= MAX_INTERVAL_SECONDS else Reduction.STOP


class Sampling:
    """Samples the counters.

    `find_jobs` returns the jobs on this node, `cpu` returns this process's CPU seconds, and `send_line` takes one line.
    """

    def __init__(
        self,
        setup: Setup,
        host: Host,
        send_line: Send,
        find_jobs: Callable[[RunningJobs], RunningJobs],
        cpu: Callable[[], float] = time.process_time,
    ) -> None:
        self.setup = setup
        self.seconds = setup.seconds
        self.stopped = False
        self._host = host
        self._send = send_line
        self._find_jobs = find_jobs
        self._cpu = cpu
        gpus = [name for name in GPU_SOURCES if name in setup.sources]
        self._sources: dict[str, Source] = {}
        if gpus:
            self._sources["nvml"] = GpuCounters(host, gpus)
        if IB in setup.sources:
            self._sources[IB] = IbPorts(host)
        self._opened: dict[str, Source] = {}
        self._retry_at: dict[str, float] = {}
        self._running = RunningJobs(frozenset())
        self._job, self._since = "", 0.0
        self._totals: dict[str, CounterTotal] = {}
        self._iterations: dict[str, Iterations] = {}
        self._budget = Budget((0.0, 0.0))
        self._jobs_at = self._sample_at = self._gpus_at = self._alive_at = 0.0
        self._reported: dict[str, str] = {}

    @property
    def deadline(self) -> float:
        if self.stopped:
            return FOREVER
        return min(self._jobs_at, self._alive_at, self._sample_at if self._opened else FOREVER)

    def step(self, now: float, clock: float) -> None:
        """Perform the steps that are due.

        Args:
            now: monotonic seconds.
            clock: epoch seconds.
        """
        if now >= self._alive_at:
            self._send({"alive": clock})
            self._alive_at = now + ALIVE_SECONDS
        if now >= self._jobs_at:
            self._jobs_at = now + JOBS_SECONDS
            self._check_jobs(now)
        if self._opened and now >= self._sample_at:
            self._sample_at = max(self._sample_at + self.seconds, now + self.seconds / 2)
            self._sample(now, clock)
            self._limit_cost(now)
        if "nvml" in self._opened and now >= self._gpus_at:
            self._gpus_at = now + GPUS_SECONDS
            self._send_gpus(clock)

    def close(self) -> None:
        for name in list(self._opened):
            self._close(name)

    # --- the job that is sampled

    def _check_jobs(self, now: float) -> None:
        self._running = self._find_jobs(self._running)
        jobs = self._running.jobs
        job = next(iter(jobs)) if len(jobs) == 1 else ""
        if job != self._job:
            self._job, self._since = job, now
            self.close()
            self._send({"job": job})
        self._report_problem(
            "jobs", f"{len(jobs)} jobs on this node, so counters cannot be attributed to a job" * (len(jobs) > 1)
        )
        if not job or now - self._since < self.setup.settled_seconds:
            return
        for name, source in self._sources.items():
            is_usable = name != "nvml" or self._running.gpu_process != 0
            if not is_usable and name in self._opened:
                self._close(name)
            elif is_usable and name not in self._opened and now >= self._retry_at.get(name, 0.0):
                self._open_source(name, source, now)

    def _open_source(self, name: str, source: Source, now: float) -> None:
        try:
            missing = source.open()
        except (OSError, HealthdError) as error:
            self._report_problem(name, f"{name}: {error}")
            self._retry_at[name] = now + RETRY_SECONDS
            self._close(name)
            # the old library cannot be unloaded, so end; the next process loads the new library
            if self._host.nvml_is_outdated:
                self.close()
                self.stopped = True
            return
        self._report_problem(name, missing and f"{name}: {missing}")
        self._opened[name] = source
        self._sample_at = now
        self._budget = Budget((now, self._cpu()))

    def _close(self, name: str) -> None:
        self._sources[name].close()
        self._opened.pop(name, None)
        self._reset()

    def _reset(self) -> None:
        self._totals.clear()
        self._iterations.clear()

    # --- samples

    def _sample(self, now: float, clock: float) -> None:
        for opened, source in list(self._opened.items()):
            try:
                read = source.read()
            except (OSError, HealthdError) as error:
                self._report_problem(opened, f"{opened}: {error}")
                self._retry_at[opened] = now + RETRY_SECONDS
                self._close(opened)
                continue
            for name, counts in read.items():
                total = self._totals.setdefault(name, CounterTotal()).add(counts)
                if total is None:
                    continue
                iterations = self._iterations.setdefault(name, Iterations(self.seconds))
                for iteration in iterations.add(now, total):
                    self._send_iteration(name, iteration, clock - now, len(counts))

    def _send_iteration(self, name: str, iteration: Iteration, offset: float, parts: int) -> None:
        covered_seconds = STRIDE * iteration.step
        self._send(
            {
                "sample": [self._job, name, round(iteration.time + offset, 3), iteration.seconds],
                "steps": max(1, round(covered_seconds / iteration.seconds)),
                "parts": parts,
            }
        )

    def _limit_cost(self, now: float) -> None:
        share = self._budget.share(now, self._cpu())
        if share is None:
            return
        self._send({"share": share, "seconds": self.seconds})
        if share <= MAX_SHARE:
            return
        periods = [period for item in self._iterations.values() if (period := item.period_seconds())]
        reduction = choose_reduction(self.seconds, min(periods, default=None), can_narrow=True)
        if reduction is Reduction.FEWER and not sum(source.narrow() for source in self._opened.values()):
            reduction = choose_reduction(self.seconds, None, can_narrow=False)
        if reduction is Reduction.SLOWER:
            self.seconds *= 2
            self._report_problem(
                "rate",
                f"sampling used {share:.2%} of a core (limit {MAX_SHARE:.1%}). It now samples every "
                f"{self.seconds:g} s, and iterations shorter than {detectable_periods(self.seconds)[0]:g} s are not "
                "detected",
            )
        if reduction is not Reduction.STOP:
            self._reset()
            return
        self.close()
        self.stopped = True
        self._report_problem("rate", "")
        self._report_problem(
            "cost",
            f"sampling is off because it used {share:.2%} of a core with a sample every {self.seconds:g} s (limit "
            f"{MAX_SHARE:.1%})",
        )

    def _send_gpus(self, clock: float) -> None:
        """Send the GPU values that evidence.py needs. Only this process may query NVML while a job runs."""
        found: dict[str, Mapping[str, Any]] = {}
        for gpu in self._host.gpus():
            with suppress(HealthdError, ValueError):
                link = gpu.pcie_link()
                found[gpu.pci] = {
                    "celsius": gpu.temperature(),
                    "sm_mhz": gpu.sm_clock_mhz(),
                    "reasons": gpu.clock_event_reasons(),
                    "pcie": [link.generation, link.width],
                }
        self._send({"gpus": found, "time": clock})

    def _report_problem(self, source: str, sentence: str) -> None:
        if self._reported.get(source, "") != sentence:
            self._reported[source] = sentence
            self._send({"problem": [source, sentence]})


def main() -> None:
    raise_score()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C in a terminal is for the daemon, which then ends this process
    setup = load(Setup, json.loads(sys.argv[1]))
    try:
        if setup.lock and not _wait_for_lock(setup.lock):
            return
    except BrokenPipeError:
        return
    host = Host(setup.root, fake_nvml_opener(setup.fake_nvml) if setup.fake_nvml else None)
    sampling = Sampling(
        setup, host, send, lambda last: find_jobs(setup.root, bool(set(setup.sources) & {*GPU_SOURCES}), last)
    )
    try:
        while not sampling.stopped:
            if poll([(0, False)], sampling.deadline - time.monotonic()):
                break  # standard input is closed, so the parent has ended or abandoned this process
            sampling.step(time.monotonic(), time.time())
    except BrokenPipeError:
        pass
    finally:
        with suppress(BrokenPipeError):
            sampling.close()


def send(line: Mapping[str, Any]) -> None:
    """Write a line.

    This does not block for long: the parent reads within seconds and, unless there are many GPUs, a line is shorter
    than PIPE_BUF.
    """
    os.write(1, json.dumps(line).encode() + b"\n")


def _wait_for_lock(path: str) -> bool:
    """Wait until no other process is sampling on this node. Return False if standard input is closed.

    The other process ends as soon as its standard input is closed, unless it hangs in the driver.
    """
    waits = 0
    while not _try_lock(path):
        if waits >= QUIET_WAITS:
            send({"problem": ["lock", "sampling waits because an earlier sampling process hangs in the driver"]})
        waits += 1
        if poll([(0, False)], WAIT_SECONDS):
            return False
    if waits > QUIET_WAITS:
        send({"problem": ["lock", ""]})
    return True


def _try_lock(path: str) -> bool:
    """Return True if no other process is sampling on this node. This process then holds the lock until it ends."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        return False
    return True


if __name__ == "__main__":
    main()
