"""The live process: receives steps from ranks, samples counters, evaluates jobs, and reports to the daemon's check in
one file.

    python -m healthd.failslow.live FD SETUP      FD: a stream socket to the daemon; SETUP: JSON {"place": ...,
    "watched": ...}

After a reload the daemon sends a line {"watched": ...}. The process ends when the stream is closed. It sends single
bytes to the daemon: ALIVE each minute, and CHANGED when the content of the file changed. It has a low priority and
limited memory, and the daemon monitors both (agent/scheduler/failslow_process.py). It never opens the driver, so it can
be killed at any time. A separate process queries NVML (sampling.py, docs/adr/0030).
"""

from __future__ import annotations

import json
import os
import resource
import signal
import socket
import sys
import time
from contextlib import suppress
from typing import TYPE_CHECKING

from healthd.common import detection_pause
from healthd.common.atomic_files import replace_file
from healthd.common.codec import load
from healthd.common.guard import words
from healthd.failslow.live.advice_files import Advising
from healthd.failslow.live.document import FILE, Dropped, Told, as_text, sentence
from healthd.failslow.live.evidence import Said
from healthd.failslow.live.job_gpus import gpu_of
from healthd.failslow.live.jobs import Jobs
from healthd.failslow.live.node import Readings, read
from healthd.failslow.live.node_reading import Reading
from healthd.failslow.live.receiver import SOCKET, Left, Receiver
from healthd.failslow.live.settings import Place, Watched, watched
from healthd.failslow.mitigation.planner import Overheads
from healthd.failslow.model import Cause
from healthd.host import shortage
from healthd.host.host import Host
from healthd.host.oom import raise_score
from healthd.host.wakeup import FOREVER, poll

if TYPE_CHECKING:
    from healthd.failslow.live.sampler import Sampler

ALIVE, CHANGED = b".", b"c"
ALIVE_SECONDS = 60.0
TOLD_SECONDS = 30.0  # interval for updates of the lost time
JUDGED_SECONDS = 1.0  # minimum interval between evaluations
SAID_SECONDS = 10.0  # minimum interval between runs of the daemon's check, whatever a job reports
MOST_DATA_BYTES = 512 << 20
NICE = 10
MOST_LINE_BYTES = 1 << 16
FILE_MODE = 0o640
SAMPLING_LOCK = "sampling.lock"


def main() -> None:
    raise_score()
    bound()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C in a terminal is for the daemon, which then ends this process
    channel = socket.socket(fileno=int(sys.argv[1]))
    channel.setblocking(False)
    setup = json.loads(sys.argv[2])
    live = Live(load(Place, setup["place"]), channel)
    try:
        live.reconfigure(watched(setup["watched"]))
        while live.wait():
            live.step()
    finally:
        live.close()


def bound() -> None:
    """Lower the priority and limit the memory, so that jobs come first.

    If the unit forbids both calls (@resources in its SystemCallFilter), only the daemon's own memory limit applies.
    """
    with suppress(OSError):
        os.nice(NICE)
    with suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_DATA, (MOST_DATA_BYTES, MOST_DATA_BYTES))


class Live:
    def __init__(self, place: Place, channel: socket.socket) -> None:
        self.place = place
        self.channel = channel
        self.host = Host(place.root)
        self.jobs = Jobs(Watched(), self._gpu_of, self._evidence)
        self.receiver: Receiver | None = None
        self.advising: Advising | None = None
        self.sampler: Sampler | None = None
        self.readings = Readings(self._read_node)
        self.problems: dict[str, str] = {}  # source without data -> reason
        self._incoming = b""
        self._alive_at = self._judge_at = self._tell_at = 0.0
        self._said_at = -SAID_SECONDS
        self._news = self._paused = self._unsaid = False
        self._until = 0.0
        self._told_dropped = Dropped()
        self._reported_shortages: tuple[str, ...] = ()

    # --- waiting

    def wait(self) -> bool:
        """Sleep until something is due. Return False if the daemon closed the stream."""
        now = time.monotonic()
        moments = [self._alive_at]
        waits = [(self.channel.fileno(), False)]
        if self.receiver is not None:
            if now >= self.receiver.look_at:
                waits.append((self.receiver.fileno(), False))
            else:  # messages wait for the next poll: this limits the CPU use of this process
                moments.append(self.receiver.look_at)
        if self.sampler is not None:
            moments.append(self.sampler.deadline)
        moments.append(self.readings.deadline)
        if self._news:
            moments.append(self._judge_at)
        if self.jobs.slow or self._paused:
            moments.append(self._tell_at)
        ready = poll(waits, min(moments, default=FOREVER) - now)
        return self.channel.fileno() not in ready or self._hear_daemon()

    def _hear_daemon(self) -> bool:
        try:
            chunk = self.channel.recv(MOST_LINE_BYTES)
        except BlockingIOError:
            return True
        except OSError:
            return False
        if not chunk:
            return False
        *lines, self._incoming = (self._incoming + chunk).split(b"\n")
        for line in lines:
            self.reconfigure(watched(json.loads(line)["watched"]))
        return True

    def _say(self, byte: bytes) -> None:
        """Send a byte to the daemon. If the channel is full, the same byte is already in it."""
        with suppress(BlockingIOError, ConnectionError):
            self.channel.send(byte)

    # --- one step

    def step(self) -> None:
        now, clock = time.monotonic(), time.time()
        if now >= self._alive_at:
            self._say(ALIVE)
            self._alive_at = now + ALIVE_SECONDS
            self._news |= self.jobs.forget_quiet(clock, self.sampler.job if self.sampler is not None else "")
            self._news |= self._dropped() != self._told_dropped
            self._news |= tuple(shortage.problems(clock)) != self._reported_shortages
        if self.receiver is not None and now >= self.receiver.look_at:
            self._hear(self.receiver, now, clock)
        if self.sampler is not None and now >= self.sampler.deadline:
            self._sample(self.sampler, now)
        self.readings.step(now, self.jobs.watches_any or (self.sampler is not None and self.sampler.job != ""))
        if (self._news and now >= self._judge_at) or ((self.jobs.slow or self._paused) and now >= self._tell_at):
            self._judge(now, clock)

    def _hear(self, receiver: Receiver, now: float, clock: float) -> None:
        for heard in receiver.step(now):
            if isinstance(heard, Left):
                self._news |= self.jobs.left(heard.connection, heard.job, clock)
            else:
                self._news |= self.jobs.heard(heard.connection, heard.pid, heard.job, heard.said, clock)

    def _sample(self, sampler: Sampler, now: float) -> None:
        before = sampler.problems, sampler.share
        for sample in sampler.step(now):
            self._news |= self.jobs.sampled(sample)
        self._news |= (sampler.problems, sampler.share) != before

    def _judge(self, now: float, clock: float) -> None:
        self._news, self._judge_at, self._tell_at = False, now + JUDGED_SECONDS, now + TOLD_SECONDS
        pause = detection_pause.standing(self.place.runtime_dir, clock)
        self._paused, self._until = pause is not None, pause.until if pause else 0.0
        changed = self.jobs.judge(self._paused)
        self._write(clock)
        self._advise(clock)
        self._unsaid |= changed
        if self._unsaid and now >= self._said_at + SAID_SECONDS:
            self._unsaid, self._said_at = False, now
            self._say(CHANGED)
        self._news |= self._unsaid

    def _advise(self, clock: float) -> None:
        if self.receiver is None or self.advising is None:
            return
        problem = self.advising.step(self.jobs.told(), clock)
        if problem is not None:
            self._complain("advice", problem)

    def _write(self, clock: float) -> None:
        sampler = () if self.sampler is None else self.sampler.problems
        self._reported_shortages = tuple(shortage.problems(clock))
        told = Told(
            written=round(clock, 3),
            paused_until=self._until,
            jobs=self.jobs.told(),
            recent=tuple(self.jobs.recent),
            dropped=self._dropped(),
            lost=self.jobs.lost(),
            sampling=None if self.sampler is None else self.sampler.share,
            problems=tuple(map(sentence, (*self.problems.values(), *sampler, *self._reported_shortages))),
        )
        self._told_dropped = told.dropped
        try:
            replace_file(os.path.join(self.place.runtime_dir, FILE), as_text(told), FILE_MODE)
        except OSError as error:  # for example a full tmpfs: the next attempt follows soon
            self._complain("file", error)

    def _dropped(self) -> Dropped:
        return Dropped() if self.receiver is None else self.receiver.said_dropped()

    # --- settings

    def reconfigure(self, wanted: Watched) -> None:
        """Apply settings at the start and after a reload. The data of running jobs is kept."""
        before = self.jobs.watched
        self.jobs.reconfigure(wanted)
        if self.receiver is not None and not wanted.client:
            self._close_receiver()
        if wanted.client and self.receiver is None:
            self.problems.pop("client", None)
            try:
                path = os.path.join(self.place.runtime_dir, SOCKET)
                self.receiver = Receiver(path, self.place.root, wanted.max_jobs, wanted.max_ranks)
                self.advising = Advising(self.place.runtime_dir, self.receiver.owner)
            except OSError as error:
                self._complain("client", error)
        if self.advising is not None:
            self.advising.overheads = Overheads(s4=wanted.restart_seconds)
        if self.receiver is not None:
            self.receiver.jobs, self.receiver.ranks = wanted.max_jobs, wanted.max_ranks
        if self.sampler is not None and (wanted.sample, wanted.sample_seconds) != (
            before.sample,
            before.sample_seconds,
        ):
            self.sampler.close()
            self.sampler = None
        if wanted.sample and self.sampler is None:
            self.sampler = self._make_sampler(wanted)
        self._news = True

    def _make_sampler(self, wanted: Watched) -> Sampler | None:
        from healthd.failslow.live.sampler import Sampler
        from healthd.failslow.live.sampling import Setup

        lock = os.path.join(self.place.runtime_dir, SAMPLING_LOCK)
        return Sampler(Setup(wanted.sample, wanted.sample_seconds, self.place.root, self.place.fake_nvml, lock))

    def _complain(self, what: str, error: BaseException) -> None:
        if what not in self.problems:
            print(f"healthd.failslow.live: {what}: {words(error)}", file=sys.stderr, flush=True)
        self.problems[what] = f"{what}: {words(error)}"

    # --- data of the node for a slow job

    def _gpu_of(self, pid: int, job: str, local_rank: int) -> str:
        try:
            return gpu_of(self.host, pid, job, local_rank)
        except Exception as error:  # content of a user's /proc files must not end the monitoring of all other jobs
            self._complain("gpu", error)
            return ""

    def _evidence(self, gpu: str, cause: Cause, since: float | None) -> tuple[Said, ...]:
        try:
            return self.readings.evidence(since, cause, gpu, time.monotonic())
        except Exception as error:  # as above: the slow job is reported in any case
            self._complain("evidence", error)
            return ()

    def _read_node(self) -> Reading:
        return read(self.host, self.sampler.gpus if self.sampler is not None else {})

    def _close_receiver(self) -> None:
        if self.receiver is not None:
            self.receiver.close()
        if self.advising is not None:
            self.advising.close()
        self.receiver = self.advising = None

    def close(self) -> None:
        self._close_receiver()
        if self.sampler is not None:
            self.sampler.close()
        self.channel.close()
