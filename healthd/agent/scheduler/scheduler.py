"""The daemon's eyes: what comes round, what the worker is asked and answers, and whether a job is on this node.

A check's result becomes conditions by a pure function (agent/conditions/intake.py).
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

from msgspec.structs import replace

from healthd.agent.conditions import intake, verdict
from healthd.agent.conditions.store import NAMES, Memory
from healthd.agent.scheduler.due import ScheduledRun
from healthd.agent.scheduler.event_delivery import Delivery
from healthd.agent.scheduler.worker_queue import EARLY_AGAIN_SECONDS, TASK_SECONDS, Rounds, Step
from healthd.agent.settings.configured import Configured
from healthd.agent.slurm.event_jobs import LOOK_AGAIN_SECONDS
from healthd.agent.worker import installed_files
from healthd.agent.worker.client import NVML_TROUBLE, Reply, Request, Runner
from healthd.agent.worker.requests import (
    AppendEvents,
    LookAtOwnFiles,
    ReadClusterName,
    ReadJournal,
    Run,
    RunAnswer,
    SaveCopy,
    TakeInventory,
    WriteFile,
    op_of,
)
from healthd.agent.worker.results import CLOCK_STEP_SECONDS, began, result_of
from healthd.common import guard
from healthd.common.guard import WORKER, words
from healthd.common.model import CheckResult, Inventory, Observation, Outcome, RunName, Severity
from healthd.common.text import without_class
from healthd.host.host import Host
from healthd.host.inventory import when_whole
from healthd.host.job_processes import has_no_jobs
from healthd.host.wakeup import poll

log = logging.getLogger("healthd")

OPENING_SECONDS = 60.0  # for 8 GPUs whose driver nobody holds: 1-3 s each to initialise
BURST_SECONDS = 0.02  # for so long we wait for the worker alone: a kernel line waits that long at worst
JOB_END = "job_end"  # in AFTER_EVENTS of a check: it looks when the epilog says that a job ended
INVENTORY = Request("nvml", TASK_SECONDS, TakeInventory(gpus=True))
INVENTORY_SECONDS = 24 * 3600.0
CLUSTER_NAME = Request("slurm_conf", TASK_SECONDS, ReadClusterName())
FOREVER = float("inf")


class Seen(NamedTuple):
    """What a look brought for others: whether a round ended, what the worker read in the journal, and what this node
    has, where it was read anew."""

    round_ended: bool = False
    journal: Reply | None = None
    inventory: Inventory | None = None


class Looking:
    """What it sees for others it returns.

    configured   the present one; a reload replaces it
    is_drained   whether Slurm shows this node drained and idle, as whoever asks Slurm says here
    results      the last result of each run since the start; `outcomes`: how often, by check, instance and outcome
    turns        how often the outcome of some run has changed, or what it finds that drains
    """

    def __init__(
        self,
        configured: Configured,
        memory: Memory,
        runner: Runner,
        now: Callable[[], float],
        monotonic: Callable[[], float],
    ) -> None:
        settings = configured.settings
        self.configured = configured
        self.runner = runner
        self.is_drained = False
        self.results: dict[RunName, CheckResult] = {}
        self.outcomes: Counter[tuple[str, str, str]] = Counter()
        self.turns = 0
        self.copy_failures = 0
        self.copy_trouble = ""  # why the ledger's copy could not be written, until it can
        self.textfile_trouble = ""  # why metrics.textfile could not be written, until it can
        self.files_trouble = ""  # healthd's own files are gone, or others
        self._own_files = installed_files.identities()  # they were just read
        self.delivery = Delivery(memory, settings.state_dir)
        self._memory = memory
        self._now = now
        self._monotonic = monotonic
        self._host = Host(settings.root)
        # by (the driver is unheld, this node is idle)
        self._scheduled: dict[tuple[bool, bool], list[ScheduledRun]] = {}
        self._overdue_since: dict[str, float] = {}  # resource -> when the run that hangs in it began
        self._is_without_jobs, self._looked_for_jobs_at = False, -FOREVER
        self._inventory_at = -FOREVER
        self._driver_is_unheld = self.is_driver_unheld()
        self.rounds = Rounds(
            runner,
            settings.node_name,
            settings.round_timeout_seconds,
            self.scheduled,
            self._asked_of,
            now,
            monotonic,
            self._looks_once_more,
        )
        self.rounds.task(INVENTORY)
        if not settings.cluster:
            self.rounds.task(CLUSTER_NAME)

    def reconfigure(self, configured: Configured) -> None:
        self.configured = configured
        self.runner.renew()  # the site's checks may be new
        self._scheduled.clear()
        self.rounds.forget(configured.runs)
        self.results = {name: result for name, result in self.results.items() if name in configured.runs}

    # --- what comes round

    def scheduled(self) -> list[ScheduledRun]:
        """The runs that come round. If nobody else holds the driver, GPU checks are far apart: opening it costs seconds
        a GPU, and closing it wipes the volatile ECC counts."""
        now = self._driver_is_unheld, self.is_idle
        if now not in self._scheduled:
            self._scheduled[now] = list(self._make_scheduled(*now))
        return self._scheduled[now]

    def _make_scheduled(self, unheld: bool, idle: bool) -> Iterator[ScheduledRun]:
        settings = self.configured.settings
        for name, config in self.configured.runs.items():
            check = self.configured.check(name)
            interval, timeout = config.interval_seconds or settings.interval_seconds, config.timeout_seconds
            if unheld and check.uses == "nvml":
                interval = max(interval, settings.nvml.unheld_interval_seconds)
                timeout = max(timeout, OPENING_SECONDS)
            if check.runs and (idle or not check.when):
                yield ScheduledRun(name, check.resource(name.instance), interval, timeout)

    def judged_by(self) -> list[RunName]:
        """The runs that the node's health rests on."""
        return [run.name for run in self.scheduled() if self.is_drained or not self.configured.checks[run.check].when]

    def concerned(self, kind: str) -> list[RunName]:
        """The checks that look at once after an event of this kind."""
        return [run.name for run in self.scheduled() if kind in self.configured.checks[run.check].after_events]

    def _looks_once_more(self, reply: Reply) -> list[RunName]:
        """A GPU that was gone in the middle of a round is told of in that round, and so is a driver that hangs."""
        if not reply.nvml_trouble:
            return []
        return [name for name in self.concerned(NVML_TROUBLE) if name != reply.run]

    def look_after(self, kinds: Iterable[str]) -> None:
        """Events of these kinds came."""
        for kind in kinds:
            with guard.at(WORKER, kind):  # to look at once matters less than what was heard
                self.rounds.look_after_event(self.concerned(kind))

    def is_driver_unheld(self) -> bool:
        return not self.configured.settings.nvml.fake and self._host.driver_is_held() is False

    # --- whether a job is on this node

    @property
    def is_idle(self) -> bool:
        """Whether no job is on this node: drained and idle, or empty since the last job ended."""
        return self.is_drained or self._is_without_jobs

    def look_for_jobs(self) -> None:
        """Once a turn. Where the last job has ended, another may come any moment."""
        if self._is_without_jobs and self._monotonic() >= self._looked_for_jobs_at + LOOK_AGAIN_SECONDS:
            self._look_for_jobs()

    def _look_for_jobs(self) -> None:
        self._looked_for_jobs_at = self._monotonic()
        before, self._is_without_jobs = self._is_without_jobs, has_no_jobs(self.configured.settings.root)
        if before:
            self.forget_unless_idle()

    def forget_unless_idle(self) -> None:
        """If jobs are on this node or may come, forget what was found while there were none."""
        if self.is_idle:
            return
        only_then = self.configured.only_when_idle
        self.results = {name: result for name, result in self.results.items() if name not in only_then}
        self._memory.forget(only_then, "jobs may run here again")

    @property
    def is_without_jobs(self) -> bool:
        """Whether Slurm's cgroups showed no job since an epilog said that one ended."""
        return self._is_without_jobs

    def job_ended(self) -> dict[str, Any]:
        """A job's epilog says that it ended: the checks concerned look at once. `left`: those it may wait for."""
        asked = self._now()
        self._memory.job_ended()
        self._look_for_jobs()
        self.rounds.look_after_event(self._concerned_by_job_end())
        left = self.looks_left(asked)
        words = f"these look now: {', '.join(left)}" if left else "all have looked just now"
        return {"done": words, "asked": asked, "left": left}

    def looks_left(self, asked: float) -> list[str]:
        """Which of these checks have not run since `asked`. One that ran right before does not look again so soon."""
        before = asked - EARLY_AGAIN_SECONDS
        names = self._concerned_by_job_end()
        return [str(name) for name in names if name not in self.results or self.results[name].started < before]

    def _concerned_by_job_end(self) -> list[RunName]:
        """Without GPU checks if the driver is closed after each job: to open it costs seconds."""
        unheld = self.is_driver_unheld()
        return [n for n in self.concerned(JOB_END) if not (unheld and self.configured.check(n).uses == "nvml")]

    # --- the worker's answers

    def look(self) -> Seen:
        """Take replies. Most checks answer within a millisecond: the rest of the loop need not run between them."""
        self.look_for_jobs()
        until = self._monotonic() + BURST_SECONDS
        seen = self._seen(self.rounds.step())
        while seen == Seen() and self.runner.busy and self.runner.answers_within(until - self._monotonic()):
            seen = self._seen(self.rounds.go_on())
        return seen

    def _seen(self, step: Step) -> Seen:
        seen = Seen(step.round_ended)
        for reply in step.replies:
            seen = self.take(reply, seen)
        return seen

    def take(self, reply: Reply, seen: Seen) -> Seen:
        """Take one reply. What it brought for others is added to `seen`."""
        try:
            return self._take(reply, seen)
        except Exception as error:
            guard.drop(WORKER, error, op_of(reply.request.kind))
            why = f"healthd makes a mistake with the answer: {words(error)}"
            with guard.at(WORKER):  # it could not look, which is neither good nor bad news
                return self._take(replace(reply, outcome=Outcome.FAILED, answer=None, error=why), seen)
        return seen

    def _take(self, reply: Reply, seen: Seen) -> Seen:
        kind = reply.request.kind
        if kind is Run:
            self._checked(reply)
            self._renew_inventory(reply)
        elif kind is AppendEvents:
            self.delivery.ended(reply)
        elif kind is LookAtOwnFiles:
            self._know_own_files(reply)
        elif kind is WriteFile:
            self._wrote_textfile(reply)
        elif reply.outcome is not Outcome.COMPLETED:
            log.error("the worker could not %s: %s", op_of(reply.request.kind).replace("_", " "), reply.error)
            if kind is SaveCopy:
                self.copy_failures += 1
                self.copy_trouble = reply.error or reply.outcome.value.replace("_", " ")
                self._memory.uncopied = True  # it is tried again after the next round
            elif kind is TakeInventory and reply.outcome is Outcome.TIMED_OUT:
                self.rounds.task(reply.request)  # again when the worker that hangs in it has ended
        elif kind is SaveCopy:
            self.copy_trouble = ""
        elif kind is TakeInventory:
            inventory = reply.answer
            assert isinstance(inventory, Inventory)
            whole = when_whole(self._memory.ledger.whole_gpus, inventory.gpus)
            self._memory.change(whole_gpus=whole)
            self._inventory_at = self._monotonic()
            return seen._replace(inventory=inventory)
        elif kind is ReadClusterName:
            assert isinstance(reply.answer, str)
            self._memory.know_cluster(reply.answer)
        return seen._replace(journal=reply) if kind is ReadJournal else seen

    def _wrote_textfile(self, reply: Reply) -> None:
        """Metrics that the collector lacks are a trouble, and a line of the log each time the reason changes."""
        trouble = ""
        if reply.outcome is not Outcome.COMPLETED:
            why = without_class(reply.error) or reply.outcome.value.replace("_", " ")
            assert isinstance(reply.request.asked, WriteFile)
            trouble = f"no metrics in {reply.request.asked.path} (metrics.textfile): {why}"
        if trouble not in ("", self.textfile_trouble):
            log.error("%s", trouble)
        self.textfile_trouble = trouble

    def _checked(self, reply: Reply) -> None:
        """One run of a check is over: its findings become conditions, its counters' past goes on."""
        name = reply.run
        if name not in self.configured.runs:
            return  # a reload removed the run meanwhile
        check, config, memory = self.configured.check(name), self.configured.runs[name], self._memory
        if check.when and not self.is_idle:
            return  # jobs came while it ran
        silent = self._silent_seconds(reply)
        if abs(reply.clock_step) > CLOCK_STEP_SECONDS:  # its readings have times of two clocks
            why = "the clock was set while it ran"
            reply = replace(reply, outcome=Outcome.FAILED, answer=None, error=why, told=None)
            self.rounds.look_early(name, self._monotonic() + EARLY_AGAIN_SECONDS)
        result = result_of(check, config, reply, began(reply, self._now()), silent)
        ledger, result = intake.looked(memory.ledger, result, config, self._now())
        self._note(result)
        memory.take(ledger)
        if isinstance(reply.answer, RunAnswer):
            memory.set_past(str(name), reply.answer.past)
        again_at = verdict.next_look(memory.conditions).get(name)
        if again_at is not None and again_at > self._now():
            self.rounds.look_early(name, self._monotonic() + max(again_at - self._now(), 0.1))

    def _silent_seconds(self, reply: Reply) -> float:
        """For how long what the check asks has not answered, in this run and those before; 0 if it did."""
        resource, now = reply.request.resource, self._monotonic()
        if reply.outcome is Outcome.STUCK or (reply.outcome is Outcome.TIMED_OUT and reply.seconds):
            self._overdue_since.setdefault(resource, now - reply.seconds)
        elif reply.outcome is not Outcome.TIMED_OUT:
            self._overdue_since.pop(resource, None)
        return now - self._overdue_since.get(resource, now)

    def _note(self, result: CheckResult) -> None:
        """Keep the last result of a run. The log is told when its outcome becomes another than completed."""
        name, outcome = result.run, result.outcome
        before = self.results.get(name)
        if outcome is not Outcome.COMPLETED and (before is None or before.outcome is not outcome):
            error = f": {result.error}" if result.error else ""
            log.warning("check %s: %s%s", name, outcome.value.replace("_", " "), error)
        if before is None or weighed(before) != weighed(result):
            self.turns += 1
        self.results[name] = result
        self.outcomes[name.check, name.instance, outcome.value] += 1

    # --- healthd's own files

    def own_files_changed(self) -> str:
        """One sentence if they are gone or replaced, "" if not. It may hang with their disk, as a worker's start."""
        return installed_files.trouble(self._own_files, installed_files.identities(list(self._own_files)))

    def _know_own_files(self, reply: Reply) -> None:
        if reply.outcome is Outcome.COMPLETED:
            assert isinstance(reply.answer, dict)
            found = installed_files.trouble(self._own_files, reply.answer)
        elif reply.outcome is Outcome.FAILED:  # no worker could be started, or it ended at once
            found = self.own_files_changed() or f"no worker answers: {reply.error}"
        else:
            return  # it hangs, which says nothing of the files
        if found and found != self.files_trouble:
            log.error("%s", found)
        self.files_trouble = found

    # --- the inventory, and the ledger's copy

    def renew_inventory_soon(self) -> None:
        """What this node has may have changed: it is read again with the next GPU check."""
        self._inventory_at = -FOREVER

    def _renew_inventory(self, reply: Reply) -> None:
        """Read the inventory again if it may be news, before the driver that a GPU check opened is closed."""
        if reply.request.resource != "nvml" or reply.outcome is not Outcome.COMPLETED:
            return
        result = self.results.get(reply.run)
        is_old = self._monotonic() - self._inventory_at >= INVENTORY_SECONDS
        if is_old or (result is not None and outgrown(self._memory.ledger.inventory, result.observations)):
            self.rounds.task(INVENTORY)

    def copy_ledger(self, round_ended: bool) -> None:
        """The worker copies the ledger to the state directory, whose disk may hang: each round, and at once what we did
        in Slurm. A machine that is booted again minutes after its drain must know that the drain is its own."""
        if self._memory.uncopied and (round_ended or self._memory.slurm_uncopied):
            self.rounds.task(self._copy_request())

    def _copy_request(self) -> Request:
        memory, settings = self._memory, self.configured.settings
        asked = SaveCopy(settings.runtime_dir, settings.state_dir, NAMES, memory.copy_unread)
        memory.uncopied = memory.slurm_uncopied = memory.copy_unread = False
        return Request("state_dir", TASK_SECONDS, asked)

    # --- the stream

    def completed(self) -> set[str]:
        """The checks whose runs all completed the last time."""
        failed = {name.check for name, result in self.results.items() if result.outcome is not Outcome.COMPLETED}
        return {name.check for name in self.results} - failed

    def write_stream(self, round_ended: bool) -> None:
        """The worker writes the lines that wait. After a failure the next round tries again."""
        if self.delivery.is_due and (round_ended or not self.delivery.trouble):
            self.rounds.task(self.delivery.request())

    def last_words(self, seconds: float) -> None:
        """Before the end, in that time: the lines that wait, and the ledger's copy. A worker that does something else
        than to write such is not waited for."""
        until, under_way = self._monotonic() + seconds, self.runner.request
        if under_way is not None and (under_way.resource != "state_dir" or not self._ends(None, until)):
            return
        for make in (self.delivery.request, self._copy_request):
            if self._memory.unsaved:
                self._memory.save()
            if self._memory.unsaved or not self._ends(self.runner.send(make()), until):
                return

    def _ends(self, reply: Reply | None, until: float) -> bool:
        """Whether the request in flight ends by then (monotonic)."""
        while reply is None and self._monotonic() < until:
            poll(list(self.runner.waits()), until - self._monotonic())
            reply = self.runner.step()
        if reply is not None:
            self.take(reply, Seen())
        return reply is not None

    def round_is_over(self) -> None:
        self.rounds.task(Request("own_files", TASK_SECONDS, LookAtOwnFiles(tuple(self._own_files))))
        self._driver_is_unheld = self.is_driver_unheld()

    def _asked_of(self, run: ScheduledRun) -> Run:
        past = self._memory.past.get(str(run.name), "")
        return Run(*run.name, self.configured.loaded.tables[run.name], past, self._memory.ledger.boot_id)


def weighed(result: CheckResult) -> tuple[object, ...]:
    """What of a run the verdict rests on besides the conditions. What it found can be over though no condition changes:
    where somebody said "repaired" first, and the check looked afterwards."""
    bad = {(finding.key, finding.severity) for finding in result.findings if finding.severity >= Severity.DEGRADED}
    return result.outcome, result.error, bad


def outgrown(inventory: Inventory, observed: Iterable[Observation]) -> bool:
    """Whether NVML shows more GPUs than the inventory, or another driver. A lost GPU stays in it, with its name."""
    return any(
        (seen.name == "gpus" and seen.value > len(inventory.gpus))
        or (seen.name == "gpu_driver_info" and ("version", inventory.driver_version) not in seen.labels)
        for seen in observed
    )
