"""The daemon, top to bottom:

    fault on the node -> finding -> condition -> decision -> Slurm drains (and requeues) -> repaired -> Slurm resumes

One process that sleeps in one wait. What can block is done by the worker (runner.py) or by child processes of their
own (child.py); this process only reads what they say. What it believes is in the ledger, a value that is replaced;
what follows from it (verdict, decision) is computed by pure functions.
"""

from __future__ import annotations

import dataclasses
import fcntl
import logging
import os
import select
import signal
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import healthd
from healthd import ledger as ledgers
from healthd import registry, schedule, service, verdict
from healthd.config import ConfigError, Loaded
from healthd.control_server import ControlServer
from healthd.convert import ConvertError, dump, load
from healthd.kernel_fold import fold_events
from healthd.kernel_listener import Listener
from healthd.kernel_log import Gap, RawLine, event_of
from healthd.ledger import Ledger, LedgerError, Pause
from healthd.model import (
    CheckResult,
    Condition,
    ConditionState,
    Decision,
    Finding,
    Inventory,
    KernelEvent,
    Leave,
    NodeState,
    Observation,
    Outcome,
    Repair,
    Severity,
    SlurmMemory,
    Verdict,
)
from healthd.past import Series, update
from healthd.policy import Mode, Policy, decide
from healthd.runner import Reply, Request, Runner
from healthd.schedule import Job
from healthd.slurm import ReconcileReport
from healthd.slurm_driver import SlurmDriver
from healthd.status import (
    SOCKET,
    VERDICT_FILE,
    RoundStatus,
    Snapshot,
    decision_words,
    status_json,
    verdict_line,
)
from healthd.worker import Setup

log = logging.getLogger("healthd")

STOP_SECONDS = 2.0  # how long an idle worker may take to end; a busy one is left to end by itself
COPY_TIMEOUT_SECONDS = 20.0
EARLY_AGAIN_SECONDS = 10.0  # events do not run one check more often than this
CLOCK_STEP_SECONDS = 2.0
FOREVER = float("inf")


def run(load_settings: Callable[[], Loaded]) -> int:
    """`healthd run`: until SIGTERM. Raises ConfigError, and OSError where it cannot have its runtime directory."""
    service.set_up_logging()
    daemon = Daemon(load_settings)
    daemon.start_up()
    try:
        while not daemon.stopping:
            daemon.wait()
            daemon.listen()
            daemon.look()
            daemon.pass_time()
            daemon.decide()
            daemon.publish()
    finally:
        daemon.shut_down()
    return 0


class Daemon:
    def __init__(self, load_settings: Callable[[], Loaded]) -> None:
        self.load_settings = load_settings
        self.loaded = load_settings()
        self.settings = self.loaded.settings
        self.checks = registry.find(self.settings.checks_dir)
        self.now = time.time
        self.monotonic = time.monotonic
        self.started = self.now()
        self.boot_id = _boot_id(self.settings.root)
        self.stopping = False
        self.ledger = Ledger()
        self.past: dict[str, dict[str, Series]] = {}
        self.results: dict[tuple[str, str], CheckResult] = {}
        self.outcomes: Counter[tuple[str, str, str]] = Counter()
        self.overdue_since: dict[tuple[str, str], float] = {}
        self.last_runs: dict[tuple[str, str], float] = {}
        self.early: dict[tuple[str, str], float] = {}
        self.queue: deque[Job] = deque()
        self.errands: deque[Request] = deque()  # what the worker does between checks: inventory, copies, the journal
        self.round = RoundStatus()
        self.round_began = 0.0
        self.decision: Decision = Leave("nothing has been looked at yet")
        self.verdict = Verdict(verdict.judge({}, {}, (), 0.0).health)
        self.looked_for: object = None
        self.look_again_at = FOREVER
        self.round_ended = False
        self.said_ready = False
        self.published = ""
        self.unsaved = False
        self.uncopied = False
        self.copy_failures = 0
        self.reload_failures = 0
        self.last_tick = self.monotonic()
        self.clock_offset = self.now() - self.monotonic()

    # --- start

    def start_up(self) -> None:
        settings = self.settings
        os.makedirs(settings.runtime_dir, mode=0o755, exist_ok=True)
        self.lock = _lock(settings.runtime_dir)
        self.wakeup = _wake_on_signals()
        setup = Setup(settings.root, settings.nvml.fake, settings.checks_dir)
        self.runner = Runner(setup, settings.runtime_dir, self.monotonic)
        self.recall()
        source = settings.kernel_log.source
        self.kernel = Listener(
            source,
            settings.root,
            self.boot_id,
            self.ledger.cursors.get(source),
            settings.kernel_log.accept_injected,
            self.now,
            self.monotonic,
        )
        self.removals = _removals(settings.root)
        self.control = ControlServer(self.path(SOCKET), self.command, self.monotonic)
        self.slurm = SlurmDriver(settings, self.boot_id, self.remember_slurm, self.now, self.monotonic)
        self.metrics = _Metrics(settings.metrics.listen, settings.metrics.textfile, self.snapshot)
        self.errands.append(Request("nvml", 30.0, {"op": "inventory", "gpus": True}))
        log.info(
            "healthd %s on %s: mode %s, %d checks",
            healthd.__version__,
            self.node,
            settings.mode.value,
            len(self.jobs()),
        )

    @property
    def node(self) -> str:
        return self.settings.node_name

    def path(self, name: str) -> str:
        return os.path.join(self.settings.runtime_dir, name)

    def recall(self) -> None:
        """The ledger: the live one, else the copy, else a new one; then what a boot or a change of mode ends."""
        now = self.now()
        found = (
            self._read_ledger(self.path(ledgers.FILE)) or self._copied_ledger() or Ledger(born=now, trusted_since=now)
        )
        self.ledger = found
        if found.boot_id != self.boot_id:
            self.set_conditions(verdict.after_boot(found.by_key(), self.boot_id, now))
        if found.mode in ("", Mode.OBSERVE.value) and self.settings.mode is not Mode.OBSERVE:
            # What was only observed until now never drains by itself: a check must find it again.
            self.change(trusted_since=now)
        self.change(boot_id=self.boot_id, mode=self.settings.mode.value)
        self.drop_unconfigured()

    def _read_ledger(self, path: str) -> Ledger | None:
        try:
            text = ledgers.read_text(path)
            past = ledgers.read_text(self.path(ledgers.PAST_FILE))
            self.past = ledgers.decode_past(past, self.path(ledgers.PAST_FILE)) if past else {}
            return ledgers.decode(text, path) if text else None
        except LedgerError as error:
            log.error("%s; set aside, going on with the copy or a new ledger", error)
            ledgers.set_aside(path)
            return None

    def _copied_ledger(self) -> Ledger | None:
        """The copy in the state directory, read by the worker: that disk may hang."""
        names = [ledgers.FILE, ledgers.PAST_FILE]
        reply = self._ask_worker(
            Request(
                "state_dir", COPY_TIMEOUT_SECONDS, {"op": "load_copy", "from": self.settings.state_dir, "names": names}
            )
        )
        if reply.outcome is not Outcome.COMPLETED:
            log.error("the copy of the ledger in %s cannot be read: %s", self.settings.state_dir, reply.error)
            return None
        texts = reply.table["texts"]
        try:
            if texts[ledgers.PAST_FILE]:
                self.past = ledgers.decode_past(texts[ledgers.PAST_FILE], ledgers.PAST_FILE)
            return ledgers.decode(texts[ledgers.FILE], self.settings.state_dir) if texts[ledgers.FILE] else None
        except LedgerError as error:
            log.error("%s", error)
            return None

    def _ask_worker(self, request: Request) -> Reply:
        """One request before the loop runs, bounded by its deadline."""
        reply = self.runner.send(request)
        while reply is None:
            _poll(self.runner.waits(), self.runner.deadline - self.monotonic())
            reply = self.runner.step()
        return reply

    # --- the one wait

    def wait(self) -> None:
        """Sleep until something is readable, a deadline passes, or something is due."""
        moments = [
            self.runner.deadline,
            self.slurm.deadline,
            self.kernel.deadline,
            self.control.deadline,
            self.look_again_at,
            self.last_tick + (service.watchdog_seconds() or FOREVER) / 2,
        ]
        if not self.runner.busy:
            more = self.queue or self.errands or self.runner.nvml_open
            moments.append(0.0 if more else schedule.next_due(self.jobs(), self.last_runs, self.early, self.node))
        if self.ledger.pause:
            moments.append(self.monotonic() + self.ledger.pause.until - self.now())
        descriptors = [(self.wakeup, False), *self.runner.waits(), *self.slurm.waits()]
        descriptors += [*self.kernel.waits(), *self.control.waits()]
        if self.removals:
            descriptors.append((self.removals.fileno(), False))
        _poll(descriptors, min(moments) - self.monotonic())
        service.watchdog()
        self._heed_signals()

    def _heed_signals(self) -> None:
        try:
            numbers = os.read(self.wakeup, 64)
        except BlockingIOError:
            return
        for number in numbers:
            if number == signal.SIGHUP:
                self.reload()
            elif number in (signal.SIGTERM, signal.SIGINT):
                self.stopping = True

    # --- hear: kernel lines and device removals

    def listen(self) -> None:
        self.control.step()
        self.absorb_events(self.kernel.read())
        if not self.runner.busy:
            for gap in self.kernel.gaps()[:1]:
                self.fill_gap(gap)
        if self.removals:
            for pci in self.removals.read():
                log.warning("device %s was removed", pci)
                self.look_early("pci_remove")

    def absorb_events(self, events: list[KernelEvent]) -> None:
        """Kernel events -> ledger -> what the checks that listen make of them. One save: each is counted once."""
        if not events:
            return
        kept, touched, sequence = fold_events(
            self.ledger.events, events, self.ledger.next_sequence, ledgers.KEEP_EVENTS_SECONDS, ledgers.KEEP_EVENTS
        )
        self.change(
            events=kept,
            next_sequence=sequence,
            cursors={**self.ledger.cursors, self.kernel.status.source: self.kernel.cursor},
        )
        by_sequence = {event.sequence: event for event in kept}
        for (name, instance), config in self.loaded.checks.items():
            check = self.checks[name]
            found = None if instance else check.correlate(kept, self.ledger.inventory, config)
            if found is not None:
                findings = [verdict.as_configured(finding, config) for finding in found]
                conditions = verdict.absorb_events(
                    self.ledger.by_key(),
                    name,
                    findings,
                    by_sequence,
                    frozenset(touched),
                    self.boot_id,
                    self.ledger.cleared,
                )
                self.set_conditions(conditions)
        for event in events:
            if not event.history:
                log.info("kernel: %s", event.text[:300])
        self.save()
        for kind in {event.kind for event in events if not event.history}:
            self.look_early(kind)

    def fill_gap(self, gap: Gap) -> None:
        """Lines that the ring buffer lost, from the journal: the worker reads it, since journal files are on a disk."""
        table = {
            "boot_id": self.boot_id,
            "since_usec": gap.since_usec,
            "until_usec": gap.until_usec,
            "limit": 10_000,
            "accept_injected": self.settings.kernel_log.accept_injected,
        }
        request = Request("journal", COPY_TIMEOUT_SECONDS, {"op": "read_journal", "gap": table})
        if not any(errand.table["op"] == "read_journal" for errand in self.errands):
            self.errands.append(request)

    def look_early(self, kind: str) -> None:
        """An event of this kind happened: the checks that want to look after it are due now."""
        now = self.monotonic()
        for job in self.jobs():
            if kind in self.checks[job.check].after_events:
                at = max(now, self.last_runs.get(job.name, -FOREVER) + EARLY_AGAIN_SECONDS)
                self.early[job.name] = min(at, self.early.get(job.name, FOREVER))

    # --- look: the worker runs what is due, one request at a time

    def jobs(self) -> list[Job]:
        """What comes round. Where nobody else holds the driver, GPU checks are far apart (architecture rule 2)."""
        unheld = not self.settings.nvml.fake and _nobody_holds_the_driver(self.settings.root)
        jobs = []
        for (name, instance), config in self.loaded.checks.items():
            check = self.checks[name]
            if check.runs:
                interval = config.interval_seconds or self.settings.interval_seconds
                if unheld and check.uses == "nvml":
                    interval = max(interval, self.settings.nvml.unheld_interval_seconds)
                jobs.append(Job(name, instance, check.resource(instance), interval, config.timeout_seconds))
        return jobs

    def look(self) -> None:
        barred = set(self.runner.barred)
        reply = self.runner.step()
        freed = barred - set(self.runner.barred)
        for job in self.jobs() if freed else ():
            if job.uses in freed:
                log.info("the worker that hung in %s has ended", job.uses)
                self.early[job.name] = self.monotonic()
        if reply is not None:
            self.answered(reply)
        self._queue_what_is_due()
        while not self.runner.busy:
            request = self._next_request()
            if request is None:
                break
            at_once = self.runner.send(request)
            if at_once is not None:
                self.answered(at_once)

    def _queue_what_is_due(self) -> None:
        now = self.monotonic()
        due = schedule.due(self.jobs(), self.last_runs, self.early, self.node, now)
        new = [job for job in due if job not in self.queue]
        if not new:
            return
        if not self.queue:
            self.round_began = now
            self.round = dataclasses.replace(self.round, number=self.round.number + 1, started=self.now())
        for job in new:
            self.last_runs[job.name] = now
            self.early.pop(job.name, None)
        self.queue = deque(sorted([*self.queue, *new], key=lambda job: job.uses != "nvml"))

    def _next_request(self) -> Request | None:
        """The next thing for the worker: NVML is closed before anything else, then checks, then errands."""
        if self.runner.nvml_open and not (self.queue and self.queue[0].uses == "nvml"):
            return Request("nvml", 10.0, {"op": "close_nvml"})
        while self.queue:
            job = self.queue.popleft()
            if self.monotonic() - self.round_began < self.settings.round_timeout_seconds:
                return self._run_request(job)
            self.ran(job.name, Outcome.TIMED_OUT, 0.0, _RunSaid(), "the round was out of time before its turn")
        return self.errands.popleft() if self.errands else None

    def _run_request(self, job: Job) -> Request:
        past = self.past.get(_label(*job.name), {})
        table = {
            "op": "run",
            "check": job.check,
            "instance": job.instance,
            "config": self.loaded.tables[job.name],
            "past": {name: dump(series) for name, series in past.items()},
            "boot_id": self.boot_id,
        }
        return Request(job.uses, job.timeout_seconds, table)

    def answered(self, reply: Reply) -> None:
        table = reply.table
        match reply.request.table["op"]:
            case "run":
                self._check_answered(reply)
            case "inventory" if reply.outcome is Outcome.COMPLETED:
                self.change(inventory=load(Inventory, table["inventory"]))
            case "save_copy" if reply.outcome is not Outcome.COMPLETED:
                self.copy_failures += 1
                log.error("the ledger could not be copied to %s: %s", self.settings.state_dir, reply.error)
            case "read_journal":
                self._journal_answered(reply)
            case op if reply.outcome is not Outcome.COMPLETED:
                log.error("the worker could not do %s: %s", op, reply.error)

    def _check_answered(self, reply: Reply) -> None:
        name = (reply.request.table["check"], reply.request.table["instance"])
        if name not in self.loaded.checks:
            return  # a reload took it away while it ran
        try:
            said = load(_RunSaid, {key: reply.table.get(key, []) for key in ("findings", "observations", "repairs")})
        except ConvertError as problem:
            said = _RunSaid()
            reply = dataclasses.replace(reply, outcome=Outcome.FAILED, error=f"the worker's answer: {problem}")
        self.ran(name, reply.outcome, reply.seconds, said, reply.error)

    def ran(
        self,
        name: tuple[str, str],
        outcome: Outcome,
        seconds: float,
        said: _RunSaid,
        error: str,
    ) -> None:
        """One run of a check is over: its findings become conditions, its counters' past goes on."""
        config, check, now = self.loaded.checks[name], self.checks[name[0]], self.now()
        findings = said.findings
        if outcome in (Outcome.TIMED_OUT, Outcome.STUCK):
            overdue = self.monotonic() - self.overdue_since.setdefault(name, self.monotonic() - seconds)
            findings = (*findings, *check.overdue(config, overdue))
        else:
            self.overdue_since.pop(name, None)
        result = CheckResult(
            check=name[0],
            instance=name[1],
            outcome=outcome,
            started=now - seconds,
            duration_seconds=seconds,
            findings=tuple(verdict.as_configured(finding, config) for finding in findings),
            observations=said.observations,
            repairs=said.repairs,
            error=error,
        )
        before = self.results.get(name)
        if outcome is not Outcome.COMPLETED and (before is None or before.outcome is not outcome):
            log.warning("check %s %s%s", _label(*name), outcome.value, f": {error}" if error else "")
        self.results[name] = result
        self.outcomes[name[0], name[1], outcome.value] += 1
        self.set_conditions(
            verdict.absorb_result(self.ledger.by_key(), result, config.clear_after, self.boot_id, self.ledger.cleared)
        )
        if outcome is Outcome.COMPLETED:
            label = _label(*name)
            self.past[label] = update(self.past.get(label, {}), said.observations, now, self.boot_id)
            self.set_conditions(verdict.after_repairs(self.ledger.by_key(), said.repairs, now))
        for job, moment in verdict.next_look(self.ledger.by_key()).items():
            if job == name:
                self.early[name] = self.monotonic() + max(moment - now, 0.1)
        if not self.queue:
            self._end_round()

    def _end_round(self) -> None:
        seconds = self.monotonic() - self.round_began
        wait = schedule.next_due(self.jobs(), self.last_runs, self.early, self.node) - self.monotonic()
        self.round = dataclasses.replace(self.round, seconds=seconds, next_at=self.now() + max(wait, 0.0))
        self.round_ended = True
        self.unsaved = self.uncopied = True

    def _journal_answered(self, reply: Reply) -> None:
        gap = reply.request.table["gap"]
        if reply.outcome is not Outcome.COMPLETED:
            log.error("the journal could not be read for lines that the ring buffer lost: %s", reply.error)
        lines = [RawLine(moment, text) for moment, text, *_ in reply.table.get("lines", ())]
        history = not self.ledger.cursors
        events = [event for line in lines if (event := event_of(line, self.boot_id)) is not None]
        if history:
            events = [dataclasses.replace(event, history=True) for event in events]
        self.kernel.filled(Gap(gap["since_usec"], gap["until_usec"]), len(lines), len(events))
        self.absorb_events(events)

    # --- time: windows, pauses, a clock that was set

    def pass_time(self) -> None:
        monotonic, now = self.monotonic(), self.now()
        seconds, self.last_tick = monotonic - self.last_tick, monotonic
        step = now - monotonic - self.clock_offset
        if abs(step) > CLOCK_STEP_SECONDS:
            log.warning("the clock was set by %+.1f s: the ledger's times are moved with it", step)
            self.clock_offset += step
            self.replace_ledger(ledgers.after_clock_step(self.ledger, step))
            self.past = {
                label: {name: dataclasses.replace(s, time=s.time + step) for name, s in store.items()}
                for label, store in self.past.items()
            }
        loaded = not self.ledger.slurm.reason and not self.ledger.slurm.overruled
        self.set_conditions(verdict.after_quiet(self.ledger.by_key(), seconds, loaded, now), quietly=True)
        pause = self.ledger.pause
        if pause and now >= pause.until:
            log.info("the pause is over: %s", pause.why)
            self.end_pause()

    def end_pause(self) -> None:
        """What opened meanwhile needs a check that finds it now: all of them look at once."""
        self.change(pause=None, trusted_since=self.now())
        self.early.update({job.name: self.monotonic() for job in self.jobs()})

    # --- decide: verdict -> decision -> Slurm

    def decide(self) -> None:
        expected = [job.name for job in self.jobs()]
        before = self.verdict.health
        self.verdict = verdict.judge(self.ledger.by_key(), self.results, expected, self.ledger.trusted_since)
        if self.verdict.health is not before:
            log.info("health: %s -> %s", before.value, self.verdict.health.value)
        if self.settings.mode is Mode.OBSERVE:
            # No Slurm command at all: what would be done to a node that nobody holds.
            free = NodeState(self.node, frozenset({"IDLE"}))
            self.decided(decide(self.verdict, free, SlurmMemory(), self.policy(), self.now()))
            return
        report = self.slurm.step()
        if report is None and not self.slurm.busy and self._must_look_at_slurm():
            self.look_again_at = FOREVER
            report = self.slurm.begin(self.verdict, self.ledger.slurm, self.policy())
        if report is not None:
            self.slurm_reported(report)

    def policy(self) -> Policy:
        slurm = self.settings.slurm
        paused_until = self.ledger.pause.until if self.ledger.pause else 0.0
        return Policy(self.settings.mode, paused_until, slurm.command_seconds, slurm.requeue_again_seconds)

    def _must_look_at_slurm(self) -> bool:
        """At the start, when what we want changes, in each round while something is wanted or held, and on retry."""
        memory = self.ledger.slurm
        wanted = bool(self.verdict.causes or memory.reason or memory.writing or memory.overruled)
        causes = tuple((c.code, c.subject, c.severity, c.critical_at, c.last_event) for c in self.verdict.causes)
        aim = (causes, self.verdict.may_resume and wanted, self.ledger.pause, self.settings.mode)
        retry = self.monotonic() >= self.look_again_at
        if aim == self.looked_for and not retry and not (self.round_ended and wanted):
            return False
        self.looked_for = aim
        return True

    def slurm_reported(self, report: ReconcileReport) -> None:
        """One look at Slurm is over: what it says of people's hands on the node, and when to look again."""
        now = self.now()
        if report.acknowledged:
            log.warning("an operator resumed the node: what stands is acknowledged, only what is seen again acts")
            self.set_conditions(verdict.resumed_by_operator(self.ledger.by_key(), now))
        if report.adopted:
            self.set_conditions(verdict.adopted(self.ledger.by_key(), *report.adopted, self.boot_id, now))
        if report.trouble:
            log.warning("slurm: %s", report.trouble)
        self.decided(report.decision)
        self.look_again_at = self.monotonic() + self.slurm.retry_seconds(report)

    def remember_slurm(self, memory: SlurmMemory) -> None:
        """Written down before the generator in slurm.py goes on: a daemon that is killed now knows what it did."""
        self.change(slurm=memory)
        self.save()

    def decided(self, decision: Decision) -> None:
        if decision != self.decision:
            log.info("decision: %s", decision_words(decision))
        self.decision = decision

    # --- publish: ledger, its copy, verdict file, metrics, systemd

    def publish(self) -> None:
        if self.unsaved:
            self.save()
        if self.uncopied and self.round_ended and not any(e.table["op"] == "save_copy" for e in self.errands):
            names = [ledgers.FILE, ledgers.PAST_FILE]
            table = {
                "op": "save_copy",
                "from": self.settings.runtime_dir,
                "to": self.settings.state_dir,
                "names": names,
            }
            self.errands.append(Request("state_dir", COPY_TIMEOUT_SECONDS, table))
            self.uncopied = False
        allowed_drain = bool(self.verdict.causes) and self.settings.mode is not Mode.OBSERVE and not self.ledger.pause
        expires = self.now() + 3 * self.settings.interval_seconds
        line = verdict_line(self.snapshot(), allowed_drain, expires)
        if self.round_ended or line.partition(" ")[0] != self.published.partition(" ")[0]:
            ledgers.replace_file(self.path(VERDICT_FILE), line, mode=0o644)
            self.published = line
            self.metrics.write_textfile()
            service.status(f"{self.verdict.health.value}; {decision_words(self.decision)}")
        if self.round_ended and not self.said_ready:
            service.ready(self.verdict.health.value)
            self.said_ready = True
        self.round_ended = False

    def save(self) -> None:
        ledgers.replace_file(self.path(ledgers.FILE), ledgers.encode(self.ledger))
        if self.round_ended:
            ledgers.replace_file(self.path(ledgers.PAST_FILE), ledgers.encode_past(self.past))
        self.unsaved = False

    def snapshot(self) -> Snapshot:
        return Snapshot(
            version=healthd.__version__,
            node_name=self.node,
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
            round=self.round,
            inventory=self.ledger.inventory,
            pause=self.ledger.pause,
            barred=self.runner.barred,
            workers_started_total=self.runner.started_total,
            workers_abandoned_total=self.runner.abandoned_total,
            ledger_copy_failures_total=self.copy_failures,
            config_reload_failures_total=self.reload_failures,
            cleared=self.ledger.cleared[-20:],
        )

    # --- commands of people

    def command(self, request: dict[str, Any], who: str, may_command: bool) -> dict[str, Any]:
        """One request on the control socket (status.py)."""
        name = request.get("command")
        if name == "status":
            return {"status": status_json(self.snapshot())}
        if name not in ("repaired", "pause", "resume-checks"):
            return {"error": f"there is no command {name!r:.40}"}
        if not may_command:
            return {"error": f"{name}: refused: {who} is neither root nor the user that healthd runs as"}
        try:
            done = getattr(self, f"do_{name.replace('-', '_')}")(request, who)
        except (KeyError, TypeError, ValueError) as error:
            return {"error": f"{name}: wrong request: {error}"}
        log.info("%s by %s: %s", name, who, done)
        self.save()
        self.looked_for = None
        return {"done": done}

    def do_repaired(self, request: dict[str, Any], who: str) -> str:
        code, part = str(request["code"]), request.get("part")
        before = self.ledger.by_key()
        hit = [c for c in before.values() if c.code == code and part in (None, c.subject)]
        if not hit:
            standing = ", ".join(f"{c.code} {c.subject}".strip() for c in before.values()) or "none"
            raise ValueError(f"no condition {code}{f' on {part}' if part else ''}; open conditions: {standing}")
        self.set_conditions(verdict.repaired(before, code, part, who, self.now()))
        self.early.update({job.name: self.monotonic() for job in self.jobs()})
        return f"{len(hit)} condition{'s' * (len(hit) > 1)} repaired: " + ", ".join(
            f"{c.code} {c.subject}".strip() for c in hit
        )

    def do_pause(self, request: dict[str, Any], who: str) -> str:
        seconds, why = float(request["seconds"]), str(request["why"]).strip()
        if not 0 < seconds <= 7 * 86400 or not why:
            raise ValueError("a pause needs a time of up to a week and a reason")
        self.change(pause=Pause(self.now() + seconds, why, who))
        return f"paused for {seconds:g} s: {why}"

    def do_resume_checks(self, _request: dict[str, Any], _who: str) -> str:
        if self.ledger.pause is None:
            return "there was no pause"
        self.end_pause()
        return "the pause is over; all checks look now"

    def reload(self) -> None:
        """SIGHUP: the file again. One that is wrong changes nothing."""
        service.reloading()
        try:
            loaded = self.load_settings()
        except ConfigError as error:
            self.reload_failures += 1
            log.error("the settings stay as they were: %s", error)
            service.ready(f"old settings kept: {error}")
            return
        fixed = ("root", "state_dir", "runtime_dir", "checks_dir", "node_name", "nvml", "kernel_log", "metrics")
        kept = {name: getattr(self.settings, name) for name in fixed}
        changed = [name for name in fixed if getattr(loaded.settings, name) != kept[name]]
        if changed:
            log.warning("takes effect at the next start only: %s", ", ".join(changed))
        if self.settings.mode is Mode.OBSERVE and loaded.settings.mode is not Mode.OBSERVE:
            self.change(trusted_since=self.now())
        self.settings = dataclasses.replace(loaded.settings, **kept)
        self.loaded = dataclasses.replace(loaded, settings=self.settings)
        self.change(mode=self.settings.mode.value)
        self.queue = deque(job for job in self.queue if job.name in self.loaded.checks)
        self.results = {name: r for name, r in self.results.items() if name in self.loaded.checks}
        self.drop_unconfigured()
        log.info("settings read again: mode %s, %d checks", self.settings.mode.value, len(self.jobs()))
        service.ready(self.verdict.health.value)

    # --- the ledger's changes

    def change(self, **changes: Any) -> None:
        self.replace_ledger(dataclasses.replace(self.ledger, **changes))

    def replace_ledger(self, ledger: Ledger) -> None:
        if ledger != self.ledger:
            self.ledger = ledger
            self.unsaved = self.uncopied = True

    def set_conditions(self, conditions: dict[tuple[str, str], Condition], quietly: bool = False) -> None:
        """Take these conditions, and say what opened, rose or cleared. `quietly`: only windows moved, save later."""
        before = self.ledger.by_key()
        unsaved = self.unsaved
        self.replace_ledger(ledgers.with_conditions(self.ledger, conditions, self.now()))
        said = False
        for key, c in conditions.items():
            words = _news(before.get(key), c)
            if words:
                said = True
                log.log(logging.WARNING if c.severity >= Severity.WARNING else logging.INFO, "%s", words)
        if quietly and not said:
            self.unsaved = unsaved

    def drop_unconfigured(self) -> None:
        """A condition whose check is no longer configured would stand for ever: nobody looks."""
        now = self.now()
        conditions = {
            key: c
            if (c.check, c.instance) in self.loaded.checks
            else dataclasses.replace(c, state=ConditionState.CLEARED, cleared_at=now, cleared_by="no longer configured")
            for key, c in self.ledger.by_key().items()
        }
        self.set_conditions(conditions)

    # --- stop

    def shut_down(self) -> None:
        """Within 5 seconds, whatever hangs: nothing is waited for that could be stuck."""
        service.stopping()
        self.save()
        self.control.close()
        self.kernel.close()
        self.slurm.close()
        self.metrics.close()
        self.runner.close(STOP_SECONDS)
        log.info("stopped")


# --- the edges


@dataclass(frozen=True, slots=True)
class _RunSaid:
    """What the worker says of one run, as it comes over the stream."""

    findings: tuple[Finding, ...] = ()
    observations: tuple[Observation, ...] = ()
    repairs: tuple[Repair, ...] = ()


class _Metrics:
    """The metrics page and the textfile, each where it is wanted. Their libraries are imported only then."""

    def __init__(self, listen: str, textfile: str, snapshot: Callable[[], Snapshot]) -> None:
        from healthd.config import listen_address

        self._snapshot = snapshot
        self._textfile = textfile
        self._stop: Callable[[], None] = lambda: None
        address = listen_address(listen, "metrics.listen")
        if address is not None:
            from healthd.metrics import serve

            port, self._stop = serve(address, snapshot)
            log.info("metrics on http://%s:%d/metrics", address[0], port)

    def write_textfile(self) -> None:
        if self._textfile:
            from healthd.metrics import write_textfile

            try:
                write_textfile(self._textfile, self._snapshot())
            except OSError as error:
                log.error("%s: cannot be written: %s", self._textfile, error.strerror)

    def close(self) -> None:
        self._stop()


def _news(before: Condition | None, after: Condition) -> str:
    """What to tell the log of a condition that changed; "" if nothing that a person must know."""
    state_before = before.state if before else None
    what = f"{after.code} {after.subject}".strip()
    if after.state is not state_before:
        if after.state is ConditionState.PENDING:
            return f"{what}: {after.message} (counts if it lasts {after.confirm_seconds:g} s)"
        if after.state is ConditionState.CLEARED:
            return f"{what}: cleared by {after.cleared_by}"
        return f"{what}: {after.severity.name.lower()}, {after.state.value}: {after.message}"
    if before and after.severity > before.severity:
        return f"{what}: now {after.severity.name.lower()}: {after.message}"
    return ""


def _label(check: str, instance: str) -> str:
    return f"{check} {instance}".strip()


def _boot_id(root: str) -> str:
    from healthd.host import Host

    return Host(root).boot_id()


def _nobody_holds_the_driver(root: str) -> bool:
    """The nvidia module is loaded and its reference count is 0: no persistence daemon, no job."""
    try:
        with open(root.rstrip("/") + "/sys/module/nvidia/refcnt", encoding="ascii") as file:
            return file.read().strip() == "0"
    except (OSError, ValueError):
        return False


def _removals(root: str) -> Any:
    from healthd.inventory import removals

    try:
        return removals(root)
    except (OSError, ImportError) as error:
        log.warning("device removals are not heard: %s", error)
        return None


def _lock(runtime_dir: str) -> int:
    """One daemon a runtime directory. Raises OSError in one sentence."""
    descriptor = os.open(os.path.join(runtime_dir, "lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise OSError(f"{runtime_dir}: another healthd is running there") from None
    return descriptor


def _wake_on_signals() -> int:
    """A descriptor that gets one byte a signal: SIGTERM, SIGINT, SIGHUP."""
    reading, writing = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, lambda _number, _frame: None)
    return reading


def _poll(descriptors: Iterable[tuple[int, bool]], seconds: float) -> None:
    """Sleep until one of the descriptors is ready (or wants to be written and can be), at most `seconds`."""
    poll = select.poll()
    for descriptor, writes in descriptors:
        poll.register(descriptor, select.POLLIN | (select.POLLOUT if writes else 0))
    poll.poll(None if seconds == FOREVER else max(0.0, seconds) * 1000 + 1)
