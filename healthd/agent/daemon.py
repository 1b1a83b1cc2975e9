"""The daemon, top to bottom:

    fault on the node -> finding -> condition -> decision -> Slurm drains (and requeues) -> repaired -> Slurm resumes

One process that sleeps in one wait. Its parts:

    agent/scheduler/kernel_events.py     kernel events become conditions
    agent/scheduler/scheduler.py         which checks are due
    agent/scheduler/replies.py           the worker's replies: results of checks become conditions
    agent/scheduler/job_presence.py      whether jobs can run on this node
    agent/slurm/controller.py            drain, requeue and resume in Slurm
    agent/scheduler/failslow_process.py  the process that watches jobs for fail-slow, if a site enables it
    agent/scheduler/before_resume.py     what runs on the idle node before it is resumed
    agent/metrics/publisher.py           the verdict file, the metrics and the systemd status
    agent/conditions/store.py            the ledger: one value, which is replaced

The worker (agent/worker/) and child processes (agent/slurm/driver.py) do what can block; this process only reads their
answers. Pure functions compute what follows (agent/conditions/intake.py, agent/conditions/verdict.py,
agent/slurm/policy.py).
"""

from __future__ import annotations

import logging
import os
import shlex
import signal
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from functools import partial
from typing import Any

from msgspec.structs import replace

import healthd
from healthd.agent.conditions import absorb, events, log_fields, verdict
from healthd.agent.conditions.store import NAMES, Memory
from healthd.agent.control import commands, protocol
from healthd.agent.control.server import ControlServer
from healthd.agent.kernel_log.listener import Listener
from healthd.agent.kernel_log.parse import use_patterns
from healthd.agent.metrics.publisher import Publisher
from healthd.agent.reporting import systemd
from healthd.agent.reporting.status import (
    Problem,
    Snapshot,
    command_for_kernel_log,
    decision_words,
    labelled,
    status_json,
)
from healthd.agent.scheduler.before_resume import BeforeResume, Sight, Stage, found_by
from healthd.agent.scheduler.failslow_process import Watching
from healthd.agent.scheduler.job_presence import JobPresence
from healthd.agent.scheduler.kernel_events import Hearing
from healthd.agent.scheduler.replies import Received, ReplyHandler
from healthd.agent.scheduler.scheduler import Scheduler
from healthd.agent.scheduler.worker_queue import TASK_SECONDS
from healthd.agent.settings import registry
from healthd.agent.settings.config import ConfigError, Loaded, Settings, only_observes_kernel_log
from healthd.agent.settings.configured import Configured
from healthd.agent.settings.registry import Check
from healthd.agent.slurm import prolog_files
from healthd.agent.slurm.controller import Hand
from healthd.agent.slurm.event_jobs import JobAtSource
from healthd.agent.slurm.reconcile import ReconcileReport
from healthd.agent.worker.client import Request, Runner
from healthd.agent.worker.process import setup_of
from healthd.agent.worker.requests import CopyAnswer, LoadCopy
from healthd.agent.worker.results import CLOCK_STEP_SECONDS
from healthd.common import detection_pause, guard
from healthd.common.atomic_files import newest, remove_leftovers
from healthd.common.guard import FAILSLOW, HOT_UNPLUG, METRICS
from healthd.common.model import Decision, Health, Mode, Outcome, Verdict
from healthd.common.paths import SOCKET, VERDICT_FILE
from healthd.common.text import compile_patterns, printable
from healthd.host import shortage
from healthd.host.host import Host
from healthd.host.hot_unplug import hot_unplug
from healthd.host.lock import VALIDATION_LOCK, holds, is_held, lock
from healthd.host.wakeup import FOREVER, poll, signals, wake_no_longer, wake_on_signals
from healthd.nvidia import codes

log = logging.getLogger("healthd")

LAST_WORDS_SECONDS = 2.0  # for what is told of the end, if the worker is idle
STOP_SECONDS = 2.0  # how long an idle worker may take to end; a busy one is left to end by itself
SETTINGS_FILE = "/etc/healthd/healthd.toml"  # for people; who reads it is `load_settings`
READY_SECONDS = 60.0  # how long slurmd's start waits for a drain that is due at our start

# Reads the settings and finds the checks. A directory is where to find the site's checks instead.
LoadSettings = Callable[[str | None], tuple[Loaded, dict[str, Check]]]

# A reload leaves these as they were: a change takes effect at the next start.
FIXED_SETTINGS = (
    *("root", "state_dir", "runtime_dir", "checks_dir", "node_name", "cluster", "nvml", "kernel_log", "metrics"),
    "round_timeout_seconds",
)


def run(load_settings: LoadSettings, settings_file: str = SETTINGS_FILE) -> int:
    """`healthd run`, until SIGTERM. Raises ConfigError, and OSError if it cannot get its runtime directory."""
    systemd.set_up_logging()
    daemon = Daemon(load_settings, settings_file)
    try:
        daemon.start()
        while not daemon.stopping:
            daemon.turn()
    finally:
        daemon.shut_down()
    return 0


class Daemon:
    """Built from its settings; nothing is opened, written or waited for before `start()`, and all that is opened is
    closed by `shut_down()`, however far `start()` came."""

    def __init__(
        self,
        load_settings: LoadSettings,
        settings_file: str = SETTINGS_FILE,
        now: Callable[[], float] = time.time,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self.load_settings, self.settings_file = load_settings, settings_file
        self.configured = Configured(*load_settings(None))
        settings = self.settings
        self.clock, self.monotonic = now, monotonic
        self.clock_offset = now() - monotonic()
        self.opened = ExitStack()
        self.boot_id = Host(settings.root).boot_id()
        self.watchdog_seconds = systemd.watchdog_seconds() or FOREVER
        self.stopping = self.said_ready = self.said_alive = self.only_worker_woke = False
        self.started = self.ticked = 0.0  # since `start()`
        self.ready_by = FOREVER
        self.renew_verdict_at = FOREVER  # monotonic; only while a round is in progress
        self.commanded: Counter[str] = Counter()
        self.reload_failures, self.reload_trouble = 0, ""
        self.judged: tuple[object, ...] = ()
        self.verdict = Verdict(Health.UNKNOWN)

        self.memory = Memory(settings.runtime_dir, self.now, monotonic, settings.node_name, settings.cluster)
        use_patterns(settings.kernel_log.patterns)
        kernel = Listener(
            settings.kernel_log.source,
            settings.root,
            self.boot_id,
            settings.kernel_log.accept_injected,
            self.now,
            monotonic,
            only_observes_kernel_log(self.configured.loaded),
        )
        job_at_source = JobAtSource(settings.root, settings.node_name, monotonic)
        self.hand = Hand(settings, self.memory, self.boot_id, self.now, monotonic)
        self.client = Runner(setup_of(settings), settings.runtime_dir, monotonic, now)  # it detects a clock step
        self.jobs = JobPresence(settings.root, monotonic)
        self.scheduler = Scheduler(self.configured, self.memory, self.client, self.jobs, self.now, monotonic)
        self.replies = ReplyHandler(self.scheduler, self.jobs, self.memory, self.client, self.now, monotonic)
        self.hearing = Hearing(self.configured, self.memory, kernel, job_at_source, self.now)
        self.watching = Watching(self.configured, monotonic)
        self.before_resume = BeforeResume(
            self.command_of,
            partial(is_held, os.path.join(settings.runtime_dir, VALIDATION_LOCK)),
            self.now,
            monotonic,
        )
        self.hot_unplug = hot_unplug(settings.root, monotonic)
        self.control = ControlServer(os.path.join(settings.runtime_dir, SOCKET), self.answer, monotonic)
        self.publisher = Publisher(settings)

    # --- start

    def start(self) -> None:
        """Raises OSError if it cannot get its runtime directory, SystemExit if it is stopped before its ledger is read.
        What is opened is closed in the other order."""
        settings, opened, client = self.settings, self.opened, self.client
        self.lock = lock(settings.runtime_dir)
        opened.callback(lambda: os.close(self.lock))
        remove_leftovers(settings.runtime_dir)
        # The prolog writes into this folder.
        os.makedirs(os.path.join(settings.runtime_dir, prolog_files.FOLDER), mode=0o755, exist_ok=True)
        self.wakeup = wake_on_signals()
        opened.callback(wake_no_longer, self.wakeup)
        client.adopt_lost()
        opened.callback(client.close, STOP_SECONDS)
        self.recall()
        self.started = self.now()  # once the copy was read, which may take its time
        self.ticked = self.monotonic()
        opened.callback(self.publisher.close)
        opened.callback(self.hand.close)
        opened.callback(self.watching.close)
        self.hot_unplug.open()
        opened.callback(self.hot_unplug.close)
        self.hearing.kernel.open(self.memory.ledger.cursors.get(settings.kernel_log.source))
        opened.callback(self.hearing.kernel.close)
        self.control.open()
        opened.callback(self.last_words)
        self.judge()
        self.publisher.shown = self.snapshot()
        self.keep_in_memory()
        self.serve_metrics()
        checks = registry.counted(self.configured.checks, self.configured.loaded)
        log.info("healthd %s on %s: mode %s, %s", healthd.__version__, settings.node_name, settings.mode.value, checks)

    @property
    def settings(self) -> Settings:
        return self.configured.settings

    def recall(self) -> None:
        """Go on from the ledger as it was, without the conditions of checks that are no longer configured."""
        settings, memory = self.settings, self.memory
        last_alive = newest(settings.runtime_dir, (VERDICT_FILE, *NAMES))  # the verdict is written each round
        memory.recall(self.read_copy, self.boot_id, settings.mode, last_alive)
        memory.stream.emit_checks(self.configured.versions(healthd.__version__))
        memory.keep_only(self.configured.runs)
        memory.set_conditions(absorb.reconfigured(memory.conditions, self.configured.runs))

    def read_copy(self) -> dict[str, str | None]:
        """The ledger's copy. The worker reads it, since that disk may hang; its deadline bounds this wait."""
        memory, client = self.memory, self.client
        reply = client.send(Request("state_dir", TASK_SECONDS, LoadCopy(self.settings.state_dir, NAMES)))
        while reply is None:
            poll([(self.wakeup, False), *client.waits()], client.deadline - self.monotonic())
            if set(signals(self.wakeup)) - {signal.SIGHUP}:
                log.info("stopped before the copy of the ledger in %s was read", self.settings.state_dir)
                raise SystemExit(0)
            reply = client.step()
        if reply.outcome is not Outcome.COMPLETED:
            log.error("the copy of the ledger in %s cannot be read: %s", self.settings.state_dir, reply.error)
            memory.copy_unread = True
        copy = reply.answer if isinstance(reply.answer, CopyAnswer) else CopyAnswer()
        memory.copied_at = copy.written
        return copy.texts

    # --- one turn of the loop

    def turn(self) -> None:
        self.wait()
        self.follow_clock()
        self.obey_signals()
        self.must_hold_its_directory()
        self.read_jobs()
        self.listen()
        received = self.replies.step()
        self.pass_on(received)
        self.pass_time()
        self.decide(received.round_ended)
        self.publish(received.round_ended)
        self.say_ready()

    # --- the one wait

    def wait(self) -> None:
        """Sleep until something can be read, a deadline passes, or something is due."""
        known = self.memory.ledger
        others = (self.hearing, self.hot_unplug, self.control, self.watching, self.before_resume)
        ends = [self.memory.acks_end]  # epoch seconds; the moments below are monotonic
        ends += [known.pause.until] if known.pause else []
        ends += [events.flush_at(known.told)]
        ends += [self.hand.held_from] if self.publisher.verdict_word == "drain" else []
        moments = (
            self.scheduler.queue.deadline,
            self.hand.deadline,
            *(other.deadline for other in others),
            self.monotonic() + min(ends, default=FOREVER) - self.now(),
            self.ticked + self.watchdog_seconds / 2,
            FOREVER if self.said_ready else self.ready_by,
            self.renew_verdict_at if self.scheduler.queue.running else FOREVER,
        )
        of_worker = list(self.client.waits())
        of_others = [descriptor for other in others for descriptor in other.waits()]
        waits = [(self.wakeup, False), *of_worker, *self.hand.waits(), *of_others]
        ready = poll(waits, min(moments) - self.monotonic())
        others_wait_until = min(other.deadline for other in others)
        woke_for_worker = bool(ready) and ready <= {descriptor for descriptor, _ in of_worker}
        self.only_worker_woke = woke_for_worker and self.monotonic() < others_wait_until
        systemd.watchdog()

    def now(self) -> float:
        """Epoch seconds. That the clock was set counts from `follow_clock()` on: within a turn time goes by as the
        monotonic clock has it, or what was to last an hour would be over before anybody knew of the step."""
        return self.monotonic() + self.clock_offset

    def follow_clock(self) -> None:
        """The clock may have been set while we slept, or since the last turn began. Whatever comes next is told the new
        one, and the ledger's times are moved to it first."""
        before = self.now()
        step = self.clock() - before
        self.clock_offset += step
        if abs(step) > CLOCK_STEP_SECONDS:
            log.warning("the clock was set by %+.1f s: the ledger's times are moved with it", step)
            self.memory.set_clock(step, since=self.started, until=before)
            self.started += step

    def obey_signals(self) -> None:
        for number in signals(self.wakeup):
            if number == signal.SIGHUP:
                with suppress(commands.CommandRefused):  # which it has logged; nobody waits for an answer
                    self.reload()
            else:
                self.stopping = True

    def must_hold_its_directory(self) -> None:
        """Raises OSError if the runtime directory was removed, and the verdict, the socket and the lock with it: drains
        would go on, and a second daemon could start. The ledger is saved there again; systemd starts us anew."""
        directory = self.settings.runtime_dir
        if self.only_worker_woke or holds(self.lock, directory):
            return
        self.lock = lock(directory)
        self.memory.save_anew()
        raise OSError(f"{directory}, or the lock in it, was removed while healthd ran: it must be started anew")

    # --- listen: people, kernel lines, devices that go

    def listen(self) -> None:
        if self.only_worker_woke:  # dozens of times a round
            return
        self.control.step()
        self.scheduler.run_after(self.hearing.listen())
        request = self.hearing.journal_request()
        if request is not None and request != self.client.request:
            self.scheduler.queue.add_task(request)  # else the same lines would be read, and counted, twice
        with guard.at(FAILSLOW):
            if self.watching.step():
                self.scheduler.run_after(["failslow"])
        removed: list[str] = []
        with guard.at(HOT_UNPLUG):
            removed = self.hot_unplug.read()
        for pci in removed:
            log.warning("device %s was removed", pci or "(which one was not heard)")
            self.replies.inventory.renew_soon()
            self.scheduler.run_after(["pci_remove"])

    def pass_on(self, received: Received) -> None:
        """Pass on what the worker read for the kernel events."""
        if received.inventory is not None:
            self.hearing.know(received.inventory)
        if received.journal is not None:
            self.scheduler.run_after(self.hearing.hear_from_journal(received.journal))

    # --- jobs on this node

    def read_jobs(self, job_ended: bool = False) -> None:
        """Read from Slurm's cgroups whether a job is here: when a job ends, then once a second while none is here."""
        self.note_drained()
        was_empty = self.jobs.is_without_jobs
        if job_ended:
            self.jobs.read()
        else:
            self.jobs.step()
        if was_empty:
            self.replies.forget_unless_idle()

    def note_drained(self) -> None:
        """Note whether Slurm shows this node drained and idle. Its answer expires, and it rests on the last verdict."""
        self.jobs.is_drained = self.hand.shows_drained(self.verdict)

    # --- time goes by: windows, pauses, acks

    def pass_time(self) -> None:
        monotonic, now = self.monotonic(), self.now()
        seconds, self.ticked = monotonic - self.ticked, monotonic
        slurm = self.memory.ledger.slurm
        self.memory.pass_quiet_time(seconds, loaded=not (slurm.reason or slurm.overruled or slurm.adopted))
        pause = self.memory.ledger.pause
        if pause and now >= pause.until:
            log.info("the pause is over: %s", pause.why)
            commands.end_pause(self.memory, now)
            self.scheduler.queue.run_all_now()
        self.memory.end_acks()
        self.memory.stream.flush_after_job()

    # --- decide: conditions -> verdict -> decision -> Slurm

    def judge(self) -> None:
        """Make a new verdict if one of its inputs has changed. `jobs.is_drained` is an input that rests on the verdict
        before: `note_drained` sets it, at the start of a turn and after each look at Slurm."""
        known, replies, waits_for = self.memory.ledger, self.replies, self.before_resume.waits_for
        expected, optional = self.scheduler.expected(), self.configured.never_holds_resume
        inputs = (known.conditions, known.trusted_since, expected, replies.changes, waits_for)
        if inputs != self.judged:
            self.judged = inputs
            self.verdict = verdict.judge(known.by_key(), replies.results, expected, known.trusted_since, optional)
            if waits_for:
                self.verdict = replace(self.verdict, may_resume=False, before_resume=waits_for)

    def decide(self, round_ended: bool) -> None:
        before = self.verdict.health
        self.judge()
        if self.verdict.health is not before:
            log.info("health: %s, was %s", self.verdict.health.value, before.value)
        decision = self.hand.decision
        self.slurm_was_looked_at(self.hand.step(), decision)
        self.run_before_resume()
        decision = self.hand.decision
        self.slurm_was_looked_at(self.hand.look(self.verdict, round_ended), decision)

    def run_before_resume(self) -> None:
        """What checks want run on the drained, idle node. The verdict says what the resume waits for."""
        programs = self.configured.before_resume
        if not programs and not self.before_resume.waits_for:
            return
        known, replies = self.memory.ledger, self.replies
        before, drained = self.before_resume, bool(known.slurm.reason or known.slurm.writing)
        if not drained and before.stage is Stage.BEFORE and not before.waits_for:
            return  # no drain of ours stands, or stood at the last look
        others = {key: c for key, c in known.by_key().items() if c.run not in programs}
        results = {name: result for name, result in replies.results.items() if name not in programs}
        names = [name for name in self.scheduler.expected() if name not in programs]
        rest = verdict.judge(others, results, names, known.trusted_since, self.configured.never_holds_resume)
        sight = Sight(
            drained=drained and self.hand.may_change(),
            idle=self.hand.shows_drained(self.verdict),
            causes=bool(rest.causes),
            clean=rest.may_resume,
            failed=found_by(known.conditions, programs, self.memory.booted_at),
        )
        if ended := before.step(programs, sight, replies.results):
            self.scheduler.queue.run_early(ended, self.monotonic())
        self.judge()

    def slurm_was_looked_at(self, report: ReconcileReport | None, before: Decision) -> None:
        self.note_drained()
        if report is not None:
            if report.node is not None:  # read in this look: an older answer of Slurm is no evidence about jobs now
                self.replies.forget_unless_idle()
            self.judge()
            self.note_drained()
        if self.hand.decision != before:
            words = decision_words(self.hand.decision, self.hand.status.owner)
            fields = log_fields.of_decision(self.hand.decision, self.verdict.causes)
            log.log(logging.WARNING if fields else logging.INFO, "decision: %s", words, extra=fields)
            self.memory.stream.emit([events.decision(self.hand.decision, words)])

    # --- publish: the ledger, its copy and the stream, the verdict file, metrics, systemd

    def publish(self, round_ended: bool) -> None:
        if round_ended:
            self.say_alive()
        known = self.memory.ledger
        if self.memory.unsaved or round_ended:
            self.memory.save(round_over=round_ended)
        drain = self.hand.keeps_jobs_out(self.verdict)
        quarantined = self.client.quarantined
        shown = (self.verdict, self.hand.decision, self.hand.status, self.hearing.kernel.status, quarantined)
        if self.publisher.has_news((*shown, drain, known.pause, known.slurm, self.settings.mode)) or round_ended:
            self.publish_verdict(drain, round_ended)
        elif self.scheduler.queue.running and self.monotonic() >= self.renew_verdict_at:
            # A round that takes longer than the interval is no hung daemon: what the last one found still holds.
            self.publish_verdict(drain, round_ended=True)
        self.replies.add_tasks(round_ended)
        if round_ended:
            self.scheduler.end_round()
            self.hearing.round_is_over()
            self.serve_metrics()
            self.ready_by = min(self.ready_by, self.monotonic() + READY_SECONDS)

    def serve_metrics(self) -> None:
        with guard.at(METRICS):
            self.publisher.serve_metrics()

    def say_alive(self) -> None:
        """After the first round, and once a day: without it nobody can tell "no failure" from "not observed"."""
        if self.said_alive and not events.is_alive_due(self.memory.ledger.told, self.now()):
            return
        listening = self.configured.listeners if self.hearing.kernel.status.alive else ()
        only_listen = {check.name for check, _ in listening if not check.runs}
        self.memory.stream.emit_alive(self.replies.completed() | only_listen, anyway=True)
        self.said_alive = True

    def publish_verdict(self, drain: bool, round_ended: bool) -> None:
        """It expires after three rounds without another."""
        until = self.now() + 3 * self.settings.interval_seconds
        if self.publisher.publish(self.snapshot(), drain, until, round_ended):
            self.renew_verdict_at = self.monotonic() + self.settings.interval_seconds
            self.write_textfile()

    def write_textfile(self) -> None:
        """The worker writes it: the collector's directory is on a disk, which may hang."""
        path = self.settings.metrics.textfile
        if path:
            from healthd.agent.metrics.families import render

            with guard.at(METRICS):
                page = render(self.snapshot())
                self.scheduler.queue.add_task(self.replies.textfile.request(path, page.decode()))

    def say_ready(self) -> None:
        """At the first verdict; if that drains, once the drain stands: then slurmd is started and takes jobs."""
        if self.said_ready or self.ready_by == FOREVER:
            return
        if self.hand.must_be_waited_for(self.verdict) and self.monotonic() < self.ready_by:
            return
        self.said_ready = True
        systemd.ready(self.verdict.health.value)

    def keep_in_memory(self) -> None:
        """What is needed late is loaded now: healthd's files may be removed or replaced while it runs."""
        codes.load()
        compile_patterns()
        registry.remedies(self.configured.checks, ("gpu_xid/79",))  # its texts are a module of their own
        metrics = self.settings.metrics
        if metrics.textfile or metrics.listen != "off":
            from healthd.agent.metrics.families import render

            with guard.at(METRICS):
                render(self.snapshot())

    def snapshot(self) -> Snapshot:
        known, replies, hearing, client = self.memory.ledger, self.replies, self.hearing, self.client
        return Snapshot(
            version=healthd.__version__,
            node_name=self.settings.node_name,
            mode=self.settings.mode.value,
            started=self.started,
            now=self.now(),
            interval_seconds=self.settings.interval_seconds,
            verdict=self.verdict,
            results=tuple(replies.results[name] for name in sorted(replies.results)),
            outcomes=dict(replies.outcomes),
            decision=self.hand.decision,
            slurm=self.hand.status,
            requeued=self.hand.requeued,
            kernel_log=hearing.kernel.status,
            incidents=hearing.standing_incidents(),
            sources=(*hearing.kernel.sources, *self.hot_unplug.sources),
            round=self.scheduler.queue.status,
            inventory=known.inventory,
            pause=known.pause,
            detection_pause=detection_pause.standing(self.settings.runtime_dir, self.now()),
            commands=dict(self.commanded),
            # In mode observe no drain waits; the ledger keeps the hold for a change back to another mode.
            fleet_hold=None if self.settings.mode is Mode.OBSERVE else known.slurm.hold,
            fleet_counted=self.settings.mode is Mode.OBSERVE or not known.slurm.uncounted_since,
            # A worse fault gives our drain another reason, and Slurm another time: ours is when it began to stand.
            drained_since=known.slurm.drained_at
            or (self.hand.status.node.reason_time if self.hand.status.node else 0.0),
            quarantined=client.quarantined,
            workers_started_total=client.started_total,
            workers_abandoned_total=client.abandoned_total,
            ledger_copy_failures_total=replies.ledger_copy.failures,
            stream=replies.delivery.status,
            config_reload_failures_total=self.reload_failures,
            config_last_reload_successful=not self.reload_trouble,
            events_forgotten_total=hearing.events_forgotten,
            dropped=dict(guard.dropped),
            shortages=dict(shortage.counts),
            cleared=known.cleared[-20:],
            meanings=self.configured.meanings,
            remedies=registry.remedies(self.configured.checks, (c.code for c in self.verdict.conditions)),
            without_result=registry.without_result(self.configured.checks, self.configured.loaded),
            problems=self.problems(),
            processes={"daemon": (os.getpid(),), "worker": client.pids, "live": self.watching.pids},
        )

    def command_of(self, arguments: tuple[str, ...]) -> tuple[str, ...]:
        """healthd itself, with our settings and our folders."""
        folders = ("--runtime-dir", self.settings.runtime_dir, "--state-dir", self.settings.state_dir)
        return (sys.executable, "-m", "healthd", *arguments, "--config", self.settings_file, *folders)

    def problems(self) -> tuple[Problem, ...]:
        """Return what is wrong with healthd itself. What a person has to act on comes first."""
        settings, publisher, replies, kernel = self.settings, self.publisher, self.replies, self.hearing.kernel.status
        stream, lost = replies.delivery.status, self.memory.ledger.outbox.dropped
        runtime_dir, state_dir, file = settings.runtime_dir, settings.state_dir, shlex.quote(self.settings_file)
        here, there = (f"ls -ld {folder}; df -h {folder}" for folder in map(shlex.quote, (runtime_dir, state_dir)))
        reload = "systemctl reload healthd" if systemd.is_managed() else f"kill -HUP {os.getpid()}"
        found = (
            Problem(replies.files.problem, "systemctl restart healthd"),
            Problem(
                labelled("the settings were not read again", self.reload_trouble),
                f"healthd config check {file} && {reload}",
            ),
            Problem(labelled("slurm", self.hand.status.problem), "scontrol ping"),
            Problem(f"{runtime_dir}: the ledger cannot be saved" if self.memory.save_failed else "", here),
            Problem(publisher.verdict_trouble, here),
            Problem(labelled("before a resume", self.before_resume.problem), "healthd validate"),
            Problem(
                labelled(
                    f"{state_dir}: a reboot would lose what healthd knows: no copy of it", replies.ledger_copy.problem
                ),
                there,
            ),
            Problem(labelled(f"{state_dir}: {stream.waiting} events wait", stream.problem), there),
            Problem(f"{lost} events are lost to the stream: too many wait for the disk" if lost else ""),
            Problem(
                f"kernel log: {kernel.problem}" if kernel.problem or not kernel.alive else "",
                command_for_kernel_log(kernel),
            ),
            Problem(self.watching.problem, "journalctl -u healthd -n 50"),
            *(Problem(sentence, "ss -ltnp") for sentence in publisher.metrics_troubles),
            Problem(publisher.web_trouble, f"healthd config check {file}"),
            Problem(replies.textfile.problem, "healthd doctor"),
            *(Problem(text, "systemctl status healthd; cat /proc/loadavg") for text in shortage.problems(self.now())),
            *(Problem(text, "journalctl -u healthd -p err -n 50") for text in guard.problems(self.now())),
        )
        return tuple(problem for problem in found if problem.sentence)

    # --- what people say

    def answer(self, request: dict[str, Any], who: str, may_command: bool) -> dict[str, Any]:
        """The reply to one request on the control socket (agent/control/protocol.py). `who`: "root (uid 0)"."""
        try:
            name = protocol.command_of(request, who, may_command)
            if name == protocol.STATUS:
                return {"status": status_json(self.snapshot())}
            if name == protocol.LOOKS_LEFT:
                asked = protocol.asked_of(request)
                return {"asked": asked, "left": self.replies.not_run_since(self.scheduler.runs_after_job(), asked)}
            if name == protocol.JOB_ENDED:
                return self.job_ended()
        except protocol.Refused as refusal:
            return {"error": str(refusal)}
        try:
            done = self.carry_out(name, request, who)
        except commands.CommandRefused as refusal:
            return {"error": printable(f"{name}: {refusal}")}
        log.warning("%s by %s: %s", name, who, done)
        return {"done": done}

    def job_ended(self) -> dict[str, Any]:
        """An epilog reports the end of a job: the checks for it run now. Return those that the epilog may wait for, and
        the programs that it shall run: only where no job is left and nothing drains."""
        asked = self.now()
        self.memory.stream.emit_job_end()
        self.read_jobs(job_ended=True)
        runs = self.scheduler.runs_after_job()
        self.scheduler.queue.run_after_event(runs)
        left = self.replies.not_run_since(runs, asked)
        words = f"these look now: {', '.join(left)}" if left else "all have looked just now"
        reply: dict[str, Any] = {"done": words, "asked": asked, "left": left}
        programs = self.configured.after_job if self.jobs.is_without_jobs and not self.verdict.causes else []
        if programs:
            reply["then"] = [{"argv": self.command_of(run.arguments), "seconds": run.seconds} for run in programs]
        return reply

    def carry_out(self, command: str, request: Mapping[str, Any], who: str) -> str:
        """What was done, in words. Raises commands.CommandRefused."""
        if command == protocol.RELOAD:
            return self.reload()
        if command in commands.OF_DETECTION:
            done = commands.OF_DETECTION[command](self.settings.runtime_dir, request, who, self.now())
            self.commanded[command] += 1
            self.scheduler.run_after(["failslow"])
            return done
        done = commands.COMMANDS[command](self.memory, request, who, self.now())
        self.commanded[command] += 1
        self.memory.save()
        self.scheduler.queue.run_after_command()
        return done

    def reload(self) -> str:
        """SIGHUP, or `healthd reload`: read the settings and the site's checks again. An error changes nothing: all is
        made before any of it is used. Raises commands.CommandRefused."""
        systemd.reloading()
        try:
            if changed := self.replies.files.changed():  # profiles and facts would be missing, or another version's
                raise ConfigError(changed)
            loaded, checks = self.load_settings(self.settings.checks_dir)
            kept = {name: getattr(self.settings, name) for name in FIXED_SETTINGS}
            waiting = [name for name in FIXED_SETTINGS if getattr(loaded.settings, name) != kept[name]]
            settings = replace(loaded.settings, **kept)
            configured = Configured(replace(loaded, settings=settings), checks)
            conditions = absorb.reconfigured(self.memory.conditions, configured.runs)
        except BaseException as raised:  # a site's file may raise what it likes; nothing else ends the daemon from here
            self.reload_failures += 1
            changed = self.replies.files.changed()  # while it read: this is what came of it
            error = ConfigError(changed) if changed else raised
            known = isinstance(error, ConfigError)
            self.reload_trouble = str(error) if known else traceback.format_exception_only(error)[-1].strip()
            log.error("the settings stay as they were: %s", self.reload_trouble, exc_info=None if known else raised)
            systemd.ready(f"old settings kept: {self.reload_trouble}")
            raise commands.CommandRefused(f"the settings stay as they were: {self.reload_trouble}") from None
        if waiting:
            log.warning("takes effect at the next start only: %s", ", ".join(waiting))
        self.reload_trouble = ""
        self.configured = self.hearing.configured = configured
        self.hand.settings = self.publisher.settings = settings
        self.client.renew()  # the site's checks may be new
        self.scheduler.reconfigure(configured)
        self.replies.keep_only_configured()
        self.watching.reconfigure(configured)
        self.memory.change_mode(settings.mode)
        self.memory.set_conditions(conditions)
        self.memory.stream.emit_checks(configured.versions(healthd.__version__))
        self.memory.keep_only(configured.runs)
        done = f"settings read again: mode {settings.mode.value}, {len(configured.runs)} checks"
        log.info("%s", done)
        systemd.ready(self.verdict.health.value)
        return f"{done}; takes effect at the next start only: {', '.join(waiting)}" if waiting else done

    # --- stop

    def shut_down(self) -> None:
        """Stop within 5 seconds, whatever hangs: we wait for nothing that could be stuck."""
        self.opened.close()
        if self.memory.is_recalled:
            log.info("stopped")

    def last_words(self) -> None:
        systemd.stopping()
        self.before_resume.drop()
        self.hearing.note_cursor()
        is_ours = holds(self.lock, self.settings.runtime_dir)  # else the files there belong to another daemon
        if is_ours:
            self.memory.stream.emit_stopped("it was told to" if self.stopping else "by a mistake of its own")
            self.memory.save(round_over=True)
            self.replies.finish(LAST_WORDS_SECONDS)
        self.control.close(is_ours)
