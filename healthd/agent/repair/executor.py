"""The program that takes repair steps: `healthd repair run`, which runs outside the daemon.

The daemon requests one step. Right before the step, this program tests all requirements again, because minutes may have
passed and a person may have changed the node's state. It records the step durably before it takes the step. If the
program is killed, or the machine loses power, the next run finds the record: it does not repeat the step, and starts
the services that were stopped for it.

    REFUSED      a requirement is not met; nothing was changed
    IMPOSSIBLE   the step cannot be taken here; nothing was changed
    TAKING       recorded; the step may have been taken
    others       recorded after the step

A reboot or a power cycle stays TAKING once it has been started: the daemon detects the new boot.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Mapping
from typing import TypeAlias

from msgspec.structs import replace

from healthd.agent.evidence.case import Process
from healthd.agent.evidence.stuck import alive
from healthd.agent.repair import reset_step, services
from healthd.agent.repair.journal import (
    JOURNAL_FILE,
    NAME,
    Entry,
    Journal,
    Outcome,
    Request,
    Stopped,
    identity_problem,
    is_interrupted,
    parse_request,
    survives_reboot,
    tried_within_day,
    with_entry,
    with_outcomes,
)
from healthd.agent.repair.journal_file import machine_identity, publish, read_copy, read_journal, write_journal
from healthd.agent.repair.node_reading import own_pids, read_node
from healthd.agent.repair.power_step import prepare_power_cycle
from healthd.agent.repair.reboot_step import prepare_reboot
from healthd.agent.repair.requirements import requirements
from healthd.agent.repair.reset_step import Smi, open_smi
from healthd.agent.repair.slurm_state import cluster_problem, own_problem
from healthd.agent.repair.step_result import PreparedStep, Run, StepResult, run_command, take_prepared
from healthd.agent.slurm import blocking
from healthd.common.model import RepairStep
from healthd.common.values import DecodeError
from healthd.host.host import Host
from healthd.host.lock import wait_until_free
from healthd.host.separate_program import OpenRequest, serve

log = logging.getLogger("healthd")

MAX_REQUEST_SECONDS = 900.0  # an older request may no longer match the node's state
Prepare: TypeAlias = Callable[[Request], PreparedStep | StepResult]
BOOTS: Mapping[RepairStep, Prepare] = {
    RepairStep.REBOOT: prepare_reboot,
    RepairStep.POWER_CYCLE: prepare_power_cycle,
}


def serve_requests(runtime_dir: str) -> None:
    """Serve the daemon's requests. If another executor runs, wait until it ends. Raises ownership.Untrusted or OSError.

    If this returned while a request is open, systemd would start the service again at once (PathExists=).
    """
    while not serve(runtime_dir, NAME, lambda request: _serve(runtime_dir, request)):
        wait_until_free(runtime_dir, f"{NAME}.lock")


def _serve(runtime_dir: str, open_request: OpenRequest) -> None:
    try:
        request = parse_request(open_request.text)
    except DecodeError as error:
        log.error("repair: the request cannot be read: %s", error)
        return
    os.environ.update(request.environment)
    Executor(request, runtime_dir, open_smi(runtime_dir), open_request.is_replaced).work()


class Executor:
    """Works on one request.

    is_replaced  returns True if the daemon has written another request in the meantime
    run          runs one of Slurm's commands
    """

    def __init__(
        self,
        request: Request,
        runtime_dir: str,
        smi: Smi,
        is_replaced: Callable[[], bool] = lambda: False,
        run: Run = blocking.run,
        now: Callable[[], float] = time.time,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._request, self._runtime_dir, self._smi = request, runtime_dir, smi
        self._is_replaced, self._run, self._now, self._sleep = is_replaced, run, now, sleep
        self._boot_id = Host(request.root).boot_id()
        self._machine = machine_identity(request.root)
        self._journal = Journal()
        self._started = time.monotonic()

    def work(self) -> None:
        """Work on the request. Raises ownership.Untrusted or OSError if the result cannot be published."""
        request, copy = self._request, read_copy(self._runtime_dir)
        found, problem = self._read_journal()
        if problem:
            self._journal = replace(copy, problem="") if copy is not None else Journal()
        elif found is not None:
            self._journal = with_outcomes(found, copy)
        else:
            known = replace(copy, problem="") if copy is not None else Journal()  # the file has been removed
            self._journal = replace(known, first_boot=self._boot_id, node=request.node, machine=self._machine)
        self._finish_earlier()
        if not problem and self._journal != found:
            try:
                write_journal(self._journal, request.state_dir)
            except OSError as error:
                problem = f"the journal cannot be written: {_text(error)}"
        if problem:
            self._publish_refusal(problem)
        elif not request.id or self._journal.find(request.id) is not None:
            publish(self._journal, self._runtime_dir)
        else:
            self._take()

    def _read_journal(self) -> tuple[Journal | None, str]:
        """Return the journal (None if there is none yet), and why it must not be used (or "")."""
        path = os.path.join(self._request.state_dir, JOURNAL_FILE)
        try:
            found = read_journal(self._request.state_dir)
        except (DecodeError, OSError) as error:
            return None, f"the journal in {self._request.state_dir} cannot be read: {_text(error)}"
        mine = found or Journal(node=self._request.node, machine=self._machine)
        problem = identity_problem(mine, self._request.node, self._machine)
        return found, f"{path}: {problem}" if problem else ""

    # --- what an earlier run has left behind

    def _finish_earlier(self) -> None:
        """End the record of a reset that was interrupted, and start what was stopped for a reset."""
        interrupted = [entry for entry in self._journal.entries if is_interrupted(entry)]
        hung = self._smi.end_earlier() if interrupted or self._journal.stopped is not None else ()
        for entry in interrupted:
            why = "the machine was booted" if entry.boot_id != self._boot_id else "healthd repair run was killed"
            ended = replace(entry, outcome=Outcome.UNKNOWN, problem=f"{why} during the reset")
            log.error("repair: %s: %s", ended.id, ended.problem)
            self._journal = with_entry(self._journal, ended)
        self._journal = replace(self._journal, stopped=self._started_again(hung))

    def _started_again(self, hung: tuple[Process, ...]) -> Stopped | None:
        """Start what was stopped for a reset, unless the reset hangs in the kernel. Return what is still stopped."""
        stopped = self._journal.stopped
        if stopped is None or stopped.boot_id != self._boot_id:  # the boot has started the services
            stopped = Stopped(self._boot_id)
        if left := tuple(dict.fromkeys(alive((*stopped.hung, *hung)))):
            log.error("repair: nvidia-smi hangs in the kernel, so the stopped services are not started yet")
            return replace(stopped, hung=left)
        services_left, problem = services.start(stopped.services)
        try:
            gpu_problem = self._smi.set_persistence(stopped.gpus, is_on=True)
        except OSError as error:
            gpu_problem = f"persistence mode could not be switched on: {_text(error)}"
        for text in filter(None, (problem, gpu_problem)):
            log.error("repair: %s", text)
        gpus_left = stopped.gpus if gpu_problem else ()
        after = Stopped(self._boot_id, services_left, gpus_left, tuple(alive(self._smi.stuck)))
        return after if after != Stopped(self._boot_id) else None

    # --- the step

    def _take(self) -> None:
        step = self._request.step
        if problem := self._problem():
            self._record(Outcome.REFUSED, problem)
        elif step is RepairStep.GPU_RESET:
            self._reset_gpus()
        elif step in BOOTS:
            self._boot(BOOTS[step](self._request))
        else:
            self._record(Outcome.IMPOSSIBLE, f"no program takes the step {step.value}")

    def _boot(self, prepared: PreparedStep | StepResult) -> None:
        if isinstance(prepared, StepResult):
            self._record(prepared.outcome or Outcome.REFUSED, prepared.problem)
        elif (entry := self._begin()) is not None:
            seconds = self._request.command_timeout_seconds
            self._end(entry, take_prepared(prepared, seconds, self._state_problem, run_command))

    def _reset_gpus(self) -> None:
        request, before = self._request, self._journal.stopped
        prepared = reset_step.prepare_reset(request, self._smi)
        if isinstance(prepared, StepResult):
            self._record(prepared.outcome or Outcome.REFUSED, prepared.problem)
            return
        left = before or Stopped(self._boot_id)  # services that could not be started after an earlier reset
        units = tuple(dict.fromkeys((*left.services, *prepared.services)))
        gpus = tuple(dict.fromkeys((*left.gpus, *prepared.persistent)))
        entry = self._begin(Stopped(self._boot_id, units, gpus) if units or gpus else None)
        if entry is None:
            return
        if problem := services.stop(prepared.services):
            self._end(entry, StepResult(Outcome.REFUSED, problem))
        else:
            self._end(entry, reset_step.take_reset(request, prepared, self._smi, self._state_problem, self._sleep))

    def _begin(self, stopped: Stopped | None = None) -> Entry | None:
        """Record that the step is being taken, and what will be stopped for it. Return None if that fails."""
        before, entry = self._journal, self._entry(Outcome.TAKING)
        try:
            self._write(entry, stopped or before.stopped)
        except OSError as error:
            self._journal = before
            self._publish_refusal(f"the journal cannot be written: {_text(error)}")
            return None
        log.info("repair: %s begins", entry.id)
        return entry

    def _end(self, entry: Entry, result: StepResult) -> None:
        """Start what was stopped, and record the outcome. A boot that is under way has no outcome yet."""
        if result.outcome is None:
            log.info("repair: %s is under way%s", entry.id, f": {result.problem}" if result.problem else "")
            return
        entry = replace(entry, outcome=result.outcome, problem=result.problem, proof=result.proof)
        stopped = self._started_again(self._smi.stuck) if entry.step is RepairStep.GPU_RESET else self._journal.stopped
        self._finish(entry, stopped)

    def _problem(self) -> str:
        """Return why the step must not be taken now, as one sentence, or ""."""
        request, now = self._request, self._now()
        if not self._boot_id or request.boot_id != self._boot_id:
            return "the request is from an earlier boot"
        if abs(now - request.requested_at) > MAX_REQUEST_SECONDS:
            return f"the request is not from the last {MAX_REQUEST_SECONDS / 60:.0f} minutes"
        if not survives_reboot(self._journal, self._boot_id):
            return f"not known yet whether {request.state_dir} survives a reboot"
        if not request.is_ordered and tried_within_day(self._journal, request.step, request.causes, now):
            return "the step was taken for this cause in the last 24 hours"
        if os.geteuid() != 0:
            return "healthd repair run does not run as root"
        return self._state_problem()

    def _state_problem(self) -> str:
        """Return why the current state of Slurm or of this node does not allow the step, or "".

        The answers that become outdated fastest are read last, because each query takes time and an operator may act.
        """
        if problem := cluster_problem(self._request, self._run) or self._node_problem():
            return problem
        if problem := own_problem(self._request, self._run):
            return problem
        return "healthd has withdrawn the request" if self._is_replaced() else ""

    def _node_problem(self) -> str:
        request = self._request
        stopped = self._journal.stopped
        stuck = (*request.stuck, *(stopped.hung if stopped is not None else ()))
        if request.step is RepairStep.GPU_RESET and (hung := alive(stuck)):
            return f"process {hung[0].pid} hangs in the kernel, so a reset may hang too"
        reading = read_node(request.root)
        own = own_pids(reading, request.step, stuck, os.getppid())
        is_reset = request.step is RepairStep.GPU_RESET
        for requirement in requirements(reading, request.settings.stop_services, own, is_reset):
            if not requirement.met:
                why = requirement.problem or "unknown"
                return f"requirement not met: {requirement.text} ({why})"
        return ""

    # --- the record

    def _entry(self, outcome: Outcome, problem: str = "") -> Entry:
        request = self._request
        return Entry(
            request.id,
            request.step,
            self._now(),
            self._boot_id,
            outcome,
            request.causes,
            request.parts,
            problem=problem,
        )

    def _record(self, outcome: Outcome, problem: str) -> None:
        self._finish(self._entry(outcome, problem), self._journal.stopped)

    def _finish(self, entry: Entry, stopped: Stopped | None) -> None:
        """Record the outcome and publish it. If the disk is full, the daemon still receives the outcome.

        In that case, the next run finds the outcome in the daemon's copy, and records it.
        """
        entry = replace(entry, seconds=round(time.monotonic() - self._started, 3))
        level = logging.INFO if entry.outcome is Outcome.DONE else logging.WARNING
        log.log(level, "repair: %s: %s: %s", entry.id, entry.outcome.value, entry.problem or entry.proof)
        try:
            self._write(entry, stopped)
        except OSError as error:
            problem = f"the journal cannot be written: {_text(error)}"
            log.error("repair: %s", problem)
            publish(replace(self._journal, problem=problem), self._runtime_dir)

    def _write(self, entry: Entry, stopped: Stopped | None) -> None:
        self._journal = replace(with_entry(self._journal, entry), stopped=stopped)
        write_journal(self._journal, self._request.state_dir)
        publish(self._journal, self._runtime_dir)

    def _publish_refusal(self, problem: str) -> None:
        """Publish the journal with this problem, so that the daemon requests no step.

        A step that an earlier run has recorded is not refused, because it may have been taken.
        """
        log.error("repair: %s", problem)
        journal = self._journal
        if self._request.id and journal.find(self._request.id) is None:
            journal = with_entry(journal, self._entry(Outcome.REFUSED, problem))
        publish(replace(journal, problem=problem), self._runtime_dir)


def _text(error: Exception) -> str:
    return (error.strerror if isinstance(error, OSError) else None) or str(error)
