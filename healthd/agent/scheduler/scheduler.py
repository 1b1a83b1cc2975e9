"""Scheduler: which checks run, how often, and which ones run at once after an event."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from healthd.agent.conditions.store import Memory
from healthd.agent.scheduler.due import ScheduledRun
from healthd.agent.scheduler.job_presence import JobPresence
from healthd.agent.scheduler.worker_queue import WorkerQueue
from healthd.agent.settings.configured import Configured
from healthd.agent.worker.client import NVML_TROUBLE, Reply, Runner
from healthd.agent.worker.requests import Run
from healthd.common import guard
from healthd.common.guard import WORKER
from healthd.common.model import RunName
from healthd.host.host import Host

OPENING_SECONDS = 60.0  # for 8 GPUs whose driver is not held: 1-3 s each to initialise
JOB_END = "job_end"  # in AFTER_EVENTS of a check: it runs when an epilog reports the end of a job


class Scheduler:
    """
    configured   the settings in force
    queue        the work of the worker: due checks, and tasks between them
    """

    def __init__(
        self,
        configured: Configured,
        memory: Memory,
        client: Runner,
        jobs: JobPresence,
        now: Callable[[], float],
        monotonic: Callable[[], float],
    ) -> None:
        settings = configured.settings
        self.configured = configured
        self._memory = memory
        self._jobs = jobs
        self._host = Host(settings.root)
        self._driver_is_unheld = self._read_driver_is_unheld()
        # by (the driver is unheld, this node is idle)
        self._scheduled: dict[tuple[bool, bool], list[ScheduledRun]] = {}
        self.queue = WorkerQueue(
            client,
            settings.node_name,
            settings.round_timeout_seconds,
            self.scheduled,
            self._request_for,
            now,
            monotonic,
            self._again_after,
        )

    def reconfigure(self, configured: Configured) -> None:
        self.configured = configured
        self._scheduled.clear()
        self.queue.keep_only(configured.runs)

    def end_round(self) -> None:
        self._driver_is_unheld = self._read_driver_is_unheld()

    def scheduled(self) -> list[ScheduledRun]:
        """Return the runs that come round. While no other process holds the driver, GPU checks run rarely: opening it
        takes seconds for each GPU, and closing it resets the volatile ECC counts."""
        key = self._driver_is_unheld, self._jobs.is_idle
        if key not in self._scheduled:
            self._scheduled[key] = list(self._make_scheduled(*key))
        return self._scheduled[key]

    def _make_scheduled(self, unheld: bool, idle: bool) -> Iterator[ScheduledRun]:
        settings = self.configured.settings
        for name, config in self.configured.runs.items():
            check = self.configured.check(name)
            interval, timeout = config.interval_seconds or settings.interval_seconds, config.timeout_seconds
            if unheld and check.uses == "nvml":
                interval = max(interval, settings.nvml.idle_interval_seconds)
                timeout = max(timeout, OPENING_SECONDS)
            if check.runs and (idle or not check.when):
                yield ScheduledRun(name, check.resource(name.instance), interval, timeout)

    def expected(self) -> list[RunName]:
        """Return the runs whose results the verdict requires. Checks for an idle node count only on a drained one."""
        drained = self._jobs.is_drained
        return [run.name for run in self.scheduled() if drained or not self.configured.checks[run.check].when]

    def runs_after(self, kind: str) -> list[RunName]:
        """Return the runs that are due at once after an event of this kind."""
        return [run.name for run in self.scheduled() if kind in self.configured.checks[run.check].after_events]

    def runs_after_job(self) -> list[RunName]:
        """Return the runs that are due at the end of a job. If the driver is closed after each job, GPU checks are not:
        opening it takes seconds."""
        unheld = self._read_driver_is_unheld()
        return [n for n in self.runs_after(JOB_END) if not (unheld and self.configured.check(n).uses == "nvml")]

    def run_after(self, kinds: Iterable[str]) -> None:
        """Run the checks for events of these kinds now."""
        for kind in kinds:
            with guard.at(WORKER, kind):  # an early run matters less than the event
                self.queue.run_after_event(self.runs_after(kind))

    def _again_after(self, reply: Reply) -> list[RunName]:
        """Return the runs that are due once more in this round: it reports a GPU that was lost, or a driver that hung,
        while the round ran."""
        if not reply.nvml_trouble:
            return []
        return [name for name in self.runs_after(NVML_TROUBLE) if name != reply.run]

    def _request_for(self, run: ScheduledRun) -> Run:
        past = self._memory.past.get(str(run.name), "")
        return Run(*run.name, self.configured.loaded.tables[run.name], past, self._memory.ledger.boot_id)

    def _read_driver_is_unheld(self) -> bool:
        return not self.configured.settings.nvml.fake and self._host.driver_is_held() is False
