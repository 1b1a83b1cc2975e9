"""The worker's queue of due checks, with tasks between them.

A round consists of all runs that are due together. GPU checks come first, and NVML is closed right after them to keep
the driver open as briefly as possible. A round that takes too long ends without its last checks.
"""

from __future__ import annotations

import logging
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable
from typing import NamedTuple

from msgspec.structs import replace

from healthd.agent.scheduler import due as schedule
from healthd.agent.scheduler.due import ScheduledRun
from healthd.agent.worker.client import CLOSE_NVML, Reply, Request, WorkerClient
from healthd.agent.worker.requests import Run
from healthd.common.model import Outcome, RoundStatus, RunName
from healthd.host.wakeup import FOREVER

log = logging.getLogger("healthd")

TASK_TIMEOUT_SECONDS = 20.0
MIN_REPEAT_SECONDS = 10.0  # events do not trigger a check more often than this
# Limit per check, so that a round ends even if checks time out and request repeats of each other. Further repeats run
# in the next round, which begins immediately.
MAX_RUNS_PER_ROUND = 2


class Step(NamedTuple):
    """Result of one step: the replies, usually none or one, and whether a round ended."""

    replies: list[Reply]
    round_ended: bool


class WorkerQueue:
    """Queue of checks and tasks for the worker.

    scheduled      returns the recurring runs
    request_for    returns the request for a run
    repeats_after  returns the runs to repeat in this round after a reply
    """

    def __init__(
        self,
        client: WorkerClient,
        node_name: str,
        round_timeout_seconds: float,
        scheduled: Callable[[], list[ScheduledRun]],
        request_for: Callable[[ScheduledRun], Run],
        now: Callable[[], float],
        monotonic: Callable[[], float],
        repeats_after: Callable[[Reply], Collection[RunName]] = lambda reply: (),
    ) -> None:
        self._client = client
        self._node_name = node_name
        self._round_timeout_seconds = round_timeout_seconds
        self._scheduled = scheduled
        self._request_for = request_for
        self._repeats_after = repeats_after
        self._now = now
        self._monotonic = monotonic
        self._queue: deque[ScheduledRun] = deque()
        self._tasks: deque[Request] = deque()
        self._last_runs: dict[RunName, float] = {}
        self._early: dict[RunName, float] = {}
        self._commanded_at = -FOREVER  # start of the last round that a command requested, or of the next such round
        self._quarantined: set[str] = set()
        self._is_running = False
        self._began = 0.0
        self._run_counts: Counter[RunName] = Counter()  # number of runs in the round in progress
        self._due_at_runs: list[ScheduledRun] = []
        self._due_at = 0.0
        self.status = RoundStatus()
        self.holds_gpus = False  # a repair resets the GPUs

    @property
    def is_using_gpus(self) -> bool:
        """True if the worker has NVML open, or a request that uses the GPUs is in progress or queued."""
        request = self._client.request
        is_busy = request is not None and request.resource == "nvml"
        return self._client.nvml_open or is_busy or any(run.resource == "nvml" for run in self._queue)

    @property
    def is_running(self) -> bool:
        """True while a round is in progress."""
        return self._is_running

    @property
    def deadline(self) -> float:
        """Monotonic time at which the next step is due without other input."""
        if self._client.is_busy:
            return self._client.deadline
        if self._queue or self._next_task() or self._client.nvml_open:
            return 0.0
        return self._next_due()

    def _next_due(self) -> float:
        """Return the monotonic time at which a run is due. The time is cached until its inputs change, because this
        method is called after every check in a round.
        """
        scheduled = self._scheduled()
        if scheduled is not self._due_at_runs:
            self._due_at_runs = scheduled
            self._due_at = schedule.next_due(scheduled, self._last_runs, self._early, self._node_name)
        return self._due_at

    # --- early runs and tasks

    def run_early(self, name: RunName, at: float) -> None:
        """Run a check before its round, at a monotonic time."""
        self._early[name] = min(at, self._early.get(name, FOREVER))
        self._due_at_runs = []

    def run_all_now(self) -> None:
        for run in self._scheduled():
            self.run_early(run.name, self._monotonic())

    def run_after_command(self) -> None:
        """Run all checks now.

        Further commands within MIN_REPEAT_SECONDS share one more round at the end of that time. A script that runs
        `healthd ack` in a loop therefore does not cause a round for each call.
        """
        now = self._monotonic()
        if now < self._commanded_at:
            return  # the round has not begun yet
        self._commanded_at = max(now, self._commanded_at + MIN_REPEAT_SECONDS)
        for run in self._scheduled():
            self.run_early(run.name, self._commanded_at)

    def run_after_event(self, names: Iterable[RunName]) -> None:
        """Run these checks now, but not within MIN_REPEAT_SECONDS after their last run (events come in storms)."""
        for name in names:
            self.run_early(name, max(self._monotonic(), self._last_runs.get(name, -FOREVER) + MIN_REPEAT_SECONDS))

    def add_task(self, request: Request) -> None:
        """Add a task for the worker, to be done when no checks are due.

        A task waits while a worker hangs in the task's resource. Only the newest task of each kind is kept.
        """
        kind = (request.resource, request.kind)
        self._tasks = deque(e for e in self._tasks if (e.resource, e.kind) != kind)
        self._tasks.append(request)

    def drop_unconfigured(self, configured: Iterable[RunName]) -> None:
        names = set(configured)
        self._queue = deque(run for run in self._queue if run.name in names)
        self._early = {name: at for name, at in self._early.items() if name in names}
        self._due_at_runs = []

    # --- work

    def step(self) -> Step:
        """Advance one step, and include runs that have become due."""
        self._queue_due_runs()
        return self.advance()

    def advance(self) -> Step:
        """Advance without selecting due runs, because nothing else changes during a burst of answers."""
        ended = []
        reply = self._client.step()
        if self._quarantined != (quarantined := self._client.quarantined.keys()):
            freed, self._quarantined = self._quarantined - quarantined, set(quarantined)
            self._run_freed(freed)
            self._queue_due_runs()
        if reply is not None:
            ended.append(reply)
            self._queue_repeats(self._repeats_after(reply))
        while not self._client.is_busy:
            request = self._next()
            if request is None:
                break
            immediate_reply = request if isinstance(request, Reply) else self._client.send(request)
            if immediate_reply is not None:
                ended.append(immediate_reply)
        round_ended = self._is_running and not self._queue and not self._is_running_check()
        if round_ended:
            self._end_round()
        return Step(ended, round_ended)

    def _run_freed(self, freed: set[str]) -> None:
        for resource in sorted(freed - {""}):
            log.info("the worker that hung in %s has ended", resource)
        for run in self._scheduled():
            if run.resource in freed:
                # Wait, because the check may always take slightly longer than its time limit.
                repeat_at = self._last_runs.get(run.name, -FOREVER) + 2 * run.timeout_seconds
                self.run_early(run.name, max(self._monotonic(), repeat_at))

    def _queue_due_runs(self) -> None:
        now = self._monotonic()
        if now < self._next_due():
            return
        queued = {run.name for run in self._queue}
        due = schedule.due_runs(self._scheduled(), self._last_runs, self._early, self._node_name, now)
        new = [run for run in due if run.name not in queued and not self._is_done_in_round(run, now)]
        if not new:
            return
        if not self._is_running:
            self._is_running, self._began = True, now
            self._run_counts.clear()
            self.status = replace(self.status, number=self.status.number + 1, started=self._now())
        for run in new:
            self._last_runs[run.name] = now
            self._run_counts[run.name] += 1
            self._early.pop(run.name, None)
        self._due_at_runs = []
        self._queue = deque(schedule.gpus_first([*self._queue, *new]))

    def _queue_repeats(self, names: Collection[RunName]) -> None:
        """Queue repeats before NVML is closed, so that they run in this round."""
        waiting = {run.name for run in self._queue}
        repeats = {name for name in names if name not in waiting and self._run_counts[name] < MAX_RUNS_PER_ROUND}
        if repeats and self._is_running:
            self._run_counts.update(repeats)
            self._queue = deque(schedule.with_repeats(self._queue, self._scheduled(), repeats))

    def _is_done_in_round(self, run: ScheduledRun, now: float) -> bool:
        """Return True if the current round includes this run and no early run has been requested since.

        Even a round that takes longer than the interval must end before the next round starts.
        """
        run_count = self._run_counts[run.name] if self._is_running else 0
        return run_count >= MAX_RUNS_PER_ROUND or (run_count > 0 and self._early.get(run.name, FOREVER) > now)

    def _next(self) -> Request | Reply | None:
        """Return the next work item: first closing NVML, then checks, then tasks."""
        if self._client.nvml_open and not (self._queue and self._queue[0].resource == "nvml"):
            return self._pop_task(self._next_task("nvml")) or CLOSE_NVML
        if self._queue:
            run = self._queue.popleft()
            request = Request(run.resource, run.timeout_seconds, self._request_for(run))
            if self._monotonic() - self._began >= self._round_timeout_seconds:
                return Reply(request, Outcome.TIMED_OUT, 0.0, "the round ran out of time before this run")
            return request
        return self._pop_task(self._next_task())

    def _next_task(self, resource: str = "") -> Request | None:
        """Return the next task whose resource is not quarantined. If `resource` is given, only its tasks are
        considered."""
        quarantined = {*self._client.quarantined, "nvml"} if self.holds_gpus else self._client.quarantined
        available = (e for e in self._tasks if e.resource not in quarantined and resource in ("", e.resource))
        return next(available, None)

    def _pop_task(self, task: Request | None) -> Request | None:
        if task is not None:
            self._tasks.remove(task)
        return task

    def _is_running_check(self) -> bool:
        request = self._client.request
        return request is not None and isinstance(request.operation, Run)

    def _end_round(self) -> None:
        self._is_running = False
        wait = self._next_due() - self._monotonic()
        self.status = replace(
            self.status, seconds=self._monotonic() - self._began, next_at=self._now() + max(wait, 0.0)
        )
