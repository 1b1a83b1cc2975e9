"""The process that samples counters, detects a rhythm, and reports how long iterations took.

    python -m healthd.failslow.live.sampling SETUP        SETUP: JSON, see Setup

It is a separate process because NVML can hang (docs/adr/0005): the parent (sampler.py) then abandons it and never kills
it. It ends when its standard input is closed, which it checks between two samples. Its output is JSON lines on standard
output, a few per minute.

Rules: it samples only while exactly one job has been on this node for at least a minute. With several jobs, the
counters could not be attributed, and a shorter job has too few iterations. NVML is open only during that time, and only
while the job itself has a GPU open. A driver without other users takes seconds to open, and loses its error counts when
it is closed.

Budget: sampling may take 0.1 % of a core. The cost of a sample depends on the driver, the adapters' firmware and the
number of GPUs and ports. It is therefore measured over each minute. If it is too high:

1. half as many samples, if the detected rhythm remains visible;
2. half of the GPUs or ports: those of one job have the same rhythm;
3. half as many samples, even if the rhythm is no longer visible;
4. no samples.
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
from healthd.failslow.live.counters import IB, OF_GPUS, GpuCounters, IbPorts, Source, Total
from healthd.failslow.live.iterations import LEAST, STRIDE, Iteration, Iterations, seen_from
from healthd.failslow.live.job_gpus import Here, look
from healthd.host.host import Host, opener_of_fake
from healthd.host.oom import raise_score
from healthd.host.wakeup import FOREVER, poll

LOOK_SECONDS = 10.0  # between two queries of the jobs
SETTLED_SECONDS = 60.0
GPUS_SECONDS = 30.0
ALIVE_SECONDS = 60.0
AGAIN_SECONDS = 60.0  # after a source could not be opened
WAIT_SECONDS, WAITS_QUIETLY = 1.0, 5  # for the previous process

SHARE = 0.001  # of a core
OVER_SECONDS = 60.0
SLOWEST_SECONDS = 5.0  # between two samples: iterations below 100 s are not visible

Tell = Callable[[Mapping[str, Any]], None]


@dataclass(frozen=True, slots=True)
class Setup:
    """Setup of the process.

    sources: of counters.SOURCES. seconds: between two samples. fake_nvml: the daemon's setting. lock: a file that only
    one such process locks at a time, "" for none. settled_seconds: minimum time that a job must have been here.
    """

    sources: tuple[str, ...]
    seconds: float
    root: str = "/"
    fake_nvml: str = ""
    lock: str = ""
    settled_seconds: float = SETTLED_SECONDS


class Less(enum.Enum):
    SLOWER = "slower"
    FEWER = "fewer"
    NOTHING = "nothing"


@dataclass(slots=True)
class Budget:
    """CPU budget. started: monotonic time and CPU seconds of this process at the begin of the measurement."""

    began: tuple[float, float]
    shares: list[float] = field(default_factory=list)  # shares of the last minutes

    def share(self, now: float, cpu: float) -> float | None:
        """Return the share of a core in the last minute, or None while the minute lasts."""
        since, before = self.began
        if now - since < OVER_SECONDS:
            return None
        self.began = (now, cpu)
        self.shares = [*self.shares[-9:], (cpu - before) / (now - since)]
        return self.shares[-1]


def less(seconds: float, period: float | None, can_narrow: bool) -> Less:
    """Return how to reduce the cost. period: shortest detected period in seconds, or None."""
    if period is not None and 2 * seconds * LEAST <= period:
        return Less.SLOWER
    if can_narrow:
        return Less.FEWER
    return Less.SLOWER if 2 * seconds <= SLOWEST_SECONDS else Less.NOTHING


class Sampling:
    """Sampler. `find_jobs` returns the jobs on this node, `cpu` the CPU seconds of this process; `send_line` takes one
    line.
    """

    def __init__(
        self,
        setup: Setup,
        host: Host,
        tell: Tell,
        look: Callable[[Here], Here],
        cpu: Callable[[], float] = time.process_time,
    ) -> None:
        self.setup = setup
        self.seconds = setup.seconds
        self.stopped = False
        self._host = host
        self._tell = tell
        self._look = look
        self._cpu = cpu
        gpus = [name for name in OF_GPUS if name in setup.sources]
        self._sources: dict[str, Source] = {}
        if gpus:
            self._sources["nvml"] = GpuCounters(host, gpus)
        if IB in setup.sources:
            self._sources[IB] = IbPorts(host)
        self._open: dict[str, Source] = {}
        self._again: dict[str, float] = {}
        self._here = Here(frozenset())
        self._job, self._since = "", 0.0
        self._totals: dict[str, Total] = {}
        self._iterations: dict[str, Iterations] = {}
        self._budget = Budget((0.0, 0.0))
        self._look_at = self._sample_at = self._gpus_at = self._alive_at = 0.0
        self._said: dict[str, str] = {}

    @property
    def deadline(self) -> float:
        if self.stopped:
            return FOREVER
        return min(self._look_at, self._alive_at, self._sample_at if self._open else FOREVER)

    def step(self, now: float, clock: float) -> None:
        """Do what is due. now: monotonic seconds, clock: epoch seconds."""
        if now >= self._alive_at:
            self._tell({"alive": clock})
            self._alive_at = now + ALIVE_SECONDS
        if now >= self._look_at:
            self._look_at = now + LOOK_SECONDS
            self._look_at_jobs(now)
        if self._open and now >= self._sample_at:
            self._sample_at = max(self._sample_at + self.seconds, now + self.seconds / 2)
            self._sample(now, clock)
            self._keep_cheap(now)
        if "nvml" in self._open and now >= self._gpus_at:
            self._gpus_at = now + GPUS_SECONDS
            self._tell_gpus(clock)

    def close(self) -> None:
        for name in list(self._open):
            self._close(name)

    # --- the job that is sampled

    def _look_at_jobs(self, now: float) -> None:
        self._here = self._look(self._here)
        jobs = self._here.jobs
        job = next(iter(jobs)) if len(jobs) == 1 else ""
        if job != self._job:
            self._job, self._since = job, now
            self.close()
            self._tell({"job": job})
        self._say("jobs", f"{len(jobs)} jobs on this node: counters cannot be attributed to a job" * (len(jobs) > 1))
        if not job or now - self._since < self.setup.settled_seconds:
            return
        for name, source in self._sources.items():
            wanted = name != "nvml" or self._here.gpu_process != 0
            if not wanted and name in self._open:
                self._close(name)
            elif wanted and name not in self._open and now >= self._again.get(name, 0.0):
                self._open_source(name, source, now)

    def _open_source(self, name: str, source: Source, now: float) -> None:
        try:
            lacks = source.open()
        except (OSError, HealthdError) as error:
            self._say(name, f"{name}: {error}")
            self._again[name] = now + AGAIN_SECONDS
            self._close(name)
            if self._host.nvml_is_outdated:  # the library cannot be unloaded: a new process loads the new one
                self.close()
                self.stopped = True
            return
        self._say(name, lacks and f"{name}: {lacks}")
        self._open[name] = source
        self._sample_at = now
        self._budget = Budget((now, self._cpu()))

    def _close(self, name: str) -> None:
        self._sources[name].close()
        self._open.pop(name, None)
        self._forget()

    def _forget(self) -> None:
        self._totals.clear()
        self._iterations.clear()

    # --- samples

    def _sample(self, now: float, clock: float) -> None:
        for opened, source in list(self._open.items()):
            try:
                read = source.read()
            except (OSError, HealthdError) as error:
                self._say(opened, f"{opened}: {error}")
                self._again[opened] = now + AGAIN_SECONDS
                self._close(opened)
                continue
            for name, counts in read.items():
                total = self._totals.setdefault(name, Total()).add(counts)
                if total is None:
                    continue
                iterations = self._iterations.setdefault(name, Iterations(self.seconds))
                for one in iterations.add(now, total):
                    self._tell_iteration(name, one, clock - now, len(counts))

    def _tell_iteration(self, name: str, one: Iteration, offset: float, parts: int) -> None:
        looked_at = STRIDE * one.step
        self._tell(
            {
                "sample": [self._job, name, round(one.time + offset, 3), one.seconds],
                "steps": max(1, round(looked_at / one.seconds)),
                "parts": parts,
            }
        )

    def _keep_cheap(self, now: float) -> None:
        share = self._budget.share(now, self._cpu())
        if share is None:
            return
        self._tell({"share": share, "seconds": self.seconds})
        if share <= SHARE:
            return
        periods = [period for one in self._iterations.values() if (period := one.period_seconds())]
        what = less(self.seconds, min(periods, default=None), can_narrow=True)
        if what is Less.FEWER and not sum(source.narrow() for source in self._open.values()):
            what = less(self.seconds, None, can_narrow=False)
        if what is Less.SLOWER:
            self.seconds *= 2
            self._say(
                "rate",
                f"sampling used {share:.2%} of a core (limit {SHARE:.1%}): it continues every "
                f"{self.seconds:g} s, and iterations shorter than {seen_from(self.seconds)[0]:g} s are not detected",
            )
        if what is not Less.NOTHING:
            self._forget()
            return
        self.close()
        self.stopped = True
        self._say("rate", "")
        self._say(
            "cost",
            f"sampling is off: it used {share:.2%} of a core with a sample every {self.seconds:g} s (limit "
            f"{SHARE:.1%})",
        )

    def _tell_gpus(self, clock: float) -> None:
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
        self._tell({"gpus": found, "time": clock})

    def _say(self, what: str, sentence: str) -> None:
        if self._said.get(what, "") != sentence:
            self._said[what] = sentence
            self._tell({"problem": [what, sentence]})


def main() -> None:
    raise_score()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C in a terminal is for the daemon, which then ends this process
    setup = load(Setup, json.loads(sys.argv[1]))
    try:
        if setup.lock and not _wait_alone(setup.lock):
            return
    except BrokenPipeError:
        return
    host = Host(setup.root, opener_of_fake(setup.fake_nvml) if setup.fake_nvml else None)
    sampling = Sampling(setup, host, tell, lambda last: look(setup.root, bool(set(setup.sources) & {*OF_GPUS}), last))
    try:
        while not sampling.stopped:
            if poll([(0, False)], sampling.deadline - time.monotonic()):
                break  # standard input is closed: the parent has ended or abandoned this process
            sampling.step(time.monotonic(), time.time())
    except BrokenPipeError:
        pass
    finally:
        with suppress(BrokenPipeError):
            sampling.close()


def tell(line: Mapping[str, Any]) -> None:
    """Write a line. It is shorter than PIPE_BUF except with many GPUs, and the parent reads within seconds: no long
    blocking.
    """
    os.write(1, json.dumps(line).encode() + b"\n")


def _wait_alone(path: str) -> bool:
    """Wait until no other process samples here. Return False if standard input is closed.

    A process that was asked to end does so at once, unless it hangs in the driver.
    """
    waits = 0
    while not _alone(path):
        if waits >= WAITS_QUIETLY:
            tell({"problem": ["lock", "sampling waits: an earlier sampling process hangs in the driver"]})
        waits += 1
        if poll([(0, False)], WAIT_SECONDS):
            return False
    if waits > WAITS_QUIETLY:
        tell({"problem": ["lock", ""]})
    return True


def _alone(path: str) -> bool:
    """Return True if no other process samples here. The lock is then held until this process ends."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        return False
    return True


if __name__ == "__main__":
    main()
