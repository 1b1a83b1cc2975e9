"""The daemon, top to bottom:

    fault on the node -> finding -> condition -> decision -> Slurm drains (and requeues) -> repaired -> Slurm resumes

One process that sleeps in one wait. Each part of it does one thing:

    work/hearing.py    the ears: kernel events become conditions
    work/looking.py    the eyes: what is due, and what the worker says of it
    slurm/hand.py      the hand on Slurm
    say/publisher.py   what is shown
    judge/memory.py    what it believes, the ledger: a value that is replaced

The worker (work/) and child processes (slurm/driver.py) do what can block; this process only reads their answers. Pure
functions compute what follows from them (judge/intake.py, judge/verdict.py, slurm/policy.py).
"""

from __future__ import annotations

import dataclasses
import logging
import os
import signal
import time
import traceback
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import healthd
from healthd import guard
from healthd.config import ConfigError, Loaded, Settings
from healthd.guard import HOT_UNPLUG, METRICS
from healthd.host import Host
from healthd.judge import absorb, verdict
from healthd.judge.memory import NAMES, Memory
from healthd.kernel.listener import Listener
from healthd.machine.files import remove_leftovers
from healthd.machine.hot_unplug import hot_unplug
from healthd.machine.lock import holds, lock
from healthd.machine.wakeup import FOREVER, poll, signals, wake_on_signals
from healthd.model import Decision, Health, Mode, Outcome, Verdict
from healthd.say import commands, service
from healthd.say.control_server import ControlServer
from healthd.say.publisher import Publisher
from healthd.say.status import SOCKET, Snapshot, decision_words, status_json
from healthd.settings.configured import Configured
from healthd.settings.registry import Check
from healthd.slurm.hand import Hand
from healthd.slurm.job_at_source import JobAtSource
from healthd.slurm.look import ReconcileReport
from healthd.work.hearing import Hearing
from healthd.work.looking import Looking
from healthd.work.results import CLOCK_STEP_SECONDS
from healthd.work.rounds import TASK_SECONDS
from healthd.work.runner import Request, Runner
from healthd.work.worker import Setup

log = logging.getLogger("healthd")

STOP_SECONDS = 2.0  # how long an idle worker may take to end; a busy one is left to end by itself
READY_SECONDS = 60.0  # how long slurmd's start waits for a drain that is due at our start

# Reads the settings and finds the checks. A directory is where to find the site's checks instead.
LoadSettings = Callable[[str | None], tuple[Loaded, dict[str, Check]]]

# A reload leaves these as they were: a change takes effect at the next start.
FIXED_SETTINGS = (
    *("root", "state_dir", "runtime_dir", "checks_dir", "node_name", "nvml", "kernel_log", "metrics"),
    "round_timeout_seconds",
)


def run(load_settings: LoadSettings) -> int:
    """`healthd run`, until SIGTERM. Raises ConfigError, and OSError if it cannot get its runtime directory."""
    service.set_up_logging()
    daemon = Daemon(load_settings)
    try:
        while not daemon.stopping:
            daemon.wait()
            daemon.must_hold_its_directory()
            daemon.listen()
            daemon.looking.look()
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
        self.configured = Configured(*load_settings(None))
        settings = self.settings
        self.now, self.monotonic = time.time, time.monotonic
        self.boot_id = Host(settings.root).boot_id()
        os.makedirs(settings.runtime_dir, mode=0o755, exist_ok=True)
        self.lock = lock(settings.runtime_dir)
        remove_leftovers(settings.runtime_dir)
        self.wakeup = wake_on_signals()
        self.watchdog_seconds = service.watchdog_seconds() or FOREVER
        self.stopping = self.said_ready = self.only_worker_woke = False
        self.ready_by = FOREVER
        self.commanded: Counter[str] = Counter()
        self.reload_failures, self.reload_trouble = 0, ""
        self.judged: tuple[object, ...] = ()
        self.verdict = Verdict(Health.UNKNOWN)

        runner = Runner(
            Setup(settings.root, settings.nvml.fake, settings.checks_dir),
            settings.runtime_dir,
            self.monotonic,
            self.now,
        )
        self.memory = self.recalled(runner)
        self.started = self.now()  # once the copy was read, which may take its time
        self.ticked = self.monotonic()
        self.clock_offset = self.now() - self.monotonic()
        kernel = Listener(
            settings.kernel_log.source,
            settings.root,
            self.boot_id,
            self.memory.ledger.cursors.get(settings.kernel_log.source),
            settings.kernel_log.accept_injected,
            self.now,
            self.monotonic,
        )
        job_at_source = JobAtSource(
            settings.root, settings.node_name, lambda: self.settings.mode is not Mode.OBSERVE, self.monotonic
        )
        self.hand = Hand(settings, self.memory, self.boot_id, self.now, self.monotonic)
        self.looking = Looking(
            self.configured,
            self.memory,
            runner,
            lambda: self.hand.shows_drained(self.verdict),
            lambda reply: self.hearing.hear_from_journal(reply),
            self.now,
            self.monotonic,
        )
        self.hearing = Hearing(
            self.configured,
            self.memory,
            kernel,
            job_at_source,
            lambda kind: self.looking.look_after(kind),
            self.now,
        )
        self.hot_unplug = hot_unplug(settings.root)
        self.control = ControlServer(os.path.join(settings.runtime_dir, SOCKET), self.answer, self.monotonic)
        self.publisher = Publisher(settings)
        self.judge()
        self.publisher.shown = self.snapshot()
        self.publisher.serve_metrics()
        log.info(
            "healthd %s on %s: mode %s, %d checks",
            healthd.__version__,
            settings.node_name,
            settings.mode.value,
            len(self.configured.runs),
        )

    @property
    def settings(self) -> Settings:
        return self.configured.settings

    def recalled(self, runner: Runner) -> Memory:
        """The ledger as it was, without the conditions of checks that are no longer configured."""
        memory = Memory(self.settings.runtime_dir, self.now)
        memory.recall(lambda: self.read_copy(runner, memory), self.boot_id, self.settings.mode)
        memory.keep_only(self.configured.runs)
        memory.set_conditions(absorb.reconfigured(memory.conditions, self.configured.runs))
        return memory

    def read_copy(self, runner: Runner, memory: Memory) -> dict[str, str | None]:
        """The ledger's copy. The worker reads it, since that disk may hang; its deadline bounds this wait."""
        table = {"op": "load_copy", "from": self.settings.state_dir, "names": list(NAMES)}
        reply = runner.send(Request("state_dir", TASK_SECONDS, table))
        while reply is None:
            poll([(self.wakeup, False), *runner.waits()], runner.deadline - self.monotonic())
            if set(signals(self.wakeup)) - {signal.SIGHUP}:
                # Nothing is saved: the next start would take a new live ledger before the copy.
                log.info("stopped before the copy of the ledger in %s was read", self.settings.state_dir)
                raise SystemExit(0)
            reply = runner.step()
        if reply.outcome is not Outcome.COMPLETED:
            log.error("the copy of the ledger in %s cannot be read: %s", self.settings.state_dir, reply.error)
            memory.copy_unread = True
        texts: dict[str, str | None] = reply.table.get("texts", {})
        return texts

    # --- the one wait

    def wait(self) -> None:
        """Sleep until something can be read, a deadline passes, or something is due."""
        known, worker = self.memory.ledger, self.looking.runner
        others = (self.hearing, self.hot_unplug, self.control)
        ends = [c.ack.until for c in known.conditions if c.ack]  # epoch seconds; the moments below are monotonic
        ends += [known.pause.until] if known.pause else []
        ends += [self.hand.held_from] if self.publisher.verdict_word == "drain" else []
        moments = (
            self.looking.rounds.deadline,
            self.hand.deadline,
            *(other.deadline for other in others),
            self.monotonic() + min(ends, default=FOREVER) - self.now(),
            self.ticked + self.watchdog_seconds / 2,
            FOREVER if self.said_ready else self.ready_by,
        )
        of_worker = list(worker.waits())
        of_others = [descriptor for other in others for descriptor in other.waits()]
        waits = [(self.wakeup, False), *of_worker, *self.hand.waits(), *of_others]
        ready = poll(waits, min(moments) - self.monotonic())
        others_wait_until = min(other.deadline for other in others)
        woke_for_worker = bool(ready) and ready <= {descriptor for descriptor, _ in of_worker}
        self.only_worker_woke = woke_for_worker and self.monotonic() < others_wait_until
        service.watchdog()
        for number in signals(self.wakeup):
            if number == signal.SIGHUP:
                self.reload()
            else:
                self.stopping = True

    def must_hold_its_directory(self) -> None:
        """Raises OSError if the runtime directory was removed, and the verdict, the socket and the lock with it: drains
        would go on, and a second daemon could start. The ledger is saved there again; systemd starts us anew."""
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
        self.hearing.listen()
        request = self.hearing.journal_request()
        if request is not None and request != self.looking.runner.request:
            self.looking.rounds.task(request)  # else the same lines would be read, and counted, twice
        removed: list[str] = []
        with guard.at(HOT_UNPLUG):
            removed = self.hot_unplug.read()
        for pci in removed:
            log.warning("device %s was removed", pci or "(which one was not heard)")
            self.looking.renew_inventory_soon()
            self.looking.look_after("pci_remove")

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
            self.looking.rounds.look_now()
        self.memory.end_acks()

    # --- decide: conditions -> verdict -> decision -> Slurm

    def judge(self) -> None:
        """Make the verdict anew if something changed that it rests on. Called after every check."""
        known, looking = self.memory.ledger, self.looking
        rests_on = (known.conditions, known.trusted_since, looking.scheduled(), looking.turns)
        if rests_on != self.judged:
            self.judged = rests_on
            names, configured = looking.judged_by(), self.configured
            optional = {name for name in names if not configured.check(name).holds_resume(configured.runs[name])}
            self.verdict = verdict.judge(known.by_key(), looking.results, names, known.trusted_since, optional)

    def decide(self) -> None:
        before = self.verdict.health
        self.judge()
        if self.verdict.health is not before:
            log.info("health: %s, was %s", self.verdict.health.value, before.value)
        decision = self.hand.decision
        self.slurm_was_looked_at(self.hand.step(), decision)
        decision = self.hand.decision
        self.slurm_was_looked_at(self.hand.look(self.verdict, self.looking.rounds.ended), decision)

    def slurm_was_looked_at(self, report: ReconcileReport | None, before: Decision) -> None:
        if report is not None:
            if report.node is not None:  # read in this look: an older word of Slurm says nothing of jobs now
                self.looking.forget_unless_idle()
            self.judge()
        if self.hand.decision != before:
            log.info("decision: %s", decision_words(self.hand.decision, self.hand.status.owner))

    # --- publish: the ledger and its copy, the verdict file, metrics, systemd

    def publish(self) -> None:
        round_ended, known = self.looking.rounds.ended, self.memory.ledger
        if self.memory.unsaved or round_ended:
            self.memory.save()
        drain = self.hand.keeps_jobs_out(self.verdict)
        quarantined = self.looking.runner.quarantined
        shown = (self.verdict, self.hand.decision, self.hand.status, self.hearing.kernel.status, quarantined)
        if self.publisher.has_news((*shown, drain, known.pause, known.slurm, self.settings.mode)) or round_ended:
            until = self.now() + 3 * self.settings.interval_seconds
            if self.publisher.publish(self.snapshot(), drain, until, round_ended):
                self.write_textfile()
        if round_ended:
            self.looking.round_is_over()
            self.hearing.round_is_over()
            self.looking.copy_ledger()
            self.publisher.serve_metrics()
            self.ready_by = min(self.ready_by, self.monotonic() + READY_SECONDS)

    def write_textfile(self) -> None:
        """The worker writes it: the collector's directory is on a disk, which may hang."""
        path = self.settings.metrics.textfile
        if path:
            from healthd.say.metrics import render

            with guard.at(METRICS):
                table = {"op": "write_file", "path": path, "text": render(self.snapshot()).decode()}
                self.looking.rounds.task(Request("textfile", TASK_SECONDS, table))

    def say_ready(self) -> None:
        """At the first verdict; if that drains, once the drain stands: then slurmd is started and takes jobs."""
        if self.said_ready or self.ready_by == FOREVER:
            return
        if self.hand.must_be_waited_for(self.verdict) and self.monotonic() < self.ready_by:
            return
        self.said_ready = True
        service.ready(self.verdict.health.value)

    def snapshot(self) -> Snapshot:
        known, looking, hearing, runner = self.memory.ledger, self.looking, self.hearing, self.looking.runner
        return Snapshot(
            version=healthd.__version__,
            node_name=self.settings.node_name,
            mode=self.settings.mode.value,
            started=self.started,
            now=self.now(),
            interval_seconds=self.settings.interval_seconds,
            verdict=self.verdict,
            results=tuple(looking.results[name] for name in sorted(looking.results)),
            outcomes=dict(looking.outcomes),
            decision=self.hand.decision,
            slurm=self.hand.status,
            kernel_log=hearing.kernel.status,
            incidents=hearing.standing_incidents(),
            sources=(*hearing.kernel.sources, *self.hot_unplug.sources),
            round=looking.rounds.status,
            inventory=known.inventory,
            pause=known.pause,
            commands=dict(self.commanded),
            # In mode observe no drain waits; the ledger keeps the hold for a change back to another mode.
            fleet_hold=None if self.settings.mode is Mode.OBSERVE else known.slurm.hold,
            quarantined=runner.quarantined,
            workers_started_total=runner.started_total,
            workers_abandoned_total=runner.abandoned_total,
            ledger_copy_failures_total=looking.copy_failures,
            config_reload_failures_total=self.reload_failures,
            events_forgotten_total=hearing.events_forgotten,
            dropped=dict(guard.dropped),
            cleared=known.cleared[-20:],
            troubles=self.troubles(),
            processes={"daemon": (os.getpid(),), "worker": runner.pids},
        )

    def troubles(self) -> tuple[str, ...]:
        """What is wrong with healthd itself, one sentence each."""
        kernel_log, slurm = self.hearing.kernel.status, self.hand.status
        found = (
            self.publisher.metrics_trouble,
            f"{self.settings.runtime_dir}: the ledger cannot be saved" if self.memory.save_failed else "",
            f"kernel log: {kernel_log.trouble}" if not kernel_log.alive else "",
            f"slurm: {slurm.trouble}" if slurm.trouble else "",
            f"the settings were not read again: {self.reload_trouble}" if self.reload_trouble else "",
            *guard.troubles(self.now()),
        )
        return tuple(sentence for sentence in found if sentence)

    # --- what people say

    def answer(self, request: dict[str, Any], who: str, may_command: bool) -> dict[str, Any]:
        """The reply to one request on the control socket (the protocol is in say/status.py)."""
        return commands.answer(
            request,
            who,
            may_command,
            status=lambda: status_json(self.snapshot()),
            looks_left=self.looking.looks_left,
            job_ended=self.looking.job_ended,
            carry_out=self.carry_out,
        )

    def carry_out(self, command: str, request: Mapping[str, Any], who: str) -> str:
        """What was done, in words. Raises commands.CommandRefused."""
        done = commands.COMMANDS[command](self.memory, request, who, self.now())
        self.commanded[command] += 1
        self.memory.save()
        self.looking.rounds.look_now()
        return done

    def reload(self) -> None:
        """SIGHUP: read the settings and the site's checks again. An error changes nothing: all is made before any of it
        is used."""
        service.reloading()
        try:
            loaded, checks = self.load_settings(self.settings.checks_dir)
            kept = {name: getattr(self.settings, name) for name in FIXED_SETTINGS}
            waiting = [name for name in FIXED_SETTINGS if getattr(loaded.settings, name) != kept[name]]
            settings = dataclasses.replace(loaded.settings, **kept)
            configured = Configured(dataclasses.replace(loaded, settings=settings), checks)
            conditions = absorb.reconfigured(self.memory.conditions, configured.runs)
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
        self.configured = self.hearing.configured = configured
        self.hand.settings = self.publisher.settings = settings
        self.looking.reconfigure(configured)
        self.memory.change_mode(settings.mode)
        self.memory.set_conditions(conditions)
        self.memory.keep_only(configured.runs)
        log.info("settings read again: mode %s, %d checks", settings.mode.value, len(configured.runs))
        service.ready(self.verdict.health.value)

    # --- stop

    def shut_down(self) -> None:
        """Stop within 5 seconds, whatever hangs: we wait for nothing that could be stuck."""
        service.stopping()
        self.hearing.note_cursor()
        if holds(self.lock, self.settings.runtime_dir):  # else the files there belong to another daemon
            self.memory.save()
            self.control.close()
        self.hearing.kernel.close()
        self.hand.close()
        self.publisher.close()
        self.looking.runner.close(STOP_SECONDS)
        log.info("stopped")
