"""The live process: receives ranks' steps, samples counters, evaluates jobs, and reports to the daemon's check.

    python -m healthd.failslow.live FD SETUP      FD: a stream socket to the daemon; SETUP: JSON {"locations": ...,
    "settings": ...}

After a reload, the daemon sends a line {"settings": ...}. The process ends when the stream is closed. It writes one
file, its report. It sends single bytes to the daemon: ALIVE each minute, and CHANGED when the contents of the file
changed. The process has a low priority and limited memory; the daemon monitors its memory and CPU use
(agent/scheduler/failslow_process.py). The process never opens the driver, so it can be killed at any time. A separate
process queries NVML (sampling.py, docs/adr/0030).
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
from healthd.common.guard import describe_error
from healthd.failslow.live.advice_files import AdviceWriter
from healthd.failslow.live.document import FILE, Dropped, LiveDocument, clean_sentence, to_json
from healthd.failslow.live.evidence import NodeChange
from healthd.failslow.live.job_gpus import find_gpu
from healthd.failslow.live.jobs import Jobs
from healthd.failslow.live.node import Readings, read_node
from healthd.failslow.live.node_reading import Reading
from healthd.failslow.live.receiver import SOCKET, Disconnected, Receiver
from healthd.failslow.live.settings import LiveSettings, Locations, live_settings
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
REPORT_SECONDS = 30.0  # interval between updates of the lost time
EVALUATION_SECONDS = 1.0  # minimum interval between evaluations
NOTIFY_SECONDS = 10.0  # minimum interval between runs of the daemon's check, even if jobs report more often
MAX_DATA_BYTES = 512 << 20
NICE = 10
MAX_LINE_BYTES = 1 << 16
FILE_MODE = 0o640
SAMPLING_LOCK = "sampling.lock"


def main() -> None:
    raise_score()
    limit_resources()
    # ignore Ctrl-C in a terminal: the daemon also receives it and then ends this process
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    channel = socket.socket(fileno=int(sys.argv[1]))
    channel.setblocking(False)
    setup = json.loads(sys.argv[2])
    live = LiveProcess(load(Locations, setup["locations"]), channel)
    try:
        live.reconfigure(live_settings(setup["settings"]))
        while live.wait():
            live.step()
    finally:
        live.close()


def limit_resources() -> None:
    """Lower the priority and limit the memory, so that jobs come first.

    If systemd's unit forbids both system calls (@resources in SystemCallFilter=), only the daemon's own memory limit
    applies.
    """
    with suppress(OSError):
        os.nice(NICE)
    with suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_DATA, (MAX_DATA_BYTES, MAX_DATA_BYTES))


class LiveProcess:
    def __init__(self, locations: Locations, channel: socket.socket) -> None:
        self.locations = locations
        self.channel = channel
        self.host = Host(locations.root)
        self.jobs = Jobs(LiveSettings(), self._find_gpu, self._find_changes)
        self.receiver: Receiver | None = None
        self.advice: AdviceWriter | None = None
        self.sampler: Sampler | None = None
        self.readings = Readings(self._read_node)
        self.problems: dict[str, str] = {}  # reason for each source without data
        self._incoming = b""
        self._alive_at = self._evaluate_at = self._report_at = 0.0
        self._notified_at = -NOTIFY_SECONDS
        self._has_changes = self._is_paused = self._is_notification_due = False
        self._paused_until = 0.0
        self._reported_dropped = Dropped()
        self._reported_shortages: tuple[str, ...] = ()

    # --- waiting

    def wait(self) -> bool:
        """Sleep until something is due. Return False if the daemon closed the stream."""
        now = time.monotonic()
        deadlines = [self._alive_at]
        waits = [(self.channel.fileno(), False)]
        if self.receiver is not None:
            if now >= self.receiver.poll_at:
                waits.append((self.receiver.fileno(), False))
            else:  # messages wait for the next poll; this limits the CPU use of this process
                deadlines.append(self.receiver.poll_at)
        if self.sampler is not None:
            deadlines.append(self.sampler.deadline)
        deadlines.append(self.readings.deadline)
        if self._has_changes:
            deadlines.append(self._evaluate_at)
        if self.jobs.slow_jobs or self._is_paused:
            deadlines.append(self._report_at)
        ready = poll(waits, min(deadlines, default=FOREVER) - now)
        return self.channel.fileno() not in ready or self._read_commands()

    def _read_commands(self) -> bool:
        try:
            chunk = self.channel.recv(MAX_LINE_BYTES)
        except BlockingIOError:
            return True
        except OSError:
            return False
        if not chunk:
            return False
        *lines, self._incoming = (self._incoming + chunk).split(b"\n")
        for line in lines:
            self.reconfigure(live_settings(json.loads(line)["settings"]))
        return True

    def _notify(self, byte: bytes) -> None:
        """Send a byte to the daemon. If the channel is full, it already contains this byte."""
        with suppress(BlockingIOError, ConnectionError):
            self.channel.send(byte)

    # --- one step

    def step(self) -> None:
        now, clock = time.monotonic(), time.time()
        if now >= self._alive_at:
            self._notify(ALIVE)
            self._alive_at = now + ALIVE_SECONDS
            self._has_changes |= self.jobs.end_quiet_jobs(clock, self.sampler.job if self.sampler is not None else "")
            self._has_changes |= self._dropped() != self._reported_dropped
            self._has_changes |= tuple(shortage.problems(clock)) != self._reported_shortages
        if self.receiver is not None and now >= self.receiver.poll_at:
            self._receive(self.receiver, now, clock)
        if self.sampler is not None and now >= self.sampler.deadline:
            self._sample(self.sampler, now)
        self.readings.step(now, self.jobs.has_jobs or (self.sampler is not None and self.sampler.job != ""))
        if (self._has_changes and now >= self._evaluate_at) or (
            (self.jobs.slow_jobs or self._is_paused) and now >= self._report_at
        ):
            self._evaluate(now, clock)

    def _receive(self, receiver: Receiver, now: float, clock: float) -> None:
        for message in receiver.step(now):
            if isinstance(message, Disconnected):
                self._has_changes |= self.jobs.remove_connection(message.connection, message.job, clock)
            else:
                self._has_changes |= self.jobs.add_step(
                    message.connection, message.pid, message.job, message.step, clock
                )

    def _sample(self, sampler: Sampler, now: float) -> None:
        before = sampler.problems, sampler.share
        for sample in sampler.step(now):
            self._has_changes |= self.jobs.add_sample(sample)
        self._has_changes |= (sampler.problems, sampler.share) != before

    def _evaluate(self, now: float, clock: float) -> None:
        self._has_changes, self._evaluate_at, self._report_at = False, now + EVALUATION_SECONDS, now + REPORT_SECONDS
        pause = detection_pause.active_pause(self.locations.runtime_dir, clock)
        self._is_paused, self._paused_until = pause is not None, pause.until if pause else 0.0
        changed = self.jobs.evaluate(self._is_paused)
        self._write_document(clock)
        self._write_advice(clock)
        self._is_notification_due |= changed
        if self._is_notification_due and now >= self._notified_at + NOTIFY_SECONDS:
            self._is_notification_due, self._notified_at = False, now
            self._notify(CHANGED)
        self._has_changes |= self._is_notification_due

    def _write_advice(self, clock: float) -> None:
        if self.receiver is None or self.advice is None:
            return
        problem = self.advice.step(self.jobs.records(), clock)
        if problem is not None:
            self._log_problem("advice", problem)

    def _write_document(self, clock: float) -> None:
        sampler = () if self.sampler is None else self.sampler.problems
        self._reported_shortages = tuple(shortage.problems(clock))
        document = LiveDocument(
            written=round(clock, 3),
            paused_until=self._paused_until,
            jobs=self.jobs.records(),
            recent=tuple(self.jobs.recent),
            dropped=self._dropped(),
            lost=self.jobs.lost_seconds(),
            sampling=None if self.sampler is None else self.sampler.share,
            problems=tuple(map(clean_sentence, (*self.problems.values(), *sampler, *self._reported_shortages))),
        )
        self._reported_dropped = document.dropped
        try:
            replace_file(os.path.join(self.locations.runtime_dir, FILE), to_json(document), FILE_MODE)
        except OSError as error:  # for example a full tmpfs; the next attempt follows soon
            self._log_problem("file", error)

    def _dropped(self) -> Dropped:
        return Dropped() if self.receiver is None else self.receiver.dropped_counts()

    # --- settings

    def reconfigure(self, settings: LiveSettings) -> None:
        """Apply settings at the start and after a reload. Data about running jobs is kept."""
        previous = self.jobs.settings
        self.jobs.reconfigure(settings)
        if self.receiver is not None and not settings.client:
            self._close_receiver()
        if settings.client and self.receiver is None:
            self.problems.pop("client", None)
            try:
                path = os.path.join(self.locations.runtime_dir, SOCKET)
                self.receiver = Receiver(path, self.locations.root, settings.max_jobs, settings.max_ranks)
                self.advice = AdviceWriter(self.locations.runtime_dir, self.receiver.find_user)
            except OSError as error:
                self._log_problem("client", error)
        if self.advice is not None:
            self.advice.overheads = Overheads(s4=settings.restart_seconds)
        if self.receiver is not None:
            self.receiver.max_jobs, self.receiver.max_ranks = settings.max_jobs, settings.max_ranks
        if self.sampler is not None and (settings.sample, settings.sample_seconds) != (
            previous.sample,
            previous.sample_seconds,
        ):
            self.sampler.close()
            self.sampler = None
        if settings.sample and self.sampler is None:
            self.sampler = self._make_sampler(settings)
        self._has_changes = True

    def _make_sampler(self, settings: LiveSettings) -> Sampler | None:
        from healthd.failslow.live.sampler import Sampler
        from healthd.failslow.live.sampling import Setup

        lock = os.path.join(self.locations.runtime_dir, SAMPLING_LOCK)
        return Sampler(
            Setup(settings.sample, settings.sample_seconds, self.locations.root, self.locations.fake_nvml, lock)
        )

    def _log_problem(self, source: str, error: BaseException) -> None:
        if source not in self.problems:
            print(f"healthd.failslow.live: {source}: {describe_error(error)}", file=sys.stderr, flush=True)
        self.problems[source] = f"{source}: {describe_error(error)}"

    # --- node data for a slow job

    def _find_gpu(self, pid: int, job: str, local_rank: int) -> str:
        try:
            return find_gpu(self.host, pid, job, local_rank)
        # unexpected contents of one user's /proc files must not end the monitoring of all other jobs
        except Exception as error:
            self._log_problem("gpu", error)
            return ""

    def _find_changes(self, gpu: str, cause: Cause, since: float | None) -> tuple[NodeChange, ...]:
        try:
            return self.readings.find_changes(since, cause, gpu, time.monotonic())
        except Exception as error:  # as above; the slow job is still reported
            self._log_problem("evidence", error)
            return ()

    def _read_node(self) -> Reading:
        return read_node(self.host, self.sampler.gpus if self.sampler is not None else {})

    def _close_receiver(self) -> None:
        if self.receiver is not None:
            self.receiver.close()
        if self.advice is not None:
            self.advice.close()
        self.receiver = self.advice = None

    def close(self) -> None:
        self._close_receiver()
        if self.sampler is not None:
            self.sampler.close()
        self.channel.close()
