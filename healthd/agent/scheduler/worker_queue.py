"""Queue of the worker: due checks one after another, and tasks between them.

A round consists of all runs that are due together. GPU checks come first and NVML is closed right after them, so that
the driver is held open as briefly as possible. A round that takes too long ends without its last checks.
"""

from __future__ import annotations

import logging
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable
from typing import NamedTuple

from msgspec.structs import replace

from healthd.agent.scheduler import due as schedule
from healthd.agent.scheduler.due import ScheduledRun
from healthd.agent.worker.client import CLOSE_NVML, Reply, Request, Runner
from healthd.agent.worker.requests import Run
from healthd.common.model import Outcome, RoundStatus, RunName
from healthd.host.wakeup import FOREVER

log = logging.getLogger("healthd")

TASK_SECONDS = 20.0
EARLY_AGAIN_SECONDS = 10.0  # events do not run one check more often than this
# Limit per check, so that a round ends even if checks time out and request repeats of each other. Further repeats run
# in the next round, which begins at once.
MOST_TURNS = 2


class Step(NamedTuple):
    """Result of one step: the replies, usually none or one, and whether a round ended."""

    replies: list[Reply]
    round_ended: bool


class WorkerQueue:
    """The queue.

    scheduled      returns the recurring runs
    request_for    returns the request for a run
    repeats_after  returns the runs to repeat in this round after a reply
    """

    def __init__(
        self,
        runner: Runner,
        node_name: str,
        round_timeout_seconds: float,
        scheduled: Callable[[], list[ScheduledRun]],
        request_for: Callable[[ScheduledRun], Run],
        now: Callable[[], float],
        monotonic: Callable[[], float],
        after: Callable[[Reply], Collection[RunName]] = lambda reply: (),
    ) -> None:
        self._runner = runner
        self._node_name = node_name
        self._round_timeout_seconds = round_timeout_seconds
        self._scheduled = scheduled
        self._request_for = request_for
        self._after = after
        self._now = now
        self._monotonic = monotonic
        self._queue: deque[ScheduledRun] = deque()
        self._tasks: deque[Request] = deque()
        self._last_runs: dict[RunName, float] = {}
        self._early: dict[RunName, float] = {}
        self._commanded_at = -FOREVER  # begin of the last or next round for a command
        self._quarantined: set[str] = set()
        self._running = False
        self._began = 0.0
        self._turns: Counter[RunName] = Counter()  # number of runs in the round in progress
        self._due_of: list[ScheduledRun] = []
        self._due_at = 0.0
        self.status = RoundStatus()

    @property
    def running(self) -> bool:
        """True while a round is in progress."""
        return self._running

    @property
    def deadline(self) -> float:
        """When the next step is due without other input (monotonic)."""
        if self._runner.busy:
            return self._runner.deadline
        if self._queue or self._task() or self._runner.nvml_open:
            return 0.0
        return self._next_due()

    def _next_due(self) -> float:
        """Return when a run is due (monotonic). Cached until its inputs change: it is called after every check of a
        round."""
        scheduled = self._scheduled()
        if scheduled is not self._due_of:
            self._due_of = scheduled
            self._due_at = schedule.next_due(scheduled, self._last_runs, self._early, self._node_name)
        return self._due_at

    # --- early runs and tasks

    def run_early(self, name: RunName, at: float) -> None:
        """Run a check before its round, at a monotonic time."""
        self._early[name] = min(at, self._early.get(name, FOREVER))
        self._due_of = []

    def run_all_now(self) -> None:
        for run in self._scheduled():
            self.run_early(run.name, self._monotonic())

    def run_after_command(self) -> None:
        """Run all checks now.

        Commands that repeat within MIN_REPEAT_SECONDS share one more round at the end of that time, so that a script
        that acknowledges in a loop does not cause a round for each call.
        """
        now = self._monotonic()
        if now < self._commanded_at:
            return  # that round has not begun yet
        self._commanded_at = max(now, self._commanded_at + EARLY_AGAIN_SECONDS)
        for run in self._scheduled():
            self.run_early(run.name, self._commanded_at)

    def run_after_event(self, names: Iterable[RunName]) -> None:
        """Run these checks now, but not within MIN_REPEAT_SECONDS after their last run: events come in storms."""
        for name in names:
            self.run_early(name, max(self._monotonic(), self._last_runs.get(name, -FOREVER) + EARLY_AGAIN_SECONDS))

    def add_task(self, request: Request) -> None:
        """Give the worker other work for times without due checks.

        A task waits while a worker hangs in its resource. Only the newest task of a kind is kept.
        """
        kind = (request.resource, request.kind)
        self._tasks = deque(e for e in self._tasks if (e.resource, e.kind) != kind)
        self._tasks.append(request)

    def keep_only(self, configured: Iterable[RunName]) -> None:
        known = set(configured)
        self._queue = deque(run for run in self._queue if run.name in known)
        self._early = {name: at for name, at in self._early.items() if name in known}
        self._due_of = []

    # --- work

    def step(self) -> Step:
        """Advance, including runs that have become due."""
        self._queue_what_is_due()
        return self.go_on()

    def go_on(self) -> Step:
        """Advance without looking for due runs: in a burst of answers nothing else has changed."""
        ended = []
        reply = self._runner.step()
        if self._quarantined != (quarantined := self._runner.quarantined.keys()):
            freed, self._quarantined = self._quarantined - quarantined, set(quarantined)
            self._look_where_freed(freed)
            self._queue_what_is_due()
        if reply is not None:
            ended.append(reply)
            self._queue_once_more(self._after(reply))
        while not self._runner.busy:
            request = self._next()
            if request is None:
                break
            at_once = request if isinstance(request, Reply) else self._runner.send(request)
            if at_once is not None:
                ended.append(at_once)
        round_ended = self._running and not self._queue and not self._runs_a_check()
        if round_ended:
            self._end()
        return Step(ended, round_ended)

    def _look_where_freed(self, freed: set[str]) -> None:
        for resource in sorted(freed - {""}):
            log.info("the worker that hung in %s has ended", resource)
        for run in self._scheduled():
            if run.resource in freed:
                # Wait, in case the check always takes slightly longer than its time limit.
                again_at = self._last_runs.get(run.name, -FOREVER) + 2 * run.timeout_seconds
                self.run_early(run.name, max(self._monotonic(), again_at))

    def _queue_what_is_due(self) -> None:
        now = self._monotonic()
        if now < self._next_due():
            return
        queued = {run.name for run in self._queue}
        due = schedule.due(self._scheduled(), self._last_runs, self._early, self._node_name, now)
        new = [run for run in due if run.name not in queued and not self._has_had_its_turn(run, now)]
        if not new:
            return
        if not self._running:
            self._running, self._began = True, now
            self._turns.clear()
            self.status = replace(self.status, number=self.status.number + 1, started=self._now())
        for run in new:
            self._last_runs[run.name] = now
            self._turns[run.name] += 1
            self._early.pop(run.name, None)
        self._due_of = []
        self._queue = deque(schedule.gpus_first([*self._queue, *new]))

    def _queue_once_more(self, names: Collection[RunName]) -> None:
        """Queue repeats before NVML is closed, so that they run in this round."""
        waiting = {run.name for run in self._queue}
        again = {name for name in names if name not in waiting and self._turns[name] < MOST_TURNS}
        if again and self._running:
            self._turns.update(again)
            self._queue = deque(schedule.again(self._queue, self._scheduled(), again))

    def _has_had_its_turn(self, run: ScheduledRun, now: float) -> bool:
        """Return True if the round in progress has run it, and no early run was requested since.

        A round that takes longer than the interval must end before the next one starts.
        """
        turns = self._turns[run.name] if self._running else 0
        return turns >= MOST_TURNS or (turns > 0 and self._early.get(run.name, FOREVER) > now)

    def _next(self) -> Request | Reply | None:
        """Return the next work: first the end of NVML work, then checks, then tasks."""
        if self._runner.nvml_open and not (self._queue and self._queue[0].resource == "nvml"):
            return self._take(self._task("nvml")) or CLOSE_NVML
        if self._queue:
            run = self._queue.popleft()
            request = Request(run.resource, run.timeout_seconds, self._request_for(run))
            if self._monotonic() - self._began >= self._round_timeout_seconds:
                return Reply(request, Outcome.TIMED_OUT, 0.0, "the round ran out of time before this run")
            return request
        return self._take(self._task())

    def _task(self, resource: str = "") -> Request | None:
        """Return the next task (for that resource) whose resource is not quarantined."""
        quarantined = self._runner.quarantined
        fits = (e for e in self._tasks if e.resource not in quarantined and resource in ("", e.resource))
        return next(fits, None)

    def _take(self, task: Request | None) -> Request | None:
        if task is not None:
            self._tasks.remove(task)
        return task

    def _runs_a_check(self) -> bool:
        request = self._runner.request
        return request is not None and isinstance(request.asked, Run)

    def _end(self) -> None:
        self._running = False
        wait = self._next_due() - self._monotonic()
        self.status = replace(
            self.status, seconds=self._monotonic() - self._began, next_at=self._now() + max(wait, 0.0)
        )
