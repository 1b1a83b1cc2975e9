"""Handle the worker's replies. Check results become conditions, and other replies go to the tasks that requested them.

A pure function turns a result into conditions (agent/conditions/intake.py).
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable
from typing import NamedTuple

from msgspec.structs import replace

from healthd.agent.conditions import intake, verdict
from healthd.agent.conditions.store import ConditionStore
from healthd.agent.scheduler.job_presence import JobPresence
from healthd.agent.scheduler.scheduler import Scheduler
from healthd.agent.scheduler.worker_queue import MIN_REPEAT_SECONDS, Step
from healthd.agent.scheduler.worker_tasks import (
    CLUSTER_NAME,
    INVENTORY,
    InstalledFiles,
    InventoryTask,
    LedgerCopy,
    StreamDelivery,
    Textfile,
    failure,
    has_hooks_record,
)
from healthd.agent.settings.configured import Configured
from healthd.agent.worker.client import Reply, WorkerClient
from healthd.agent.worker.requests import (
    AppendEvents,
    CheckInstalledFiles,
    LoadCopy,
    ReadClusterName,
    ReadJournal,
    Run,
    RunAnswer,
    SaveCopy,
    TakeInventory,
    WriteFile,
    operation_name,
)
from healthd.agent.worker.results import CLOCK_STEP_SECONDS, make_result, run_started_at
from healthd.common import guard
from healthd.common.guard import WORKER, describe_error
from healthd.common.model import CheckResult, Inventory, Outcome, RunName, Severity
from healthd.host.wakeup import poll

log = logging.getLogger("healthd")

BURST_SECONDS = 0.02  # the longest wait for the worker alone, which delays kernel lines


class Received(NamedTuple):
    """Input for the daemon: the end of a round, a reply with journal lines, a new inventory, or whether the state
    directory has a record of hooks.
    """

    round_ended: bool = False
    journal: Reply | None = None
    inventory: Inventory | None = None
    has_hooks_record: bool = False


class ReplyHandler:
    """Handles the worker's replies.

    results    each run's last result since the start
    outcomes   number of runs by check, instance and outcome
    changes    number of changes in outcomes and in findings that drain
    """

    def __init__(
        self,
        scheduler: Scheduler,
        jobs: JobPresence,
        store: ConditionStore,
        client: WorkerClient,
        now: Callable[[], float],
        monotonic: Callable[[], float],
    ) -> None:
        settings = scheduler.configured.settings
        self.results: dict[RunName, CheckResult] = {}
        self.outcomes: Counter[tuple[str, str, str]] = Counter()
        self.changes = 0
        self.delivery = StreamDelivery(store, settings.state_dir)
        self.ledger_copy = LedgerCopy(store, settings.runtime_dir, settings.state_dir)
        self.files = InstalledFiles()
        self.textfile = Textfile()
        self.inventory = InventoryTask(store, monotonic)
        self._scheduler = scheduler
        self._queue = scheduler.queue
        self._jobs = jobs
        self._store = store
        self._client = client
        self._now = now
        self._monotonic = monotonic
        self._overdue_since: dict[str, float] = {}  # for each resource, the start time of the run that hangs in it
        self._queue.add_task(INVENTORY)
        if not settings.cluster:
            self._queue.add_task(CLUSTER_NAME)

    @property
    def _configured(self) -> Configured:
        return self._scheduler.configured

    def step(self) -> Received:
        """Handle the available replies.

        Most checks take less than a millisecond. In a burst, waiting for the checks is cheaper than a turn of the loop
        after each.
        """
        until = self._monotonic() + BURST_SECONDS
        received = self._handle_step(self._queue.step())
        while (
            received == Received() and self._client.is_busy and self._client.answers_within(until - self._monotonic())
        ):
            received = self._handle_step(self._queue.advance())
        return received

    def _handle_step(self, step: Step) -> Received:
        received = Received(step.round_ended)
        for reply in step.replies:
            received = self.handle(reply, received)
        return received

    def handle(self, reply: Reply, received: Received) -> Received:
        """Handle one reply. Return `received` plus the reply's input for the daemon."""
        try:
            return self._handle(reply, received)
        except Exception as error:
            guard.drop(WORKER, error, operation_name(reply.request.kind))
            why = f"internal error in healthd while processing the answer: {describe_error(error)}"
            with guard.dropping_errors(WORKER):  # a failed run is not evidence of health
                return self._handle(replace(reply, outcome=Outcome.FAILED, answer=None, error=why), received)
        return received

    def _handle(self, reply: Reply, received: Received) -> Received:
        kind = reply.request.kind
        if kind is Run:
            self._handle_check(reply)
        elif kind is AppendEvents:
            self.delivery.handle_reply(reply)
        elif kind is CheckInstalledFiles:
            self.files.handle_reply(reply)
        elif kind is WriteFile:
            self.textfile.handle_reply(reply)
        else:
            if why := failure(reply):
                log.error("the worker could not %s: %s", operation_name(reply.request.kind).replace("_", " "), why)
            if kind is SaveCopy:
                self.ledger_copy.handle_reply(reply)
            elif kind is ReadJournal:
                return received._replace(journal=reply)
            elif kind is TakeInventory and not why:
                return received._replace(inventory=self.inventory.handle_reply(reply))
            elif kind in (TakeInventory, LoadCopy) and reply.outcome is Outcome.TIMED_OUT:
                self._queue.add_task(reply.request)  # retry once the hung worker has ended
            elif kind is LoadCopy:
                return received._replace(has_hooks_record=has_hooks_record(reply))
            elif kind is ReadClusterName and not why:
                assert isinstance(reply.answer, str)
                self._store.stream.set_cluster(reply.answer)
        return received

    # --- check results

    def _handle_check(self, reply: Reply) -> None:
        self._absorb(reply)
        result = self.results.get(reply.run)
        if self.inventory.is_due(reply, result.observations if result else ()):
            self._queue.add_task(INVENTORY)

    def _absorb(self, reply: Reply) -> None:
        """Turn a run's findings into conditions, and store its counters."""
        name = reply.run
        if name not in self._configured.runs:
            return  # a reload removed the run in the meantime
        check, config, store = self._configured.check(name), self._configured.runs[name], self._store
        if check.when and not self._jobs.is_idle:
            return  # jobs started during the run
        silent = self._silent_seconds(reply)
        if abs(reply.clock_step) > CLOCK_STEP_SECONDS:  # the run's readings have times from two clocks
            why = "the clock was set while it ran"
            reply = replace(reply, outcome=Outcome.FAILED, answer=None, error=why, message_time=None)
            self._queue.run_early(name, self._monotonic() + MIN_REPEAT_SECONDS)
        result = make_result(check, config, reply, run_started_at(reply, self._now()), silent)
        ledger, result = intake.take_result(store.ledger, result, config, self._now())
        self._record_result(result)
        store.commit(ledger)
        if isinstance(reply.answer, RunAnswer):
            store.set_past(str(name), reply.answer.past)
        early_at = verdict.early_run_times(store.conditions).get(name)
        if early_at is not None and early_at > self._now():
            self._queue.run_early(name, self._monotonic() + max(early_at - self._now(), 0.1))

    def _silent_seconds(self, reply: Reply) -> float:
        """Return the seconds for which a run's resource has not answered, in this run and earlier ones; 0 if it has
        answered.
        """
        resource, now = reply.request.resource, self._monotonic()
        if reply.outcome is Outcome.STUCK or (reply.outcome is Outcome.TIMED_OUT and reply.seconds):
            self._overdue_since.setdefault(resource, now - reply.seconds)
        elif reply.outcome is not Outcome.TIMED_OUT:
            self._overdue_since.pop(resource, None)
        return now - self._overdue_since.get(resource, now)

    def _record_result(self, result: CheckResult) -> None:
        """Store the last result of a run. Log the outcome if it is new and not "completed"."""
        name, outcome = result.run, result.outcome
        before = self.results.get(name)
        if outcome is not Outcome.COMPLETED and (before is None or before.outcome is not outcome):
            error = f": {result.error}" if result.error else ""
            log.warning("check %s: %s%s", name, outcome.value.replace("_", " "), error)
        if before is None or verdict_inputs(before) != verdict_inputs(result):
            self.changes += 1
        self.results[name] = result
        self.outcomes[name.check, name.instance, outcome.value] += 1

    def completed(self) -> set[str]:
        """Return the checks whose last runs all completed."""
        failed = {name.check for name, result in self.results.items() if result.outcome is not Outcome.COMPLETED}
        return {name.check for name in self.results} - failed

    def not_run_since(self, names: list[RunName], moment: float) -> list[str]:
        """Return the runs that have not run since `moment` (epoch seconds). A run shortly before `moment` is also
        accepted.
        """
        before = moment - MIN_REPEAT_SECONDS
        return [str(name) for name in names if name not in self.results or self.results[name].started < before]

    def drop_unconfigured(self) -> None:
        """Drop the results of runs that a reload removed."""
        self.results = {name: result for name, result in self.results.items() if name in self._configured.runs}

    def drop_unless_idle(self) -> None:
        """If jobs can run on this node, drop the results of checks that need an idle node."""
        if self._jobs.is_idle:
            return
        only_when_idle = self._configured.idle_runs
        self.results = {name: result for name, result in self.results.items() if name not in only_when_idle}
        self._store.clear_runs(only_when_idle, "jobs may run here again")

    # --- the ledger's copy and the stream

    def add_tasks(self, round_ended: bool) -> None:
        """Request a copy of the ledger and a write of the stream if they are due. Retry failed writes after a round."""
        if self.ledger_copy.is_due(round_ended):
            self._queue.add_task(self.ledger_copy.request())
        if self.delivery.is_due and (round_ended or not self.delivery.problem):
            self._queue.add_task(self.delivery.request())
        if round_ended:
            self._queue.add_task(self.files.request())

    def finish(self, seconds: float) -> None:
        """Write the stream and copy the ledger before the daemon exits, within `seconds`.

        Do not wait for a worker that is busy with other work.
        """
        until, pending_request = self._monotonic() + seconds, self._client.request
        if pending_request is not None and (
            pending_request.resource != "state_dir" or not self._completes(None, until)
        ):
            return
        for make_request in (self.delivery.request, self.ledger_copy.request):
            if self._store.unsaved:
                self._store.save()
            if self._store.unsaved or not self._completes(self._client.send(make_request()), until):
                return

    def _completes(self, reply: Reply | None, until: float) -> bool:
        """Return True if the request in flight ends by `until` (monotonic)."""
        while reply is None and self._monotonic() < until:
            poll(list(self._client.waits()), until - self._monotonic())
            reply = self._client.step()
        if reply is not None:
            self.handle(reply, Received())
        return reply is not None


def verdict_inputs(result: CheckResult) -> tuple[object, ...]:
    """Return the inputs that the verdict takes from a run, in addition to conditions.

    A finding can end without a change to the conditions: after `healthd repaired`, the next run no longer reports it.
    """
    drain_findings = {
        (finding.key, finding.severity) for finding in result.findings if finding.severity >= Severity.DEGRADED
    }
    return result.outcome, result.error, drain_findings
