"""The daemon, top to bottom:

    fault on the node -> finding -> condition -> decision -> Slurm drains (and requeues) -> repaired -> Slurm resumes

One process that sleeps in one wait. What can block is done by the worker (work/) or by child processes
(slurm/driver.py); this process only reads what they say. What it believes is the ledger (judge/memory.py), a value that
is replaced; what follows from it (judge/verdict.py, slurm/policy.py) is computed by pure functions.
"""

from __future__ import annotations

import dataclasses
import fcntl
import functools
import logging
import os
import select
import signal
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import healthd
from healthd import guard
from healthd.config import ConfigError, Loaded, listen_address
from healthd.convert import load
from healthd.guard import KERNEL_LOG, METRICS, REMOVALS, SLURM, WORKER, words
from healthd.host import Host
from healthd.judge import absorb, endings, incidents, intake, ledger, verdict
from healthd.judge.memory import NAMES, Memory
from healthd.kernel.fold import fold_events, newest_of_each
from healthd.kernel.listener import Listener
from healthd.kernel.parse import UNREAD, as_unread
from healthd.kernel.source import Gap, RawLine
from healthd.machine.process import has_no_jobs
from healthd.machine.removals import removals
from healthd.model import (
    CheckResult,
    ConditionKey,
    Decision,
    Finding,
    FleetHold,
    Health,
    Inventory,
    KernelEvent,
    Leave,
    Mode,
    NodeState,
    Observation,
    Outcome,
    RunName,
    SlurmMemory,
    Verdict,
)
from healthd.say import commands, service
from healthd.say.control_server import ControlServer
from healthd.say.status import SOCKET, VERDICT_FILE, Snapshot, decision_words, status_json, verdict_line
from healthd.settings import registry
from healthd.slurm import fleet_limit
from healthd.slurm.driver import SlurmDriver
from healthd.slurm.job_at_source import LOOK_AGAIN_SECONDS, JobAtSource, with_jobs
from healthd.slurm.look import HELD, ReconcileReport
from healthd.slurm.policy import Policy, decide, held_from, is_idle, is_quiet
from healthd.slurm.slurmd_start import SlurmdStart
from healthd.work.results import CLOCK_STEP_SECONDS, began, result_of
from healthd.work.rounds import EARLY_AGAIN_SECONDS, Rounds
from healthd.work.runner import Reply, Request, Runner
from healthd.work.schedule import Job
from healthd.work.worker import Setup

log = logging.getLogger("healthd")

STOP_SECONDS = 2.0  # how long an idle worker may take to end; a busy one is left to end by itself
ERRAND_SECONDS = 20.0
JOURNAL_LINES = 10_000
OPENING_SECONDS = 60.0  # for 8 GPUs whose driver nobody holds: 1-3 s each to initialise
QUICK_SECONDS = 0.002  # a check that answers so soon is waited for, for BURST_SECONDS together
BURST_SECONDS = 0.02
READY_SECONDS = 60.0  # a drain at the start gets so long to stand before slurmd is started
INCIDENT_SECONDS = 600.0  # of the log are searched for what else was of the same incident
FOREVER = float("inf")
LATEST = 1e12  # seconds since the epoch: no clock stands later
LONGEST_SLEEP_SECONDS = 24 * 3600.0  # poll(2) takes no longer one than 24 days
FoundByCheck = list[tuple[str, list[Finding]]]  # of each check that found something
JOB_END = "job_end"  # in AFTER_EVENTS of a check: it looks when the epilog says that a job ended

INVENTORY = Request("nvml", ERRAND_SECONDS, {"op": "inventory", "gpus": True})
INVENTORY_SECONDS = 24 * 3600.0

# The settings and the checks there are. Given a directory, the site's checks are those that are there.
LoadSettings = Callable[[str | None], tuple[Loaded, dict[str, registry.Check]]]

# What a reload leaves as it was: it takes effect at the next start.
FIXED_SETTINGS = (
    *("root", "state_dir", "runtime_dir", "checks_dir", "node_name", "nvml", "kernel_log", "metrics"),
    "round_timeout_seconds",
)


def run(load_settings: LoadSettings) -> int:
    """`healthd run`: until SIGTERM. Raises ConfigError, and OSError where it cannot have its runtime directory."""
    service.set_up_logging()
    daemon = Daemon(load_settings)
    try:
        while not daemon.stopping:
            daemon.wait()
            daemon.must_hold_its_directory()
            daemon.listen()
            daemon.look()
            daemon.pass_time()
            daemon.decide()
            daemon.publish()
            daemon.say_ready()
    finally:
        daemon.shut_down()
    return 0


class Daemon:
    # --- start

    def __init__(self, load_settings: LoadSettings) -> None:
        self.load_settings = load_settings
        self.known_jobs: dict[tuple[bool, bool], list[Job]] = {}
        self.loaded, self.checks = load_settings(None)
        self.settings = settings = self.loaded.settings
        self.now, self.monotonic = time.time, time.monotonic
        self.host = Host(settings.root)
        self.boot_id = self.host.boot_id()
        self.driver_is_unheld = self.is_driver_unheld()
        os.makedirs(settings.runtime_dir, mode=0o755, exist_ok=True)
        self.is_without_jobs, self.looked_for_jobs_at = False, -FOREVER
        self.lock = lock(settings.runtime_dir)
        ledger.remove_leftovers(settings.runtime_dir)
        self.wakeup = wake_on_signals()
        self.watchdog_seconds = service.watchdog_seconds() or FOREVER

        self.runner = Runner(
            Setup(settings.root, settings.nvml.fake, settings.checks_dir),
            settings.runtime_dir,
            self.monotonic,
            self.now,
        )
        self.memory = Memory(settings.runtime_dir, self.now)
        self.memory.recall(self.read_copy, self.boot_id, settings.mode)
        self.memory.keep_only(self.loaded.checks)
        self.memory.set_conditions(absorb.reconfigured(self.memory.conditions, self.loaded.checks))
        self.rounds = Rounds(
            self.runner,
            settings.node_name,
            settings.round_timeout_seconds,
            self.jobs,
            self.request_of,
            self.now,
            self.monotonic,
        )
        self.kernel = Listener(
            settings.kernel_log.source,
            settings.root,
            self.boot_id,
            self.memory.ledger.cursors.get(settings.kernel_log.source),
            settings.kernel_log.accept_injected,
            self.now,
            self.monotonic,
        )
        self.removals = removals(settings.root)
        self.job_at_source = JobAtSource(
            settings.root, settings.node_name, lambda: self.settings.mode is not Mode.OBSERVE, self.monotonic
        )
        self.slurm = SlurmDriver(
            settings, self.boot_id, self.remember_slurm, self.may_change_slurm, self.now, self.monotonic
        )
        self.slurmd = SlurmdStart(settings.root, self.monotonic)
        self.control = ControlServer(self.path(SOCKET), self.command, self.monotonic)

        self.stopping = self.said_ready = self.only_worker_woke = False
        self.ready_by = FOREVER
        self.stop_metrics: Callable[[], None] | None = None
        self.metrics_trouble = ""
        self.started = self.now()
        self.incidents: dict[ConditionKey, ConditionKey] = {}
        self.results: dict[RunName, CheckResult] = {}
        self.outcomes: Counter[tuple[str, str, str]] = Counter()
        self.commanded: Counter[str] = Counter()
        self.turns = 0  # how often the outcome of some check has changed
        self.overdue_since: dict[RunName, float] = {}
        self.judged: tuple[object, ...] = ()
        self.decided_on: tuple[object, ...] = ()
        self.verdict = Verdict(Health.UNKNOWN)
        self.judge()
        self.decision: Decision = Leave("nothing has been looked at yet")
        self.slurm_aim: object = None
        self.slurm_again_at = FOREVER
        self.verdict_word = ""
        self.copy_failures = self.reload_failures = self.events_forgotten = 0
        self.reload_trouble = ""
        self.ticked = self.monotonic()
        self.clock_offset = self.now() - self.monotonic()
        self.inventory_at = -FOREVER
        self.rounds.errand(INVENTORY)
        self.published_on: tuple[object, ...] = ()
        self.published = self.snapshot()
        self.serve_metrics()
        log.info(
            "healthd %s on %s: mode %s, %d checks",
            healthd.__version__,
            settings.node_name,
            settings.mode.value,
            len(self.loaded.checks),
        )

    def path(self, name: str) -> str:
        return os.path.join(self.settings.runtime_dir, name)

    def read_copy(self) -> dict[str, str | None]:
        """The ledger's copy, read by the worker, since that disk may hang. Bounded: it comes before the first wait."""
        table = {"op": "load_copy", "from": self.settings.state_dir, "names": list(NAMES)}
        reply = self.runner.send(Request("state_dir", ERRAND_SECONDS, table))
        while reply is None:
            poll([(self.wakeup, False), *self.runner.waits()], self.runner.deadline - self.monotonic())
            if set(signals(self.wakeup)) - {signal.SIGHUP}:
                # Nothing is written: a live ledger that began anew would count for more than the copy.
                log.info("stopped before the copy of the ledger in %s was read", self.settings.state_dir)
                raise SystemExit(0)
            reply = self.runner.step()
        if reply.outcome is not Outcome.COMPLETED:
            log.error("the copy of the ledger in %s cannot be read: %s", self.settings.state_dir, reply.error)
            self.memory.copy_unread = True
        texts: dict[str, str | None] = reply.table.get("texts", {})
        return texts

    # --- the one wait

    def wait(self) -> None:
        """Sleep until something can be read, a deadline passes, or something is due."""
        pause, acknowledged = self.memory.ledger.pause, self.memory.ledger.conditions
        moments = (
            self.rounds.deadline,
            self.slurm.deadline,
            self.slurm_again_at,
            self.slurmd.deadline,
            self.kernel.deadline,
            self.removals.deadline,
            self.job_at_source.deadline,
            self.control.deadline,
            self.monotonic() + pause.until - self.now() if pause else FOREVER,
            self.monotonic() + min((c.ack.until for c in acknowledged if c.ack), default=FOREVER) - self.now(),
            self.monotonic() + self.held_from - self.now() if self.verdict_word == "drain" else FOREVER,
            self.ticked + self.watchdog_seconds / 2,
            FOREVER if self.said_ready else self.ready_by,
        )
        waits = [(self.wakeup, False), *self.runner.waits(), *self.slurm.waits()]
        waits += [*self.kernel.waits(), *self.job_at_source.waits(), *self.control.waits(), *self.removals.waits()]
        ready = poll(waits, min(moments) - self.monotonic())
        others = (self.kernel, self.removals, self.job_at_source, self.control)
        others_wait_until = min(other.deadline for other in others)
        worker = {descriptor for descriptor, _ in self.runner.waits()}
        self.only_worker_woke = bool(ready) and ready <= worker and self.monotonic() < others_wait_until
        service.watchdog()
        for number in signals(self.wakeup):
            if number == signal.SIGHUP:
                self.reload()
            else:
                self.stopping = True

    def must_hold_its_directory(self) -> None:
        """Who removes the runtime directory takes the verdict, the socket and the lock: drains would go on, and a
        second daemon could start. Raises OSError: what is known is saved there again, systemd starts healthd anew."""
        directory = self.settings.runtime_dir
        if holds(self.lock, directory):
            return
        os.makedirs(directory, mode=0o755, exist_ok=True)
        self.lock = lock(directory)
        self.memory.save_anew()
        raise OSError(f"{directory}, or the lock in it, was removed while healthd ran: it must be started anew")

    # --- listen: people, kernel lines, devices that go

    def listen(self) -> None:
        if self.only_worker_woke:  # dozens of times a round
            return
        self.control.step()
        self.hear(self.kernel.read())
        self.hear_of_jobs()
        if self.kernel.status.source not in self.memory.ledger.cursors:
            self.note_cursor()  # what comes from now on is news, also if it comes while we are down
        gap = self.kernel.gap()
        if gap is not None and (request := self.journal_request(gap)) != self.runner.request:
            self.rounds.errand(request)  # what is being read would otherwise be read, and counted, twice
        removed: list[str] = []
        with guard.at(REMOVALS):
            removed = self.removals.read()
        for pci in removed:
            log.warning("device %s was removed", pci or "(which one was not heard)")
            self.inventory_at = -FOREVER
            self.rounds.look_after_event(self.concerned("pci_remove"))

    def hear(self, events: list[KernelEvent]) -> None:
        """Kernel events -> findings -> conditions. One save with the log's cursor: each event counts once."""
        if events:
            self.take_in_what_can_be(events)
            self.note_cursor()
            self.memory.save()

    def take_in_what_can_be(self, events: list[KernelEvent]) -> None:
        """Where healthd makes a mistake with some of them, those are found by halves: it costs the others nothing, and
        is told as a line that could not be read."""
        before = self.memory.ledger, self.events_forgotten
        try:
            self.take_in(events)
        except Exception as error:
            ledger_before, self.events_forgotten = before
            self.memory.go_back_to(ledger_before)
            if len(events) > 1:
                half = len(events) // 2
                self.take_in_what_can_be(events[:half])
                self.take_in_what_can_be(events[half:])
                return
            guard.drop(KERNEL_LOG, error, events[0].text)
            self.memory.set_conditions(absorb.unread(self.memory.conditions, events[0], self.boot_id))

    def take_in(self, events: list[KernelEvent]) -> None:
        """What is new is judged, all of it, before anything is forgotten."""
        memory = self.memory
        before = {event.sequence: event.lines for event in memory.ledger.events}
        recent, touched, sequence = fold_events(
            memory.ledger.events, events, memory.ledger.next_sequence, ledger.KEEP_EVENTS_SECONDS
        )
        with guard.at(KERNEL_LOG):  # whose jobs they are is not needed to judge them
            recent = self.job_at_source.name(recent, touched, memory.ledger.inventory.gpus, self.now())
        recent, findings = self.judged_events(recent)
        by_sequence = {event.sequence: event for event in recent}
        news = [event for number in touched if (event := by_sequence.get(number)) and not event.history]
        known = set(memory.conditions)
        for name, found in findings:
            memory.set_conditions(
                absorb.absorb_events(
                    memory.conditions,
                    name,
                    found,
                    by_sequence,
                    frozenset(touched),
                    self.boot_id,
                    memory.ledger.cleared,
                )
            )
        listeners = dict.fromkeys(name for name, _ in self.loaded.checks)
        repairs = [repair for name in listeners for repair in self.checks[name].repairs(news)]
        if repairs:
            memory.set_conditions(endings.after_repairs(memory.conditions, repairs, self.now()))
        memory.set_conditions(absorb.bounded(memory.conditions))
        kept = newest_of_each(recent, ledger.KEEP_EVENTS)
        memory.change(events=kept, next_sequence=sequence)
        self.count_forgotten(len(recent) - len(kept))
        with guard.at(KERNEL_LOG):  # what follows from news is of no weight beside the news
            self.tell(news, before)
            if not known.issuperset(memory.conditions):
                self.tell_incidents()

    def tell(self, news: Iterable[KernelEvent], before: Mapping[int, int]) -> None:
        """To the log, and to the checks that look at once. `before`: how many lines each event had."""
        for event in news:
            # One that grows: again at ten lines, a hundred, ... A storm must not become one in the journal.
            if len(str(event.lines)) > len(str(before.get(event.sequence, ""))):
                log.info("kernel: %s%s", event.text[:300], f" ({event.lines} lines)" if event.lines > 1 else "")
            self.rounds.look_after_event(self.concerned(event.kind))

    def count_forgotten(self, events: int) -> None:
        before, self.events_forgotten = self.events_forgotten, self.events_forgotten + events
        if events and len(str(self.events_forgotten)) > len(str(before or "")):
            sentence = "%d kernel events were judged and are no longer kept: more than %d came in a day"
            log.warning(sentence, self.events_forgotten, ledger.KEEP_EVENTS)

    def tell_incidents(self) -> None:
        """Which conditions are one fault: said when one of them opens, shown while they stand."""
        memory = self.memory
        since = self.now() - INCIDENT_SECONDS
        events = [event for event in memory.ledger.events if event.last_time >= since and not event.history]
        found = incidents.causes(memory.ledger.conditions, events, memory.ledger.inventory)
        for follows, first in found.items():
            if self.incidents.get(follows) != first:
                log.warning("incident: %s is of one incident with %s", follows, first)
        standing = memory.conditions
        self.incidents = {follows: first for follows, first in self.incidents.items() if follows in standing} | found

    def judged_events(self, events: tuple[KernelEvent, ...]) -> tuple[tuple[KernelEvent, ...], FoundByCheck]:
        """(`events`, what the checks find in them). One that a check fails on is from now on a line not read."""
        failed: dict[int, Exception] = {}
        found = self.found_in(events, lambda event, error: failed.setdefault(event.sequence, error))
        if not failed:
            return events, found
        for event in events:
            if event.sequence in failed:
                guard.drop(KERNEL_LOG, failed[event.sequence], event.text)
        readable = [
            as_unread(e) if e.sequence in failed else e for e in events if e.sequence not in failed or e.kind != UNREAD
        ]
        return tuple(readable), self.found_in(tuple(readable))

    def found_in(
        self, events: tuple[KernelEvent, ...], unjudged: Callable[[KernelEvent, Exception], object] = lambda *_: None
    ) -> FoundByCheck:
        """What the checks that listen make of these events."""
        memory, every = self.memory, []
        for (name, instance), config in self.loaded.checks.items():
            if instance or not self.checks[name].listens:
                continue
            correlate = functools.partial(
                self.checks[name].correlate, node=memory.ledger.inventory, config=config, unjudged=unjudged
            )
            known = (*memory.ledger.conditions, *memory.ledger.cleared)
            found = intake.findings_in(events, correlate, known)
            if found:
                every.append((name, [absorb.as_configured(finding, config) for finding in found]))
        return every

    def hear_of_jobs(self) -> None:
        """Where Slurm uses no cgroups it tells a moment later which jobs were at the source."""
        memory = self.memory
        jobs: dict[int, str] = {}
        with guard.at(SLURM):
            jobs = self.job_at_source.step(memory.ledger.events, memory.ledger.inventory.gpus, self.now())
        if jobs:
            memory.change(events=with_jobs(memory.ledger.events, jobs))
            for _, found in self.found_in(memory.ledger.events):
                memory.set_conditions(absorb.with_jobs(memory.conditions, found, jobs))
            memory.save()

    def note_cursor(self) -> None:
        """How far the log was read, to be saved together with what was made of it."""
        if self.kernel.cursor is not None:
            cursors = {**self.memory.ledger.cursors, self.kernel.status.source: self.kernel.cursor}
            self.memory.change(cursors=cursors)

    def concerned(self, kind: str) -> list[RunName]:
        """The checks that look at once after an event of this kind."""
        return [job.name for job in self.jobs() if kind in self.checks[job.check].after_events]

    def journal_request(self, gap: Gap) -> Request:
        """Lines that the ring buffer lost: the worker asks the journal, whose files are on a disk."""
        table = {
            "boot_id": self.boot_id,
            "since_usec": gap.since_usec,
            "until_usec": gap.until_usec,
            "limit": JOURNAL_LINES,
            "accept_injected": self.settings.kernel_log.accept_injected,
        }
        return Request("journal", ERRAND_SECONDS, {"op": "read_journal", "gap": table, "history": gap.history})

    # --- look: the worker runs what is due, one check after another

    def jobs(self) -> list[Job]:
        """What comes round. Where nobody else holds the driver GPU checks are far apart: opening it costs seconds a
        GPU, and closing it wipes the volatile ECC counts."""
        unheld, idle = self.driver_is_unheld, self.is_idle()
        if (unheld, idle) not in self.known_jobs:
            self.known_jobs[unheld, idle] = list(self.make_jobs(unheld, idle))
        return self.known_jobs[unheld, idle]

    def is_driver_unheld(self) -> bool:
        return not self.settings.nvml.fake and self.host.driver_is_held() is False

    def is_idle(self) -> bool:
        """Whether no job is on this node: drained and idle, or empty since the last job ended."""
        return self.is_drained() or self.is_empty()

    def is_empty(self) -> bool:
        """Whether Slurm's cgroups show no job since an epilog told that one ended. Another may come any moment."""
        if self.is_without_jobs and self.monotonic() >= self.looked_for_jobs_at + LOOK_AGAIN_SECONDS:
            self.look_for_jobs()
        return self.is_without_jobs

    def look_for_jobs(self) -> None:
        self.looked_for_jobs_at = self.monotonic()
        before, self.is_without_jobs = self.is_without_jobs, has_no_jobs(self.settings.root)
        if before and not self.is_idle():
            self.forget_idle()

    def is_drained(self) -> bool:
        """Whether Slurm has shown this node drained and idle since the last round: an older word may be past. It is
        asked each round only while we want or hold something of it, never in observe mode."""
        slurm = self.slurm.status
        is_old = self.now() - slurm.read_at > 2 * self.settings.interval_seconds
        if self.settings.mode is Mode.OBSERVE or slurm.node is None or is_old:
            return False
        return not is_quiet(self.verdict, self.memory.ledger.slurm) and is_idle(slurm.node)

    def make_jobs(self, unheld: bool, idle: bool) -> Iterator[Job]:
        for (name, instance), config in self.loaded.checks.items():
            check = self.checks[name]
            interval, timeout = config.interval_seconds or self.settings.interval_seconds, config.timeout_seconds
            if unheld and check.uses == "nvml":
                interval = max(interval, self.settings.nvml.unheld_interval_seconds)
                timeout = max(timeout, OPENING_SECONDS)
            if check.runs and (idle or not check.when):
                yield Job(name, instance, check.resource(instance), interval, timeout)

    def request_of(self, job: Job) -> dict[str, Any]:
        return {
            "op": "run",
            "check": job.check,
            "instance": job.instance,
            "config": self.loaded.tables[job.name],
            "past": self.memory.past.get(str(job.name), ""),
            "boot_id": self.boot_id,
        }

    def look(self) -> None:
        """Most checks answer within a millisecond: the rest of the loop does not run between all of them."""
        until = self.monotonic() + BURST_SECONDS
        self.take_replies()
        while self.monotonic() < until and self.runner.busy and self.runner.answers_within(QUICK_SECONDS):
            self.take_replies()

    def take_replies(self) -> None:
        for reply in self.rounds.step():
            try:
                self.take(reply)
            except Exception as error:
                guard.drop(WORKER, error, reply.request.table["op"])
                why = f"healthd makes a mistake with the answer: {words(error)}"
                with guard.at(WORKER):  # it could not look, which is neither good nor bad news
                    self.take(dataclasses.replace(reply, outcome=Outcome.FAILED, table={}, error=why))

    def take(self, reply: Reply) -> None:
        op = reply.request.table["op"]
        if op == "run":
            self.checked(reply)
            self.renew_inventory(reply)
        elif reply.outcome is not Outcome.COMPLETED:
            log.error("the worker could not %s: %s", op.replace("_", " "), reply.error)
            if op == "save_copy":
                self.copy_failures += 1
                self.memory.uncopied = True  # again after the next round
            elif op == "inventory" and reply.outcome is Outcome.TIMED_OUT:
                self.rounds.errand(reply.request)  # when the worker that hangs in it has ended
        elif op == "inventory":
            self.memory.change(inventory=load(Inventory, reply.table["inventory"]))
            self.inventory_at = self.monotonic()
        if op == "read_journal":
            self.asked_journal(reply)

    def checked(self, reply: Reply) -> None:
        """One run of a check is over: its findings become conditions, its counters' past goes on."""
        name = RunName(reply.request.table["check"], reply.request.table["instance"])
        if name not in self.loaded.checks:
            return  # a reload took it away while it ran
        check, config, memory = self.checks[name.check], self.loaded.checks[name], self.memory
        if check.when and not self.is_idle():
            return  # jobs came while it ran
        if reply.outcome is Outcome.STUCK or (reply.outcome is Outcome.TIMED_OUT and reply.seconds):
            self.overdue_since.setdefault(name, self.monotonic() - reply.seconds)
        elif reply.outcome is not Outcome.TIMED_OUT:
            self.overdue_since.pop(name, None)
        if abs(reply.clock_step) > CLOCK_STEP_SECONDS:  # the moments in its past are of two clocks
            why = "the clock was set while it ran"
            reply = dataclasses.replace(reply, outcome=Outcome.FAILED, table={}, error=why, told=None)
            self.rounds.look_early(name, self.monotonic() + EARLY_AGAIN_SECONDS)
        started = began(reply, self.now())
        silent = self.monotonic() - self.overdue_since.get(name, self.monotonic())
        result = result_of(check, config, reply, started, silent)
        outcome, error = result.outcome, result.error
        before = self.results.get(name)
        if outcome is not Outcome.COMPLETED and (before is None or before.outcome is not outcome):
            log.warning("check %s: %s%s", str(name), outcome.value.replace("_", " "), f": {error}" if error else "")
        if before is None or (before.outcome, before.error) != (outcome, error):
            self.turns += 1
        self.results[name] = result
        self.outcomes[name.check, name.instance, outcome.value] += 1
        memory.set_conditions(
            absorb.absorb_result(memory.conditions, result, config.clear_after, self.boot_id, memory.ledger.cleared)
        )
        if outcome in (Outcome.COMPLETED, Outcome.FAILED):  # one device that cannot be read hides no growth on others
            if isinstance(reply.table.get("past"), str):
                memory.set_past(str(name), reply.table["past"])
            if result.repairs:
                memory.set_conditions(endings.after_repairs(memory.conditions, result.repairs, self.now()))
        again_at = verdict.next_look(memory.conditions).get(name)
        if again_at is not None and again_at > self.now():
            self.rounds.look_early(name, self.monotonic() + max(again_at - self.now(), 0.1))

    def renew_inventory(self, reply: Reply) -> None:
        """Before the driver is closed again that a GPU check has opened: what it shows now, if that may be news."""
        if reply.request.resource != "nvml" or reply.outcome is not Outcome.COMPLETED:
            return
        result = self.results.get(RunName(reply.request.table["check"], reply.request.table["instance"]))
        is_old = self.monotonic() - self.inventory_at >= INVENTORY_SECONDS
        if is_old or (result is not None and outgrown(self.memory.ledger.inventory, result.observations)):
            self.rounds.errand(INVENTORY)

    def asked_journal(self, reply: Reply) -> None:
        """What the journal had of a gap in the ring buffer."""
        asked = reply.request.table
        gap = Gap(asked["gap"]["since_usec"], asked["gap"]["until_usec"], asked["history"])
        if reply.outcome is not Outcome.COMPLETED:
            self.kernel.not_filled(gap, reply.error)
            return
        lines = [RawLine(when, text, usec=usec) for when, text, usec, _ in reply.table["lines"]]
        self.hear(self.kernel.filled(gap, lines, asked["gap"]["limit"]))

    # --- time goes by: windows, pauses, a clock that was set

    def pass_time(self) -> None:
        monotonic, now = self.monotonic(), self.now()
        seconds, self.ticked = monotonic - self.ticked, monotonic
        step = now - monotonic - self.clock_offset
        if abs(step) > CLOCK_STEP_SECONDS:
            log.warning("the clock was set by %+.1f s: the ledger's times are moved with it", step)
            self.clock_offset += step
            self.memory.set_clock(step, since=self.started, until=now - step)
            self.started += step
        slurm = self.memory.ledger.slurm
        self.memory.pass_quiet_time(seconds, loaded=not (slurm.reason or slurm.overruled or slurm.adopted))
        pause = self.memory.ledger.pause
        if pause and now >= pause.until:
            log.info("the pause is over: %s", pause.why)
            commands.end_pause(self.memory, now)
            self.rounds.look_now()
        self.memory.end_acks()

    # --- decide: conditions -> verdict -> decision -> Slurm

    def judge(self) -> None:
        """The verdict, anew only where something changed that it rests on: this is asked after every check."""
        known, jobs = self.memory.ledger, self.jobs()
        rests_on = (known.conditions, known.trusted_since, jobs, self.turns)
        if rests_on != self.judged:
            self.judged = rests_on
            names = [job.name for job in jobs if self.is_drained() or not self.checks[job.check].when]
            optional = {name for name in names if not self.checks[name.check].holds_resume(self.loaded.checks[name])}
            self.verdict = verdict.judge(known.by_key(), self.results, names, known.trusted_since, optional)

    def decide(self) -> None:
        before = self.verdict.health
        self.judge()
        if self.verdict.health is not before:
            log.info("health: %s, was %s", self.verdict.health.value, before.value)
        if self.settings.mode is Mode.OBSERVE:
            # No Slurm command at all: what would be done to a node that nobody holds.
            self.slurm.drop()
            self.slurm.step()
            self.slurm_again_at, self.slurm_aim = FOREVER, None
            self.slurmd.watch(False)
            rests_on = (self.verdict, self.policy())
            if rests_on != self.decided_on:
                self.decided_on = rests_on
                free = NodeState(self.settings.node_name, frozenset({"IDLE"}))
                self.decided(decide(self.verdict, free, SlurmMemory(), self.policy(), self.now()))
            return
        if self.slurmd.step():
            self.slurm.expect_registration()
            self.slurm_again_at = self.monotonic()
        report = self.slurm.step()
        if report is not None:
            self.slurm_was_looked_at(report)
        # In the same pass: what changed during the look wakes nobody afterwards.
        if not self.slurm.busy and self.must_look_at_slurm():
            self.slurm_again_at = FOREVER
            report = self.slurm.begin(self.verdict, self.memory.ledger.slurm, self.policy())
            if report is not None:
                self.slurm_was_looked_at(report)

    def may_change_slurm(self) -> bool:
        return self.settings.mode is not Mode.OBSERVE and self.memory.ledger.pause is None

    def policy(self) -> Policy:
        pause, slurm = self.memory.ledger.pause, self.settings.slurm
        return Policy(
            self.settings.mode,
            pause.until if pause else 0.0,
            slurm.command_seconds,
            slurm.requeue_again_seconds,
            slurm.max_restarts,
            slurm.admin_comment,
            self.settings.fleet,
        )

    def must_look_at_slurm(self) -> bool:
        """At the start, when what we want changed, each round while something is wanted or held, and to try again."""
        concerned = not is_quiet(self.verdict, self.memory.ledger.slurm)
        # Not when each was last seen: a storm of events is no reason to ask Slurm again and again.
        causes = tuple((c.code, c.subject, c.severity, c.critical_at) for c in self.verdict.causes)
        aim = (causes, concerned and self.verdict.may_resume, self.memory.ledger.pause, self.settings.mode)
        again = self.monotonic() >= self.slurm_again_at
        own = fleet_limit.is_own_hardware(self.verdict.causes)
        waits = fleet_limit.must_wait(self.memory.ledger.slurm.hold, own, self.now())  # not each round: it has its time
        if aim == self.slurm_aim and not again and not (concerned and self.rounds.ended and not waits):
            return False
        self.slurm_aim = aim
        return True

    def slurm_was_looked_at(self, report: ReconcileReport) -> None:
        """What Slurm says of people's hands on the node, kept in one save; and when to look again."""
        known, now = self.memory.conditions, self.now()
        if report.acknowledged:
            log.warning("an operator resumed the node: what stands is acknowledged, only what is seen again acts")
            self.memory.set_conditions(endings.resumed_by_operator(known, report.acknowledged_before, now))
            self.memory.forget_growth(c for key, c in self.memory.conditions.items() if c != known.get(key))
        if report.adopted:
            self.memory.set_conditions(
                absorb.adopted(known, report.adopted.code, report.adopted.subject, self.boot_id, now)
            )
        self.tell_hold(self.memory.ledger.slurm.hold, report.memory.hold)
        self.remember_slurm(report.memory)
        if report.node is not None and not self.is_idle():
            self.forget_idle()
        if report.trouble:
            log.warning("slurm: %s", report.trouble)
        for job in report.requeued:
            log.warning("job %s was requeued%s", job, f", held: {HELD}" if job in report.held else "")
        for job, why in report.spared:
            log.info("job %s is not requeued: %s", job, why)
        self.judge()
        self.decided_on = ()
        self.decided(report.decision)
        self.slurm_again_at = self.monotonic() + self.slurm.retry_seconds(report)
        self.slurmd.watch(self.slurm.waits_for_slurmd(report))

    def tell_hold(self, before: FleetHold | None, hold: FleetHold | None) -> None:
        if hold is not None and hold != before:
            level = logging.ERROR if hold.times else logging.INFO
            log.log(level, "%s; tried again in %.0f s", fleet_limit.why(hold), hold.until - self.now())

    def forget_idle(self) -> None:
        """Jobs are on this node or may come: what was found while there were none is no longer so."""
        only_then = {name for name in self.loaded.checks if self.checks[name.check].when}
        self.results = {name: result for name, result in self.results.items() if name not in only_then}
        self.memory.forget(only_then, "jobs may run here again")

    def remember_slurm(self, slurm: SlurmMemory) -> None:
        """Written down before the next command is sent: a daemon that is killed now knows later what it did."""
        self.memory.change(slurm=slurm)
        self.memory.save()

    def decided(self, decision: Decision) -> None:
        if decision != self.decision:
            log.info("decision: %s", decision_words(decision, self.slurm.status.owner))
        self.decision = decision

    # --- publish: the ledger and its copy, the verdict file, metrics, systemd

    def publish(self) -> None:
        if self.memory.unsaved or self.rounds.ended:
            self.memory.save()
        pause = self.memory.ledger.pause
        slurm = self.memory.ledger.slurm
        drain = bool(self.verdict.causes) and self.may_change_slurm() and self.now() < self.held_from
        drain = drain and not fleet_limit.is_withheld(self.verdict.causes, slurm)
        rests_on = (
            drain,
            self.verdict,
            self.decision,
            self.slurm.status,
            self.kernel.status,
            pause,
            self.runner.barred,
            slurm,
            self.settings.mode,
        )
        if rests_on == self.published_on and not self.rounds.ended:
            return
        self.published_on = rests_on
        self.published = self.snapshot()
        line = verdict_line(self.published, drain, self.now() + 3 * self.settings.interval_seconds)
        if self.rounds.ended or line.partition(" ")[0] != self.verdict_word:
            self.verdict_word = line.partition(" ")[0]
            self.write_verdict(line)
            self.write_textfile()
            service.status(f"{self.verdict.health.value}; {decision_words(self.decision, self.slurm.status.owner)}")
        if self.rounds.ended:
            self.rounds.ended = False
            self.driver_is_unheld = self.is_driver_unheld()
            self.kernel.round_is_over()
            self.note_cursor()
            self.copy_ledger()
            self.serve_metrics()
            self.ready_by = min(self.ready_by, self.monotonic() + READY_SECONDS)

    @property
    def held_from(self) -> float:
        return held_from(self.slurm.status.node, self.memory.ledger.slurm, self.boot_id)

    def say_ready(self) -> None:
        """With the first verdict; where that drains, with the drain: slurmd is started then, and takes jobs."""
        if self.said_ready or self.ready_by == FOREVER:
            return
        slurm = self.slurm.status
        waits = self.slurm.busy or not slurm.read_at or slurm.trouble
        if self.verdict.causes and self.may_change_slurm() and waits and self.monotonic() < self.ready_by:
            return
        self.said_ready = True
        service.ready(self.verdict.health.value)

    def write_verdict(self, line: str) -> None:
        try:
            ledger.replace_file(self.path(VERDICT_FILE), line, mode=0o644)
        except OSError as error:  # the one that stands expires
            log.error("%s: cannot be written: %s", self.path(VERDICT_FILE), error.strerror)

    def copy_ledger(self) -> None:
        if self.memory.uncopied:
            table = {
                "op": "save_copy",
                "from": self.settings.runtime_dir,
                "to": self.settings.state_dir,
                "names": list(NAMES),
                "keep": self.memory.copy_unread,
            }
            self.memory.uncopied = self.memory.copy_unread = False
            self.rounds.errand(Request("state_dir", ERRAND_SECONDS, table))

    def write_textfile(self) -> None:
        """By the worker: the collector's directory is on a disk, and that may hang."""
        path = self.settings.metrics.textfile
        if path:
            from healthd.say.metrics import render

            with guard.at(METRICS):
                table = {"op": "write_file", "path": path, "text": render(self.snapshot()).decode()}
                self.rounds.errand(Request("textfile", ERRAND_SECONDS, table))

    def serve_metrics(self) -> None:
        """The metrics page, where it is wanted; its library is imported only then. A port that somebody else has is
        said and tried again each round: a node without metrics is still watched."""
        address = listen_address(self.settings.metrics.listen, "metrics.listen")
        if address is None or self.stop_metrics is not None:
            return
        from healthd.say.metrics import serve

        try:
            port, self.stop_metrics = serve(address, lambda: self.published)  # asked from its own threads
        except OSError as error:
            if not self.metrics_trouble:
                log.error("no metrics page: %s", error)
            self.metrics_trouble = f"no metrics page: {error}"
            return
        self.metrics_trouble = ""
        log.info("metrics on http://%s:%d/metrics", address[0], port)

    def snapshot(self) -> Snapshot:
        known = self.memory.ledger
        return Snapshot(
            version=healthd.__version__,
            node_name=self.settings.node_name,
            mode=self.settings.mode.value,
            started=self.started,
            now=self.now(),
            interval_seconds=self.settings.interval_seconds,
            verdict=self.verdict,
            results=tuple(self.results[name] for name in sorted(self.results)),
            outcomes=dict(self.outcomes),
            decision=self.decision,
            slurm=self.slurm.status,
            kernel_log=self.kernel.status,
            incidents={
                follows: first
                for follows, first in self.incidents.items()
                if follows in self.memory.conditions and first in self.memory.conditions
            },
            sources=(*self.kernel.sources, *self.removals.sources),
            round=self.rounds.status,
            inventory=known.inventory,
            pause=known.pause,
            commands=dict(self.commanded),
            # Observed, the node waits for nothing; the wait itself goes on where the mode is changed back.
            fleet_hold=None if self.settings.mode is Mode.OBSERVE else known.slurm.hold,
            barred=self.runner.barred,
            workers_started_total=self.runner.started_total,
            workers_abandoned_total=self.runner.abandoned_total,
            ledger_copy_failures_total=self.copy_failures,
            config_reload_failures_total=self.reload_failures,
            events_forgotten_total=self.events_forgotten,
            dropped=dict(guard.dropped),
            cleared=known.cleared[-20:],
            troubles=self.troubles(),
            processes={"daemon": (os.getpid(),), "worker": self.runner.pids},
        )

    def troubles(self) -> tuple[str, ...]:
        """What is wrong with healthd itself, one sentence each."""
        found = (
            self.metrics_trouble,
            f"{self.settings.runtime_dir}: the ledger cannot be saved" if self.memory.save_failed else "",
            f"kernel log: {self.kernel.status.trouble}" if not self.kernel.status.alive else "",
            f"slurm: {self.slurm.status.trouble}" if self.slurm.status.trouble else "",
            f"the settings were not read again: {self.reload_trouble}" if self.reload_trouble else "",
            *guard.troubles(self.now()),
        )
        return tuple(sentence for sentence in found if sentence)

    # --- what people say

    def command(self, request: dict[str, Any], who: str, may_command: bool) -> dict[str, Any]:
        """Answer one request on the control socket (the protocol is in status.py)."""
        name = request.get("command")
        if name == "status":
            return {"status": status_json(self.snapshot())}
        if name == "looks-left":
            asked = request.get("asked")
            if not isinstance(asked, int | float) or not 0 <= asked < LATEST:  # true is a moment in 1970
                return {"error": "asked: must be a time, in seconds since the epoch"}
            return {"asked": asked, "left": self.looks_left(asked)}
        if not isinstance(name, str) or name not in ("job-ended", *commands.COMMANDS):
            return {"error": f"there is no command {name!r:.40}" if isinstance(name, str) else "command: must be text"}
        if not may_command:
            return {"error": f"{name}: refused: {who} is neither root nor the user that healthd runs as"}
        if name == "job-ended":
            return self.job_ended()
        try:
            done = commands.COMMANDS[name](self.memory, request, who, self.now())
        except commands.Refused as refusal:
            return {"error": f"{name}: {refusal}"}
        log.warning("%s by %s: %s", name, who, done)
        self.commanded[name] += 1
        self.memory.save()
        self.rounds.look_now()
        return {"done": done}

    def job_ended(self) -> dict[str, Any]:
        """The epilog of a job: the checks that this concerns look at once. `left`: those that it may wait for."""
        asked = self.now()
        self.look_for_jobs()
        self.rounds.look_after_event(self.concerned_by_job_end())
        left = self.looks_left(asked)
        words = f"these look now: {', '.join(left)}" if left else "all have looked just now"
        return {"done": words, "asked": asked, "left": left}

    def looks_left(self, asked: float) -> list[str]:
        """Which of these checks have not run since. One that ran right before does not look again so soon."""
        before = asked - EARLY_AGAIN_SECONDS
        names = self.concerned_by_job_end()
        return [str(name) for name in names if name not in self.results or self.results[name].started < before]

    def concerned_by_job_end(self) -> list[RunName]:
        """Not GPU checks where the driver is closed after each job: to open it costs seconds."""
        unheld = self.is_driver_unheld()
        return [name for name in self.concerned(JOB_END) if not (unheld and self.checks[name.check].uses == "nvml")]

    def reload(self) -> None:
        """SIGHUP: the file again, and the site's checks. Whatever goes wrong changes nothing: it is all made before any
        of it counts."""
        service.reloading()
        try:
            loaded, checks = self.load_settings(self.settings.checks_dir)
            kept = {name: getattr(self.settings, name) for name in FIXED_SETTINGS}
            waiting = [name for name in FIXED_SETTINGS if getattr(loaded.settings, name) != kept[name]]
            settings = dataclasses.replace(loaded.settings, **kept)
            conditions = absorb.reconfigured(self.memory.conditions, loaded.checks)
        except BaseException as error:  # a site's file may raise what it likes; nothing else ends the daemon from here
            self.reload_failures += 1
            known = isinstance(error, ConfigError)
            self.reload_trouble = str(error) if known else traceback.format_exception_only(error)[-1].strip()
            log.error("the settings stay as they were: %s", self.reload_trouble, exc_info=not known)
            service.ready(f"old settings kept: {self.reload_trouble}")
            return
        if waiting:
            log.warning("takes effect at the next start only: %s", ", ".join(waiting))
        self.reload_trouble = ""
        self.settings = settings
        self.loaded = dataclasses.replace(loaded, settings=settings)
        self.checks = checks
        self.runner.renew()  # the site's checks may be new
        self.known_jobs.clear()
        self.memory.change_mode(settings.mode)
        self.memory.set_conditions(conditions)
        self.memory.keep_only(loaded.checks)
        self.rounds.forget(loaded.checks)
        self.results = {name: result for name, result in self.results.items() if name in loaded.checks}
        log.info("settings read again: mode %s, %d checks", settings.mode.value, len(loaded.checks))
        service.ready(self.verdict.health.value)

    # --- stop

    def shut_down(self) -> None:
        """Within 5 seconds, whatever hangs: nothing is waited for that could be stuck."""
        service.stopping()
        self.note_cursor()
        if holds(self.lock, self.settings.runtime_dir):  # else the files there are another daemon's
            self.memory.save()
            self.control.close()
        self.kernel.close()
        self.slurm.close()
        if self.stop_metrics is not None:
            self.stop_metrics()
        self.runner.close(STOP_SECONDS)
        log.info("stopped")


# --- the edges


def outgrown(inventory: Inventory, observed: Iterable[Observation]) -> bool:
    """NVML shows more GPUs than the inventory has, or another driver. One that is lost stays in it, with its name."""
    return any(
        (seen.name == "gpus" and seen.value > len(inventory.gpus))
        or (seen.name == "gpu_driver_info" and ("version", inventory.driver_version) not in seen.labels)
        for seen in observed
    )


def lock(runtime_dir: str) -> int:
    """One daemon a runtime directory. Raises OSError in one sentence."""
    descriptor = os.open(os.path.join(runtime_dir, "lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise OSError(f"{runtime_dir}: another healthd is running there") from None
    return descriptor


def holds(descriptor: int, runtime_dir: str) -> bool:
    """Whether the lock is still the one that lies in the runtime directory."""
    try:
        return os.path.samestat(os.fstat(descriptor), os.stat(os.path.join(runtime_dir, "lock")))
    except OSError:
        return False


def wake_on_signals() -> int:
    """A descriptor that gets one byte a signal: SIGTERM, SIGINT, SIGHUP."""
    reading, writing = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, lambda _number, _frame: None)
    return reading


def signals(descriptor: int) -> bytes:
    try:
        return os.read(descriptor, 64)
    except BlockingIOError:
        return b""


def poll(descriptors: Iterable[tuple[int, bool]], seconds: float) -> set[int]:
    """Sleep until one of the descriptors can be read (or written, where that is wanted), at most `seconds`. Those."""
    ready = select.poll()
    for descriptor, writes in descriptors:
        ready.register(descriptor, select.POLLIN | (select.POLLOUT if writes else 0))
    wait = min(max(0.0, seconds), LONGEST_SLEEP_SECONDS)
    return {descriptor for descriptor, _ in ready.poll(None if seconds == FOREVER else wait * 1000 + 1)}
