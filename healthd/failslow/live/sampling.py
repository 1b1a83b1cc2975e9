"""The process that samples counters: it reads, looks for a rhythm, and tells how long iterations took.

    python -m healthd.failslow.live.sampling SETUP        SETUP: JSON, see Setup

It is a process of its own because NVML can hang (docs/adr/0005): whoever started it (sampler.py) leaves it then, and
nobody kills it. It ends when its standard input does, which it looks at between two samples. What it has to say are
JSON lines on its standard output, a few a minute.

Rules: it samples only while one job alone is on this node, for a minute or longer: whose bytes are counted nobody could
tell otherwise, and a shorter job has too few iterations. NVML is open only meanwhile, and only while that job holds a
GPU open itself: a driver that nobody else holds takes seconds to open, and forgets its error counts when it is closed.

Budget: sampling may take 0.1 % of a core. The cost of a sample depends on the driver, the adapters' firmware and the
number of GPUs and ports, so that it is measured over each minute. If it is too much:

1. half as many samples, if the rhythm that was found is visible in them too;
2. half of the GPUs or ports: those of one job have one rhythm;
3. half as many samples, whatever is visible in them;
4. none at all.
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

LOOK_SECONDS = 10.0  # at the jobs
SETTLED_SECONDS = 60.0
GPUS_SECONDS = 30.0
ALIVE_SECONDS = 60.0
AGAIN_SECONDS = 60.0  # a source that could not be opened
WAIT_SECONDS, WAITS_QUIETLY = 1.0, 5  # for the process before this one

SHARE = 0.001  # of a core
OVER_SECONDS = 60.0
SLOWEST_SECONDS = 5.0  # between two samples: iterations below 100 s are not seen

Tell = Callable[[Mapping[str, Any]], None]


@dataclass(frozen=True, slots=True)
class Setup:
    """sources: of counters.SOURCES. seconds: between two samples. fake_nvml: as the daemon's setting. lock: a file that
    one such process holds at a time, "" = none. settled_seconds: a job must have been here for so long."""

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
    """began: the moment (monotonic) and the CPU seconds of this process since when is measured."""

    began: tuple[float, float]
    shares: list[float] = field(default_factory=list)  # of the last minutes, for what is told

    def share(self, now: float, cpu: float) -> float | None:
        """The share of a core since a minute ago; None while the minute lasts."""
        since, before = self.began
        if now - since < OVER_SECONDS:
            return None
        self.began = (now, cpu)
        self.shares = [*self.shares[-9:], (cpu - before) / (now - since)]
        return self.shares[-1]


def less(seconds: float, period: float | None, can_narrow: bool) -> Less:
    """What to do where it costs too much. period: the quickest rhythm that was found, seconds; None: none yet."""
    if period is not None and 2 * seconds * LEAST <= period:
        return Less.SLOWER
    if can_narrow:
        return Less.FEWER
    return Less.SLOWER if 2 * seconds <= SLOWEST_SECONDS else Less.NOTHING


class Sampling:
    """`look`: the jobs that are here; `cpu`: the CPU seconds of this process; `tell` takes one line."""

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
        """now: monotonic seconds, clock: the epoch's."""
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

    # --- whose bytes are counted

    def _look_at_jobs(self, now: float) -> None:
        self._here = self._look(self._here)
        jobs = self._here.jobs
        job = next(iter(jobs)) if len(jobs) == 1 else ""
        if job != self._job:
            self._job, self._since = job, now
            self.close()
            self._tell({"job": job})
        self._say(
            "jobs", f"{len(jobs)} jobs are on this node: whose bytes are counted nobody can tell" * (len(jobs) > 1)
        )
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
            if self._host.nvml_is_outdated:  # the library stays loaded for good: another process takes the new one
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

    # --- one sample of each

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
                f"sampling took {share:.2%} of a core, and {SHARE:.1%} is what it may take: it goes on each "
                f"{self.seconds:g} s, and iterations shorter than {seen_from(self.seconds)[0]:g} s are not seen",
            )
        if what is not Less.NOTHING:
            self._forget()
            return
        self.close()
        self.stopped = True
        self._say("rate", "")
        self._say(
            "cost",
            f"sampling is off: it took {share:.2%} of a core with a sample each {self.seconds:g} s, and {SHARE:.1%} "
            "is what it may take",
        )

    def _tell_gpus(self, clock: float) -> None:
        """What evidence.py wants to know of the GPUs, from the one process that may ask NVML while a job runs."""
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
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C in a terminal is for the daemon, which then ends us
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
                break  # the end of our standard input: nobody reads us any more
            sampling.step(time.monotonic(), time.time())
    except BrokenPipeError:
        pass
    finally:
        with suppress(BrokenPipeError):
            sampling.close()


def tell(line: Mapping[str, Any]) -> None:
    """Below PIPE_BUF for all but many GPUs, and read within seconds: this does not block for long, if ever."""
    os.write(1, json.dumps(line).encode() + b"\n")


def _wait_alone(path: str) -> bool:
    """Until no other process samples here: one that was told to end does so at once, unless it hangs in the driver.
    False: nobody reads us any more."""
    waits = 0
    while not _alone(path):
        if waits >= WAITS_QUIETLY:
            tell({"problem": ["lock", "sampling waits: an earlier process of it hangs in the driver"]})
        waits += 1
        if poll([(0, False)], WAIT_SECONDS):
            return False
    if waits > WAITS_QUIETLY:
        tell({"problem": ["lock", ""]})
    return True


def _alone(path: str) -> bool:
    """Whether no other process samples here; from now on until this one ends."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        return False
    return True


if __name__ == "__main__":
    main()
