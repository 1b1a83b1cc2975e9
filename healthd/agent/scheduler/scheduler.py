"""Scheduler: decides which checks run, how often, and which run at once after an event."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from healthd.agent.conditions.store import ConditionStore
from healthd.agent.scheduler.due import ScheduledRun
from healthd.agent.scheduler.job_presence import JobPresence
from healthd.agent.scheduler.worker_queue import WorkerQueue
from healthd.agent.settings.configured import Configured
from healthd.agent.worker.client import NVML_PROBLEM, Reply, WorkerClient
from healthd.agent.worker.requests import Run
from healthd.common import guard
from healthd.common.guard import WORKER
from healthd.common.model import RunName
from healthd.host.host import Host

NVML_OPEN_SECONDS = 60.0  # enough for 8 GPUs whose driver no process keeps open; each GPU takes 1-3 s to initialise
JOB_END = "job_end"  # event name in a check's AFTER_EVENTS: the check runs when an epilog reports that a job ended


class Scheduler:
    """Schedules the checks.

    configured   the settings in force
    queue        the worker's work: due checks, and tasks between them
    """

    def __init__(
        self,
        configured: Configured,
        store: ConditionStore,
        client: WorkerClient,
        jobs: JobPresence,
        now: Callable[[], float],
        monotonic: Callable[[], float],
    ) -> None:
        settings = configured.settings
        self.configured = configured
        self._store = store
        self._jobs = jobs
        self._host = Host(settings.root)
        self._is_driver_idle = self._read_driver_idle()
        self._holds_gpus = False
        # by (driver is idle, node is idle)
        self._scheduled: dict[tuple[bool, bool], list[ScheduledRun]] = {}
        self.queue = WorkerQueue(
            client,
            settings.node_name,
            settings.round_timeout_seconds,
            self.scheduled,
            self._request_for,
            now,
            monotonic,
            self._repeats_after,
        )

    def reconfigure(self, configured: Configured) -> None:
        self.configured = configured
        self._scheduled.clear()
        self.queue.drop_unconfigured(configured.runs)

    def hold_gpus(self, holds: bool) -> None:
        """Run no check that uses the GPUs while `holds`, because a repair resets them."""
        if holds is not self._holds_gpus:
            self._holds_gpus = self.queue.holds_gpus = holds
            self._scheduled.clear()

    def end_round(self) -> None:
        self._is_driver_idle = self._read_driver_idle()

    def scheduled(self) -> list[ScheduledRun]:
        """Return the recurring runs.

        While no other process keeps the driver open, GPU checks run rarely. Opening the driver takes seconds per GPU,
        and closing it resets the volatile ECC counts.
        """
        key = self._is_driver_idle, self._jobs.is_idle
        if key not in self._scheduled:
            self._scheduled[key] = list(self._make_scheduled(*key))
        return self._scheduled[key]

    def _make_scheduled(self, driver_idle: bool, idle: bool) -> Iterator[ScheduledRun]:
        settings = self.configured.settings
        for name, config in self.configured.runs.items():
            check = self.configured.check(name)
            interval, timeout = config.interval_seconds or settings.interval_seconds, config.timeout_seconds
            if driver_idle and check.uses == "nvml":
                interval = max(interval, settings.nvml.idle_interval_seconds)
                timeout = max(timeout, NVML_OPEN_SECONDS)
            if check.has_run and (idle or not check.when) and not (self._holds_gpus and check.uses == "nvml"):
                yield ScheduledRun(name, check.resource(name.instance), interval, timeout)

    def expected(self) -> list[RunName]:
        """Return the runs whose results the verdict requires. Checks for an idle node are included only on a drained
        node.
        """
        drained = self._jobs.is_drained
        return [run.name for run in self.scheduled() if drained or not self.configured.checks[run.check].when]

    def runs_after(self, kind: str) -> list[RunName]:
        """Return the runs that are due at once after an event of this kind."""
        return [run.name for run in self.scheduled() if kind in self.configured.checks[run.check].after_events]

    def runs_after_job(self) -> list[RunName]:
        """Return the runs that are due when a job ends.

        GPU checks are excluded if the driver is closed after each job, because opening it takes seconds.
        """
        driver_idle = self._read_driver_idle()
        return [n for n in self.runs_after(JOB_END) if not (driver_idle and self.configured.check(n).uses == "nvml")]

    def run_after(self, kinds: Iterable[str]) -> None:
        """Run now the checks that follow events of these kinds."""
        for kind in kinds:
            with guard.dropping_errors(WORKER, kind):  # an error here must not affect the event
                self.queue.run_after_event(self.runs_after(kind))

    def _repeats_after(self, reply: Reply) -> list[RunName]:
        """Return the runs to repeat in this round if the reply reports a lost GPU or a hung driver."""
        if not reply.has_nvml_problem:
            return []
        return [name for name in self.runs_after(NVML_PROBLEM) if name != reply.run]

    def _request_for(self, run: ScheduledRun) -> Run:
        past = self._store.past.get(str(run.name), "")
        return Run(*run.name, self.configured.loaded.tables[run.name], past, self._store.ledger.boot_id)

    def _read_driver_idle(self) -> bool:
        return not self.configured.settings.nvml.fake and self._host.is_driver_in_use() is False
