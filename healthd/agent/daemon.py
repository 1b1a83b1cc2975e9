"""The daemon, which handles a fault from its detection to the resume:

    fault on the node -> finding -> condition -> decision -> Slurm drains (and requeues) -> repair -> Slurm resumes

It is one process with a single blocking wait. Its components:

    agent/scheduler/kernel_events.py     kernel events become conditions
    agent/scheduler/scheduler.py         which checks are due
    agent/scheduler/replies.py           the worker's replies; check results become conditions
    agent/scheduler/job_presence.py      whether jobs can run on this node
    agent/slurm/controller.py            drain, requeue and resume in Slurm
    agent/scheduler/failslow_process.py  the process that monitors jobs for fail-slow, if a site enables it
    agent/scheduler/gpu_event_process.py the process that receives GPU events from NVML, if a site enables it
    agent/scheduler/before_resume.py     programs that run on the idle node before it is resumed
    agent/repair/node_repair.py          the repair of this node: its plan and, in mode "act", its steps
    agent/hooks/trigger.py               the site's programs that run after a drain or a resume, outside this process
    agent/evidence/collection.py         the evidence of a fault, which a separate program saves
    agent/metrics/publisher.py           the verdict file, the metrics and the systemd status
    agent/conditions/store.py            the ledger, a single value that is replaced at each change

The worker (agent/worker/) and child processes (agent/slurm/driver.py) do everything that can block. This process only
reads their answers. Pure functions compute the results (agent/conditions/intake.py, agent/conditions/verdict.py,
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
from healthd.agent.conditions.store import NAMES, ConditionStore
from healthd.agent.control import commands, protocol
from healthd.agent.control.server import ControlServer
from healthd.agent.evidence.case import Cause, View
from healthd.agent.evidence.collection import EvidenceCollection
from healthd.agent.hooks.trigger import HookTrigger
from healthd.agent.kernel_log.log_reader import KernelLogReader
from healthd.agent.kernel_log.parse import use_patterns
from healthd.agent.metrics.publisher import Publisher
from healthd.agent.repair.node_repair import NodeRepair
from healthd.agent.repair.orders import ORDERS
from healthd.agent.repair.planner import with_drain_causes
from healthd.agent.repair.step_program import StepProgram
from healthd.agent.reporting import systemd
from healthd.agent.reporting.status import (
    Problem,
    Snapshot,
    command_for_kernel_log,
    decision_text,
    labelled,
    status_json,
)
from healthd.agent.scheduler.before_resume import BeforeResume, NodeView, Stage, has_drain_cause
from healthd.agent.scheduler.failslow_process import FailslowProcess
from healthd.agent.scheduler.gpu_event_process import LOCK as GPU_EVENTS_LOCK
from healthd.agent.scheduler.gpu_event_process import GpuEventProcess
from healthd.agent.scheduler.job_presence import JobPresence
from healthd.agent.scheduler.kernel_events import KernelEventIntake
from healthd.agent.scheduler.replies import Received, ReplyHandler
from healthd.agent.scheduler.scheduler import Scheduler
from healthd.agent.scheduler.worker_queue import TASK_TIMEOUT_SECONDS
from healthd.agent.scheduler.worker_tasks import hooks_record
from healthd.agent.settings import registry
from healthd.agent.settings.config import ConfigError, Loaded, Settings, is_kernel_log_forgeable
from healthd.agent.settings.configured import Configured
from healthd.agent.settings.registry import Check
from healthd.agent.slurm import prolog_files
from healthd.agent.slurm.affected_jobs import rack_gpus, with_switch_side
from healthd.agent.slurm.controller import SlurmController
from healthd.agent.slurm.event_jobs import EventJobFinder
from healthd.agent.slurm.policy import is_idle, last_drain_reason
from healthd.agent.slurm.reconcile import ReconcileReport
from healthd.agent.worker.client import Request, WorkerClient
from healthd.agent.worker.process import worker_setup
from healthd.agent.worker.requests import CopyAnswer, LoadCopy
from healthd.agent.worker.results import CLOCK_STEP_SECONDS
from healthd.common import detection_pause, guard
from healthd.common.atomic_files import newest_mtime, remove_leftovers
from healthd.common.guard import EVIDENCE, FAILSLOW, GPU_EVENTS, HOOKS, HOT_UNPLUG, METRICS
from healthd.common.model import Decision, Drain, Health, Mode, Outcome, RepairMode, Verdict
from healthd.common.paths import SOCKET, VERDICT_FILE
from healthd.common.text import compile_patterns, printable
from healthd.events.schema import Event
from healthd.host import shortage
from healthd.host.host import Host
from healthd.host.hot_unplug import hot_unplug
from healthd.host.lock import VALIDATION_LOCK, is_current, is_locked, lock
from healthd.host.wakeup import FOREVER, poll, signals, stop_waking_on_signals, wake_on_signals
from healthd.nvidia import codes

log = logging.getLogger("healthd")

FINAL_WRITE_SECONDS = 2.0  # for the last write of the stream and the ledger, if the worker is idle
STOP_SECONDS = 2.0  # how long an idle worker may take to exit; a busy worker exits on its own
SETTINGS_FILE = "/etc/healthd/healthd.toml"  # only for messages; `load_settings` reads the file
FAULT_AGE_SECONDS = 3600.0  # evidence of an older fault begins at most this long before now
EVIDENCE_COMMAND = "systemctl status healthd-evidence.path; journalctl -u healthd-evidence -n 50"
REPAIR_COMMAND = "systemctl status healthd-repair.path; journalctl -u healthd-repair -n 50"
READY_SECONDS = 60.0  # how long slurmd's start is delayed for a drain that is due when healthd starts

# Reads the settings and finds the checks. The argument overrides the directory with the site's checks.
LoadSettings = Callable[[str | None], tuple[Loaded, dict[str, Check]]]

# A reload does not apply these settings. A change takes effect at the next start.
FIXED_SETTINGS = (
    *("root", "state_dir", "runtime_dir", "checks_dir", "node_name", "cluster", "nvml", "kernel_log", "metrics"),
    "round_timeout_seconds",
)


def run(load_settings: LoadSettings, settings_file: str = SETTINGS_FILE) -> int:
    """Run `healthd run` until SIGTERM. Raises ConfigError, or OSError if the runtime directory cannot be used."""
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
    """The daemon, built from its settings.

    Until `start()`, the daemon does not open, write or wait for anything. `shut_down()` closes everything that is open,
    even if `start()` failed.
    """

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
        self.stopping = self.ready_sent = self.alive_sent = self.only_worker_woke = False
        self.started = self.last_turn_at = 0.0  # set by `start()`
        self.ready_by = FOREVER
        self.renew_verdict_at = FOREVER  # monotonic; set only while a round is in progress
        self.command_counts: Counter[str] = Counter()
        self.reload_failures, self.reload_problem = 0, ""
        self.verdict_inputs: tuple[object, ...] = ()
        self.validated_step = ""  # the last step of a repair after which a validation was due
        self.verdict = Verdict(Health.UNKNOWN)

        self.store = ConditionStore(settings.runtime_dir, self.now, monotonic, settings.node_name, settings.cluster)
        use_patterns(settings.kernel_log.patterns)
        listener = KernelLogReader(
            settings.kernel_log.source,
            settings.root,
            self.boot_id,
            settings.kernel_log.accept_injected,
            self.now,
            monotonic,
            is_kernel_log_forgeable(self.configured.loaded),
        )
        job_finder = EventJobFinder(settings.root, settings.node_name, monotonic)
        self.controller = SlurmController(settings, self.store, self.boot_id, self.now, monotonic)
        self.client = WorkerClient(worker_setup(settings), settings.runtime_dir, monotonic, now)  # detects a clock step
        self.jobs = JobPresence(settings.root, monotonic)
        self.scheduler = Scheduler(self.configured, self.store, self.client, self.jobs, self.now, monotonic)
        self.replies = ReplyHandler(self.scheduler, self.jobs, self.store, self.client, self.now, monotonic)
        self.kernel_events = KernelEventIntake(self.configured, self.store, listener, job_finder, self.now)
        self.failslow = FailslowProcess(self.configured, monotonic)
        gpu_events_lock = os.path.join(settings.runtime_dir, GPU_EVENTS_LOCK)
        setup = {"root": settings.root, "fake_nvml": settings.nvml.fake, "lock": gpu_events_lock}
        self.gpu_events = GpuEventProcess(settings.nvml.events, setup, self.boot_id, monotonic, self.now)
        self.before_resume = BeforeResume(
            self.command_line,
            partial(is_locked, os.path.join(settings.runtime_dir, VALIDATION_LOCK)),
            self.now,
            monotonic,
        )
        run_hooks = self.command_line(("hooks", "run"), state_dir=False)
        self.hooks = HookTrigger(settings, run_hooks, systemd.is_managed(), self.now, monotonic)
        self.replies.delivery.observers.append(self.hooks.take_written)
        self.evidence = EvidenceCollection(
            settings,
            self.command_line(("evidence", "collect")),
            self.record_flags(),
            systemd.is_managed(),
            lambda stage, fields: self.store.stream.emit([Event("evidence", {"stage": stage, **fields})]),
            self.now,
            monotonic,
        )
        repair_argv = self.command_line(("repair", "run"), state_dir=False)
        self.repair = NodeRepair(
            StepProgram(settings, repair_argv, systemd.is_managed(), self.now, monotonic),
            self.store,
            self.controller,
            self.scheduler,
            self.replies,
            self.client,
            self.gpu_events,
            self.boot_id,
            self.now,
        )
        self.hot_unplug = hot_unplug(settings.root, monotonic)
        self.control = ControlServer(os.path.join(settings.runtime_dir, SOCKET), self.answer, monotonic)
        self.publisher = Publisher(settings)

    # --- start

    def start(self) -> None:
        """Open all files, sockets and processes. `shut_down()` closes them in the reverse order.

        Raises OSError if the runtime directory cannot be used, or SystemExit if the daemon is stopped before its ledger
        is loaded.
        """
        settings, opened, client = self.settings, self.opened, self.client
        self.lock = lock(settings.runtime_dir)
        opened.callback(lambda: os.close(self.lock))
        remove_leftovers(settings.runtime_dir)
        # The prolog writes to this directory.
        os.makedirs(os.path.join(settings.runtime_dir, prolog_files.FOLDER), mode=0o755, exist_ok=True)
        self.wakeup = wake_on_signals()
        opened.callback(stop_waking_on_signals, self.wakeup)
        client.adopt_lost()
        opened.callback(client.close, STOP_SECONDS)
        self.load_ledger()
        self.repair.start()
        self.started = self.now()  # set only now, because reading the ledger's copy may take a long time
        self.last_turn_at = self.monotonic()
        opened.callback(self.publisher.close)
        opened.callback(self.controller.close)
        opened.callback(self.failslow.close)
        opened.callback(self.gpu_events.close)
        opened.callback(self.evidence.close)
        opened.callback(self.repair.program.close)
        self.hot_unplug.open()
        opened.callback(self.hot_unplug.close)
        self.kernel_events.listener.open(self.store.ledger.cursors.get(settings.kernel_log.source))
        opened.callback(self.kernel_events.listener.close)
        self.hooks.start()
        if not settings.hooks.programs:
            self.scheduler.queue.add_task(hooks_record(settings.state_dir))
        opened.callback(self.hooks.close)
        self.control.open()
        opened.callback(self.announce_stop)
        self.judge()
        self.publisher.snapshot = self.snapshot()
        self.preload()
        self.serve_metrics()
        checks = registry.count_summary(self.configured.checks, self.configured.loaded)
        log.info("healthd %s on %s: mode %s, %s", healthd.__version__, settings.node_name, settings.mode.value, checks)

    @property
    def settings(self) -> Settings:
        return self.configured.settings

    def load_ledger(self) -> None:
        """Load the ledger, and clear the conditions of checks that are no longer configured."""
        settings, store = self.settings, self.store
        last_alive = newest_mtime(
            settings.runtime_dir, (VERDICT_FILE, *NAMES)
        )  # because the verdict file is written in each round
        store.load(self.read_copy, self.boot_id, settings.mode, last_alive)
        store.stream.emit_checks(self.configured.versions(healthd.__version__))
        store.clear_unconfigured(self.configured.runs)
        store.set_conditions(absorb.reconfigured(store.conditions, self.configured.runs))

    def read_copy(self) -> dict[str, str | None]:
        """Return the ledger's copy. The worker reads the copy, with a deadline, because the disk may hang."""
        store, client = self.store, self.client
        reply = client.send(Request("state_dir", TASK_TIMEOUT_SECONDS, LoadCopy(self.settings.state_dir, NAMES)))
        while reply is None:
            poll([(self.wakeup, False), *client.waits()], client.deadline - self.monotonic())
            if set(signals(self.wakeup)) - {signal.SIGHUP}:
                log.info("stopped before the copy of the ledger in %s was read", self.settings.state_dir)
                raise SystemExit(0)
            reply = client.step()
        if reply.outcome is not Outcome.COMPLETED:
            log.error("the copy of the ledger in %s cannot be read: %s", self.settings.state_dir, reply.error)
            store.copy_unreadable = True
        copy = reply.answer if isinstance(reply.answer, CopyAnswer) else CopyAnswer()
        store.copied_at = copy.written_at
        return copy.texts

    # --- one turn of the loop

    def turn(self) -> None:
        self.wait()
        self.follow_clock()
        self.handle_signals()
        self.require_runtime_dir()
        self.read_jobs()
        self.read_inputs()
        received = self.replies.step()
        self.handle_received(received)
        self.pass_time()
        self.decide(received.round_ended)
        self.collect_evidence()
        self.publish(received.round_ended)
        self.notify_ready()

    # --- the only blocking wait

    def wait(self) -> None:
        """Sleep until a descriptor is ready, a deadline passes, or something is due."""
        ledger = self.store.ledger
        components = (
            *(self.kernel_events, self.hot_unplug, self.control, self.failslow, self.before_resume, self.hooks),
            *(self.evidence, self.repair, self.gpu_events),
        )
        ends = [self.store.next_ack_expiry]  # epoch seconds; the times below are monotonic
        ends += [ledger.pause.until] if ledger.pause else []
        ends += [events.flush_time(ledger.emitted), self.repair.next_moment]
        ends += [self.controller.refusal_ends_at] if self.publisher.verdict_word == "drain" else []
        moments = (
            self.scheduler.queue.deadline,
            self.controller.deadline,
            *(component.deadline for component in components),
            self.monotonic() + min(ends, default=FOREVER) - self.now(),
            self.last_turn_at + self.watchdog_seconds / 2,
            FOREVER if self.ready_sent else self.ready_by,
            self.renew_verdict_at if self.scheduler.queue.is_running else FOREVER,
        )
        worker_waits = list(self.client.waits())
        component_waits = [descriptor for component in components for descriptor in component.waits()]
        waits = [(self.wakeup, False), *worker_waits, *self.controller.waits(), *component_waits]
        ready = poll(waits, min(moments) - self.monotonic())
        component_deadline = min(component.deadline for component in components)
        woke_for_worker = bool(ready) and ready <= {descriptor for descriptor, _ in worker_waits}
        self.only_worker_woke = woke_for_worker and self.monotonic() < component_deadline
        systemd.watchdog()

    def now(self) -> float:
        """Return epoch seconds.

        A clock step takes effect only in `follow_clock()`. Within a turn, time follows the monotonic clock. Otherwise
        an hour's pause could end before the step is detected.
        """
        return self.monotonic() + self.clock_offset

    def follow_clock(self) -> None:
        """Detect a clock step since the last turn, and move the ledger's times before anything uses the new clock."""
        before = self.now()
        step = self.clock() - before
        self.clock_offset += step
        if abs(step) > CLOCK_STEP_SECONDS:
            log.warning("the clock was set by %+.1f s: moving the ledger's times with it", step)
            self.store.apply_clock_step(step, since=self.started, until=before)
            self.started += step

    def handle_signals(self) -> None:
        for number in signals(self.wakeup):
            if number == signal.SIGHUP:
                with suppress(commands.CommandRefused):  # the refusal is already logged, and a signal needs no answer
                    self.reload()
            else:
                self.stopping = True

    def require_runtime_dir(self) -> None:
        """Raise OSError if the runtime directory was removed. The verdict, the socket and the lock are then gone.

        Without this error, drains would continue, and a second daemon could start. systemd restarts healthd, and the
        ledger is saved in the new directory.
        """
        directory = self.settings.runtime_dir
        if self.only_worker_woke or is_current(self.lock, directory):
            return
        self.lock = lock(directory)
        self.store.save_all()
        raise OSError(f"{directory}, or the lock in it, was removed while healthd was running; restart healthd")

    # --- inputs: control socket, kernel lines, removed devices

    def read_inputs(self) -> None:
        if self.only_worker_woke:  # the worker wakes the daemon dozens of times per round
            return
        self.control.step()
        self.scheduler.run_after(self.kernel_events.read_log())
        self.read_gpu_events()
        request = self.kernel_events.journal_request()
        if request is not None and request != self.client.request:
            self.scheduler.queue.add_task(request)  # a second request would read and count the same lines twice
        with guard.dropping_errors(FAILSLOW):
            if self.failslow.step():
                self.scheduler.run_after(["failslow"])
        with guard.dropping_errors(HOOKS):
            self.hooks.step()
        removed: list[str] = []
        with guard.dropping_errors(HOT_UNPLUG):
            removed = self.hot_unplug.read()
        for pci in removed:
            log.warning("device %s was removed", pci or "(address unknown)")
            self.replies.inventory.renew_soon()
            self.scheduler.run_after(["pci_remove"])

    def read_gpu_events(self) -> None:
        """Handle NVML's events after the kernel log, so that the line about the same fault comes first."""
        with guard.dropping_errors(GPU_EVENTS):
            received = self.gpu_events.step(self.store.ledger.events)
            self.scheduler.run_after([*self.kernel_events.take_events(received.events), *received.triggers])

    def handle_received(self, received: Received) -> None:
        """Pass the worker's inventory and journal lines to the kernel event intake."""
        if received.inventory is not None:
            self.kernel_events.take_inventory(received.inventory)
        if received.journal is not None:
            self.scheduler.run_after(self.kernel_events.take_journal_reply(received.journal))
        if received.has_hooks_record:
            self.hooks.remove_record()

    # --- jobs on this node

    def read_jobs(self, job_ended: bool = False) -> None:
        """Read from Slurm's cgroups whether a job is on the node.

        This happens when a job ends, and then once a second while there is no job.
        """
        self.note_drained()
        was_empty = self.jobs.is_without_jobs
        if job_ended:
            self.jobs.read()
        else:
            self.jobs.step()
        if was_empty:
            self.replies.drop_unless_idle()

    def note_drained(self) -> None:
        """Record whether Slurm shows this node drained and idle. The result depends on the last verdict, and is valid
        only until Slurm's answer expires.
        """
        self.jobs.is_drained = self.controller.is_drained_and_idle(self.verdict)

    # --- expiry: windows, pauses, acks

    def pass_time(self) -> None:
        monotonic, now = self.monotonic(), self.now()
        seconds, self.last_turn_at = monotonic - self.last_turn_at, monotonic
        slurm = self.store.ledger.slurm
        self.store.count_quiet_time(
            seconds, under_load=not (slurm.reason or slurm.overriding_reason or slurm.adopted_reason)
        )
        pause = self.store.ledger.pause
        if pause and now >= pause.until:
            log.info("the pause has ended: %s", pause.why)
            commands.end_pause(self.store, now)
            self.scheduler.queue.run_all_now()
        self.store.end_expired_acks()
        self.store.stream.flush_after_job()

    # --- decide: conditions -> verdict -> decision -> Slurm

    def judge(self) -> None:
        """Compute a new verdict if one of its inputs has changed.

        `jobs.is_drained` is an input that depends on the previous verdict: `note_drained` sets it, at the start of a
        turn and after each reconciliation.
        """
        conditions = with_switch_side(self.store.conditions, rack_gpus(self.store.ledger.inventory))
        if conditions is not self.store.conditions:
            self.store.set_conditions(dict(conditions))
        ledger, replies = self.store.ledger, self.replies
        waiting_reason = self.repair.resume_wait or self.before_resume.waiting_reason
        expected, optional = self.scheduler.expected(), self.configured.not_needed_for_resume
        inputs = (ledger.conditions, ledger.trusted_since, expected, replies.changes, waiting_reason)
        if inputs != self.verdict_inputs:
            self.verdict_inputs = inputs
            self.verdict = verdict.judge(ledger.by_key(), replies.results, expected, ledger.trusted_since, optional)
            if waiting_reason:
                self.verdict = replace(self.verdict, may_resume=False, before_resume=waiting_reason)

    def decide(self, round_ended: bool) -> None:
        before = self.verdict.health
        self.judge()
        if self.verdict.health is not before:
            log.info("health: %s, was %s", self.verdict.health.value, before.value)
        decision = self.controller.decision
        self.after_reconciliation(self.controller.step(), decision)
        self.run_before_resume()
        self.repair.step(self.verdict)
        self.judge()
        decision = self.controller.decision
        self.after_reconciliation(self.controller.reconcile_if_due(self.verdict, round_ended), decision)

    def run_before_resume(self) -> None:
        """Run the checks' before_resume programs on the drained, idle node. The verdict has the reason for the delayed
        resume.
        """
        step = self.repair.step_to_validate
        if step and step != self.validated_step:
            self.before_resume.cancel()  # a validation from before the step proves nothing
        self.validated_step = step or self.validated_step
        programs = self.configured.after_repair if step else self.configured.before_resume
        if not programs and not self.before_resume.waiting_reason:
            return
        ledger, replies = self.store.ledger, self.replies
        before, drained = self.before_resume, bool(ledger.slurm.reason or ledger.slurm.pending_reason)
        if not drained and before.stage is Stage.BEFORE and not before.waiting_reason:
            return  # healthd has no drain in force now and had none at the last reconciliation
        other_conditions = {key: c for key, c in ledger.by_key().items() if c.run not in programs}
        results = {name: result for name, result in replies.results.items() if name not in programs}
        names = [name for name in self.scheduler.expected() if name not in programs]
        other_verdict = verdict.judge(
            other_conditions, results, names, ledger.trusted_since, self.configured.not_needed_for_resume
        )
        node = NodeView(
            is_drained=drained and self.controller.may_change(),
            is_idle=self.controller.is_drained_and_idle(self.verdict),
            has_other_causes=bool(other_verdict.causes),
            is_clean=other_verdict.may_resume and not self.repair.resume_wait,
            has_failed=has_drain_cause(ledger.conditions, programs, self.store.booted_at),
        )
        if ended := before.step(programs, node, replies.results):
            self.scheduler.queue.run_early(ended, self.monotonic())
        self.judge()

    def after_reconciliation(self, report: ReconcileReport | None, before: Decision) -> None:
        self.note_drained()
        if report is not None:
            self.repair.note_report(report)
            if report.node is not None:  # the node was just read; an older answer may miss current jobs
                self.replies.drop_unless_idle()
            self.judge()
            self.note_drained()
        if self.controller.decision != before:
            text = decision_text(self.controller.decision, self.controller.status.owner)
            fields = log_fields.decision_fields(self.controller.decision, self.verdict.causes)
            log.log(logging.WARNING if fields else logging.INFO, "decision: %s", text, extra=fields)
            self.store.stream.emit([events.decision(self.controller.decision, text)])

    # --- evidence

    def collect_evidence(self) -> None:
        """Begin or continue the case of the current drain. On a healthy node, there is nothing to do."""
        ledger = self.store.ledger
        known = {cause.text for cause in ledger.evidence.causes} if ledger.evidence else ()
        causes = with_drain_causes(self.verdict, known, ledger.slurm, ledger.paused_at).causes
        if ledger.evidence is None and not causes:
            return
        with guard.dropping_errors(EVIDENCE):
            slurm, node, decision = ledger.slurm, self.controller.status.node, self.controller.decision
            times = [cause.opened_at or cause.first_seen for cause in causes]
            names = ledger.emitted.conditions
            view = View(
                tuple(
                    Cause(
                        f"{c.code} {c.subject}".strip(),
                        names[str(c.key)].condition if str(c.key) in names else "",
                        c.shared_cause,
                    )
                    for c in causes
                ),
                max(min(times, default=self.now()), self.now() - FAULT_AGE_SECONDS),
                last_drain_reason(slurm) or (decision.reason if isinstance(decision, Drain) else ""),
                is_drained=bool(last_drain_reason(slurm)),
                is_idle=self.controller.is_drained_and_idle(self.verdict),
                is_in_use=node is not None and not is_idle(node),
            )
            cluster = self.store.stream.cluster
            case = self.evidence.step(ledger.evidence, view, self.settings, cluster, ledger.whole_gpus)
            self.store.change(evidence=case)

    def record_flags(self) -> tuple[str, ...]:
        """Return the flags with which `healthd record` inspects the same machine as the daemon."""
        settings, origins = self.settings, self.configured.loaded.origins
        values = {"--root": ("root", settings.root), "--fake-nvml": ("nvml.fake", settings.nvml.fake)}
        values |= {"--profile": ("profile", settings.profile), "--baseline": ("baseline_file", settings.baseline_file)}
        own = [word for flag, (name, value) in values.items() if origins.get(name) == flag for word in (flag, value)]
        return (*(("--config", self.settings_file) if os.path.isfile(self.settings_file) else ()), *own)

    # --- publish: the ledger, its copy and the stream, the verdict file, metrics, systemd

    def publish(self, round_ended: bool) -> None:
        if round_ended:
            self.emit_alive()
        ledger = self.store.ledger
        if self.store.unsaved or round_ended:
            self.store.save(round_ended=round_ended)
        drain = self.controller.must_refuse_jobs(self.verdict)
        quarantined = self.client.quarantined
        published = (
            self.verdict,
            self.controller.decision,
            self.controller.status,
            self.kernel_events.listener.status,
            quarantined,
        )
        if (
            self.publisher.has_changed(
                (*published, drain, ledger.pause, ledger.slurm, ledger.repair, self.settings.mode)
            )
            or round_ended
        ):
            self.publish_verdict(drain, round_ended)
        elif self.scheduler.queue.is_running and self.monotonic() >= self.renew_verdict_at:
            # If a round takes longer than the interval, the daemon is not hung, and the last verdict is still valid.
            self.publish_verdict(drain, round_ended=True)
        self.replies.add_tasks(round_ended)
        if round_ended:
            with guard.dropping_errors(HOOKS):
                self.hooks.end_round()
            self.scheduler.end_round()
            self.kernel_events.end_round()
            self.serve_metrics()
            self.ready_by = min(self.ready_by, self.monotonic() + READY_SECONDS)

    def serve_metrics(self) -> None:
        with guard.dropping_errors(METRICS):
            self.publisher.serve_metrics()

    def emit_alive(self) -> None:
        """Emit "alive" after the first round and then once a day.

        Readers of the stream can then distinguish "no failure" from "not observed".
        """
        if self.alive_sent and not events.is_alive_due(self.store.ledger.emitted, self.now()):
            return
        event_checks = self.configured.event_checks if self.kernel_events.listener.status.alive else ()
        log_only = {check.name for check, _ in event_checks if not check.has_run}
        self.store.stream.emit_alive(self.replies.completed() | log_only, force=True)
        self.alive_sent = True

    def publish_verdict(self, drain: bool, round_ended: bool) -> None:
        """Publish the verdict, which expires unless another verdict follows within three rounds."""
        until = self.now() + 3 * self.settings.interval_seconds
        if self.publisher.publish(self.snapshot(), drain, until, round_ended):
            self.renew_verdict_at = self.monotonic() + self.settings.interval_seconds
            self.write_textfile()

    def write_textfile(self) -> None:
        """Request that the worker write the textfile, because the disk with the collector's directory may hang."""
        path = self.settings.metrics.textfile
        if path:
            from healthd.agent.metrics.families import render

            with guard.dropping_errors(METRICS):
                page = render(self.snapshot())
                self.scheduler.queue.add_task(self.replies.textfile.request(path, page.decode()))

    def notify_ready(self) -> None:
        """Notify systemd at the first verdict or, if a drain is due, when the drain is in force. slurmd then starts."""
        if self.ready_sent or self.ready_by == FOREVER:
            return
        if self.controller.is_drain_undecided(self.verdict) and self.monotonic() < self.ready_by:
            return
        self.ready_sent = True
        systemd.ready(self.verdict.health.value)

    def preload(self) -> None:
        """Load modules and data that are needed later, because healthd's files may be removed or replaced while the
        daemon runs.
        """
        codes.load()
        compile_patterns()
        registry.remedies(self.configured.checks, ("gpu_xid/79",))  # this loads the separate module with the texts
        self.preload_repair()
        metrics = self.settings.metrics
        if metrics.textfile or metrics.listen != "off":
            from healthd.agent.metrics.families import render

            with guard.dropping_errors(METRICS):
                render(self.snapshot())

    def preload_repair(self) -> None:
        if self.settings.repair.mode is not RepairMode.OFF:
            from healthd.agent.reporting.repair import repair_json as repair_json

    def snapshot(self) -> Snapshot:
        ledger, replies, kernel_events, client = self.store.ledger, self.replies, self.kernel_events, self.client
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
            decision=self.controller.decision,
            slurm=self.controller.status,
            requeued=self.controller.requeued,
            kernel_log=kernel_events.listener.status,
            incidents=kernel_events.active_incidents(),
            sources=(*kernel_events.listener.sources, *self.hot_unplug.sources),
            round=self.scheduler.queue.status,
            inventory=ledger.inventory,
            pause=ledger.pause,
            repair=ledger.repair,
            repair_config=self.settings.repair,
            claim_hold=ledger.slurm.claim_hold,
            detection_pause=detection_pause.active_pause(self.settings.runtime_dir, self.now()),
            commands=dict(self.command_counts),
            # In mode observe, no drain is delayed. The ledger keeps the hold in case the mode changes back.
            fleet_hold=None if self.settings.mode is Mode.OBSERVE else ledger.slurm.hold,
            fleet_counted=self.settings.mode is Mode.OBSERVE or not ledger.slurm.count_failing_since,
            # A worse fault changes the Reason of healthd's drain, and thus the time in Slurm. Use the first time.
            drained_since=ledger.slurm.drained_at
            or (self.controller.status.node.reason_time if self.controller.status.node else 0.0),
            quarantined=client.quarantined,
            workers_started_total=client.started_total,
            workers_abandoned_total=client.abandoned_total,
            ledger_copy_failures_total=replies.ledger_copy.failures,
            stream=replies.delivery.status,
            config_reload_failures_total=self.reload_failures,
            config_last_reload_successful=not self.reload_problem,
            events_forgotten_total=kernel_events.events_forgotten,
            dropped=dict(guard.dropped),
            shortages=dict(shortage.counts),
            cleared=ledger.cleared[-20:],
            meanings=self.configured.meanings,
            remedies=registry.remedies(self.configured.checks, (c.code for c in self.verdict.conditions)),
            without_result=registry.without_result(self.configured.checks, self.configured.loaded),
            evidence=ledger.evidence,
            evidence_failures_total=self.evidence.failures,
            problems=self.problems(),
            hooks=self.hooks.results,
            hooks_problem=self.hooks.problem,
            processes={
                "daemon": (os.getpid(),),
                "worker": client.pids,
                "live": self.failslow.pids,
                "gpu_events": self.gpu_events.pids,
            },
        )

    def command_line(self, arguments: tuple[str, ...], state_dir: bool = True) -> tuple[str, ...]:
        """Return a healthd command line that uses the daemon's settings and directories."""
        folders = ["--runtime-dir", self.settings.runtime_dir]
        folders += ["--state-dir", self.settings.state_dir] if state_dir else []
        return (sys.executable, "-m", "healthd", *arguments, "--config", self.settings_file, *folders)

    def problems(self) -> tuple[Problem, ...]:
        """Return the problems with healthd itself. Problems that need an operator come first."""
        settings, publisher, replies, kernel = (
            self.settings,
            self.publisher,
            self.replies,
            self.kernel_events.listener.status,
        )
        stream, lost_count = replies.delivery.status, self.store.ledger.outbox.dropped
        runtime_dir, state_dir, file = settings.runtime_dir, settings.state_dir, shlex.quote(self.settings_file)
        runtime_dir_command, state_dir_command = (
            f"ls -ld {folder}; df -h {folder}" for folder in map(shlex.quote, (runtime_dir, state_dir))
        )
        reload = "systemctl reload healthd" if systemd.is_managed() else f"kill -HUP {os.getpid()}"
        found = (
            Problem(replies.files.problem, "systemctl restart healthd"),
            Problem(
                labelled("the settings were not reloaded", self.reload_problem),
                f"healthd config check {file} && {reload}",
            ),
            Problem(labelled("slurm", self.controller.status.problem), "scontrol ping"),
            Problem(
                f"{runtime_dir}: the ledger cannot be saved" if self.store.save_failed else "", runtime_dir_command
            ),
            Problem(publisher.verdict_problem, runtime_dir_command),
            Problem(labelled("before a resume", self.before_resume.problem), "healthd validate"),
            Problem(
                labelled(
                    f"{state_dir}: the ledger is not copied, and a reboot would lose it", replies.ledger_copy.problem
                ),
                state_dir_command,
            ),
            Problem(
                labelled(f"{state_dir}: {stream.waiting} events have not been written", stream.problem),
                state_dir_command,
            ),
            Problem(f"{lost_count} stream events were lost: too many are waiting for the disk" if lost_count else ""),
            Problem(
                f"kernel log: {kernel.problem}" if kernel.problem or not kernel.alive else "",
                command_for_kernel_log(kernel),
            ),
            Problem(self.failslow.problem, "journalctl -u healthd -n 50"),
            Problem(labelled("GPU events", self.gpu_events.problem), "journalctl -u healthd -n 50"),
            Problem(labelled("repair", self.repair.program.problem), REPAIR_COMMAND),
            Problem(labelled("evidence", self.evidence.problem(self.store.ledger.evidence)), EVIDENCE_COMMAND),
            *(Problem(sentence, "ss -ltnp") for sentence in publisher.metrics_problems),
            Problem(publisher.web_problem, f"healthd config check {file}"),
            Problem(replies.textfile.problem, "healthd doctor"),
            Problem(
                labelled("hooks do not run", self.hooks.problem),
                "systemctl reset-failed healthd-hooks; systemctl restart healthd-hooks.path; "
                "journalctl -u healthd-hooks -n 50"
                if systemd.is_managed()
                else "healthd hooks run",
            ),
            *(
                Problem(labelled(f"hook {name} failed", result.error), f"healthd hooks test {name}")
                for name, result in self.hooks.results.items()
            ),
            *(Problem(text, "systemctl status healthd; cat /proc/loadavg") for text in shortage.problems(self.now())),
            *(Problem(text, "journalctl -u healthd -p err -n 50") for text in guard.problems(self.now())),
        )
        return tuple(problem for problem in found if problem.sentence)

    # --- requests

    def answer(self, request: dict[str, Any], user: str, may_command: bool) -> dict[str, Any]:
        """Return the reply to a request on the control socket (agent/control/protocol.py). `user` looks like "root (uid
        0)"."""
        try:
            name = protocol.parse_command(request, user, may_command)
            if name == protocol.STATUS:
                return {"status": status_json(self.snapshot())}
            if name == protocol.PENDING_RUNS:
                requested_at = protocol.parse_requested_at(request)
                return {
                    "requested_at": requested_at,
                    "pending": self.replies.not_run_since(self.scheduler.runs_after_job(), requested_at),
                }
            if name == protocol.JOB_ENDED:
                return self.job_ended()
        except protocol.RequestRefused as refusal:
            return {"error": str(refusal)}
        try:
            done = self.run_command(name, request, user)
        except commands.CommandRefused as refusal:
            return {"error": printable(f"{name}: {refusal}")}
        log.warning("%s by %s: %s", name, user, done)
        return {"done": done}

    def job_ended(self) -> dict[str, Any]:
        """Run the checks that are due after an epilog reports a job's end.

        Return the runs that the epilog may wait for. If no job is left and nothing drains the node, also return the
        programs that the epilog must run.
        """
        requested_at = self.now()
        self.store.stream.emit_job_end()
        self.read_jobs(job_ended=True)
        runs = self.scheduler.runs_after_job()
        self.scheduler.queue.run_after_event(runs)
        pending = self.replies.not_run_since(runs, requested_at)
        message = f"these checks run now: {', '.join(pending)}" if pending else "all checks have just run"
        reply: dict[str, Any] = {"done": message, "requested_at": requested_at, "pending": pending}
        programs = self.configured.after_job if self.jobs.is_without_jobs and not self.verdict.causes else []
        if programs:
            reply["then"] = [{"argv": self.command_line(run.arguments), "seconds": run.seconds} for run in programs]
        return reply

    def run_command(self, command: str, request: Mapping[str, Any], user: str) -> str:
        """Run a command and return the result as text. Raises commands.CommandRefused."""
        if command == protocol.RELOAD:
            return self.reload()
        if command in commands.FAILSLOW_COMMANDS:
            done = commands.FAILSLOW_COMMANDS[command](self.settings.runtime_dir, request, user, self.now())
            self.command_counts[command] += 1
            self.scheduler.run_after(["failslow"])
            return done
        if command in ORDERS:
            done = ORDERS[command](self.store, user)
        else:
            done = commands.COMMANDS[command](self.store, request, user, self.now())
        self.command_counts[command] += 1
        self.store.save()
        self.scheduler.queue.run_after_command()
        return done

    def reload(self) -> str:
        """Read the settings and the site's checks again, after SIGHUP or `healthd reload`.

        If an error occurs, nothing changes, because everything is built before it is used.

        Raises commands.CommandRefused.
        """
        systemd.reloading()
        try:
            if changed := self.replies.files.changed():  # data files could be missing or belong to another version
                raise ConfigError(changed)
            loaded, checks = self.load_settings(self.settings.checks_dir)
            fixed = {name: getattr(self.settings, name) for name in FIXED_SETTINGS}
            waiting = [name for name in FIXED_SETTINGS if getattr(loaded.settings, name) != fixed[name]]
            settings = replace(loaded.settings, **fixed)
            configured = Configured(replace(loaded, settings=settings), checks)
            conditions = absorb.reconfigured(self.store.conditions, configured.runs)
        except BaseException as raised:  # a site's file may raise anything; no exception here may stop the daemon
            self.reload_failures += 1
            changed = self.replies.files.changed()  # if healthd's files changed during the reload, that is the cause
            error = ConfigError(changed) if changed else raised
            is_config_error = isinstance(error, ConfigError)
            self.reload_problem = str(error) if is_config_error else traceback.format_exception_only(error)[-1].strip()
            log.error("settings not reloaded: %s", self.reload_problem, exc_info=None if is_config_error else raised)
            systemd.ready(f"settings not reloaded: {self.reload_problem}")
            raise commands.CommandRefused(f"settings not reloaded: {self.reload_problem}") from None
        if waiting:
            log.warning("takes effect only after a restart: %s", ", ".join(waiting))
        self.reload_problem = ""
        self.configured = self.kernel_events.configured = configured
        self.controller.settings = self.publisher.settings = settings
        self.client.renew()  # the site's checks may have changed
        self.scheduler.reconfigure(configured)
        self.replies.drop_unconfigured()
        self.failslow.reconfigure(configured)
        self.preload_repair()
        self.hooks.reconfigure(settings)
        self.repair.program.reconfigure(settings)
        self.store.change_mode(settings.mode)
        self.store.set_conditions(conditions)
        self.store.stream.emit_checks(configured.versions(healthd.__version__))
        self.store.clear_unconfigured(configured.runs)
        done = f"settings reloaded: mode {settings.mode.value}, {len(configured.runs)} checks"
        log.info("%s", done)
        systemd.ready(self.verdict.health.value)
        return f"{done}; takes effect only after a restart: {', '.join(waiting)}" if waiting else done

    # --- stop

    def shut_down(self) -> None:
        """Stop within 5 seconds, even if something hangs. Never wait for anything that could hang."""
        self.opened.close()
        if self.store.is_loaded:
            log.info("stopped")

    def announce_stop(self) -> None:
        systemd.stopping()
        self.before_resume.cancel()
        with guard.dropping_errors(GPU_EVENTS):
            self.kernel_events.take_events(self.gpu_events.close(self.store.ledger.events))
        self.kernel_events.note_cursor()
        owns_directory = is_current(
            self.lock, self.settings.runtime_dir
        )  # if not, the files in the directory belong to another daemon
        if owns_directory:
            self.store.stream.emit_stopped("requested" if self.stopping else "internal error")
            self.store.save(round_ended=True)
            self.replies.finish(FINAL_WRITE_SECONDS)
        self.control.close(owns_directory)
