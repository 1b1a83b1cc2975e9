"""Driver for reconcile.reconcile. Each Command runs as a child process with its own deadline, and never blocks the
daemon.

A Slurm that hangs, is unreachable or refuses a command is never a fault of the node. The generator gets a
CommandResult, and the daemon retries later. Backoff and jitter keep ten thousand nodes from retrying in the same
second.
"""

from __future__ import annotations

import logging
import os
import random
from collections.abc import Callable, Generator, Iterator

from msgspec.structs import replace

from healthd.agent.settings.config import Settings
from healthd.agent.slurm.node_gpus import UNKNOWN_GPUS, NodeGpus
from healthd.agent.slurm.policy import Policy
from healthd.agent.slurm.reconcile import ReconcileReport, SaveRecord, reconcile
from healthd.common.guard import SLURM, describe_error, drop
from healthd.common.model import DrainRecord, SlurmStatus, Verdict
from healthd.common.slurm.commands import ENVIRONMENT, Command, CommandResult, printable_argument
from healthd.common.text import is_decimal
from healthd.host.child_process import Child

log = logging.getLogger("healthd.agent.slurm")

FIRST_RETRY_SECONDS = 5.0
MAX_RETRY_SECONDS = 300.0
# After a boot, slurmd may register late and Slurm may then remove healthd's drain. Until then healthd polls more often.
BOOT_SECONDS, BOOT_RETRY_SECONDS = 1800.0, 15.0
# slurmd registers within seconds after it starts.
REGISTRATION_SECONDS, REGISTRATION_RETRY_SECONDS = 15.0, 0.5
POLL_SECONDS = 1.0  # time between two searches for a new slurmd


class SlurmDriver:
    """Runs one reconciliation at a time.

    `save_record` stores the record before the generator continues. `may_change` is called before each command that
    changes something (except a command with `in_pause`), because the daemon may have been paused or its mode changed.
    `log_command` is called right before each change (with None as the result) and after it.
    """

    def __init__(
        self,
        settings: Settings,
        boot_id: str,
        save_record: Callable[[DrainRecord], None],
        may_change: Callable[[], bool],
        now: Callable[[], float],
        monotonic: Callable[[], float],
        refusals: Callable[[], tuple[float, ...]] = tuple,
        log_command: Callable[[Command, CommandResult | None], None] = lambda command, result: None,
    ) -> None:
        self._log_command = log_command
        self._refusals = refusals
        self._node_name = settings.node_name
        self._boot_id = boot_id
        self._save_record = save_record
        self._may_change = may_change
        self._record = DrainRecord()  # the record as last saved
        self._now = now
        self._monotonic = monotonic
        self._steps: Generator[Command | SaveRecord, CommandResult | None, ReconcileReport] | None = None
        self._command: Command | None = None
        self._child: Child | None = None
        self._failures = 0
        self._started = monotonic()
        self._registration_until = -float("inf")
        self.status = SlurmStatus()

    @property
    def is_busy(self) -> bool:
        return self._steps is not None or self._child is not None

    @property
    def deadline(self) -> float:
        return self._child.deadline if self._child else float("inf")

    def waits(self) -> Iterator[tuple[int, bool]]:
        return self._child.waits() if self._child else iter(())

    def start(
        self, verdict: Verdict, record: DrainRecord, policy: Policy, gpus: NodeGpus = UNKNOWN_GPUS
    ) -> ReconcileReport | None:
        """Start a reconciliation. If no command is needed, return the report at once."""
        self._record = record
        now, refusals = self._now, self._refusals
        self._steps = reconcile(verdict, record, policy, self._node_name, self._boot_id, now, gpus, refusals)
        return self._advance(None)

    def step(self) -> ReconcileReport | None:
        """Continue if a command has finished. Return the report once the reconciliation has ended."""
        if self._child is None or not self._child.step():
            return None
        child, self._child = self._child, None
        if self._steps is None:
            return None  # the reconciliation was abandoned
        out, err = child.output()
        seconds = self._monotonic() - child.started
        return self._advance(self._count(CommandResult(child.status, out, err, self._now() - seconds, seconds)))

    def retry_seconds(self, report: ReconcileReport) -> float:
        """Return the seconds until the next reconciliation, or infinity if the goal is reached.

        The delay doubles each time, with jitter.

        Drains that wait for the fleet limit or have ended have their own schedule.
        """
        if report.next_read_at:
            self._failures = 0
            return max(report.next_read_at - self._now(), 0.0)
        if report.settled:
            self._failures = 0
            return float("inf")
        if not report.problem and self._monotonic() < self._registration_until:
            return REGISTRATION_RETRY_SECONDS
        max_wait = BOOT_RETRY_SECONDS if self.awaits_slurmd(report) else MAX_RETRY_SECONDS
        wait = min(FIRST_RETRY_SECONDS * 2.0 ** min(self._failures, 10), max_wait)
        self._failures += 1
        return wait * random.uniform(0.8, 1.2)

    def awaits_slurmd(self, report: ReconcileReport) -> bool:
        """Return True if healthd has started recently and the node is not yet stable in Slurm."""
        is_recent = self._monotonic() < self._started + BOOT_SECONDS
        return is_recent and not report.settled and not report.problem and not report.next_read_at

    def expect_registration(self) -> None:
        """Poll more often, because slurmd has just started on this node."""
        self._registration_until = self._monotonic() + REGISTRATION_SECONDS

    def abandon(self) -> None:
        """Abandon the reconciliation. A running command finishes on its own, without effect on the daemon."""
        if self._steps is not None:
            self._steps.close()
            self._steps = None

    def close(self) -> None:
        """Stop, but do not interrupt a running scontrol. It finishes on its own, and the next start reads its
        result.
        """
        self.abandon()

    def _advance(self, result: CommandResult | None) -> ReconcileReport | None:
        assert self._steps is not None
        try:
            step = self._steps.send(result)
            while True:
                if isinstance(step, SaveRecord):
                    self._record = step.record
                    self._save_record(step.record)
                    step = self._steps.send(None)
                    continue
                if step.changes and not step.in_pause and not self._may_change():
                    self.abandon()
                    return None
                try:
                    if step.changes:
                        self._log_command(step, None)
                    self._run_command(step)
                    return None
                except OSError as error:
                    missing = CommandResult(127, b"", f"{step.argv[0]}: {error.strerror}", self._now(), 0.0)
                    step = self._steps.send(self._count(missing))
        except StopIteration as end:
            return self._finish(end.value)
        except Exception as error:  # caused by Slurm's output, which may be different next time
            drop(SLURM, error, result.text if result else "")
            problem = f"healthd cannot process Slurm's output: {describe_error(error)}"
            return self._finish(ReconcileReport(self._record, problem=problem))

    def _finish(self, report: ReconcileReport) -> ReconcileReport:
        self._steps = None
        self.status = replace(
            self.status,
            node=report.node or self.status.node,
            owner=report.owner.value if report.node else self.status.owner,
            read_at=self._now() if report.node else self.status.read_at,
            problem=report.problem,
        )
        return report

    def _run_command(self, command: Command) -> None:
        self._command = command
        if command.changes:
            log.info("running: %s", printable_argument(" ".join(command.argv)))
        deadline = self._monotonic() + command.deadline_seconds
        self._child = Child(command.argv, deadline, self._monotonic, ENVIRONMENT)

    def _count(self, result: CommandResult) -> CommandResult:
        assert self._command is not None
        name = " ".join(self._command.argv[:2]) if self._command.argv[0].endswith("scontrol") else self._command.argv[0]
        outcome = "timeout" if result.status is None else "ok" if result.status == 0 else "error"
        key = (name.rpartition("/")[2], outcome)
        commands = dict(self.status.commands)
        commands[key] = commands.get(key, 0) + 1
        self.status = replace(self.status, commands=commands)
        if self._command.changes:
            self._log_command(self._command, result)
        return result


class SlurmdStartDetector:
    """Detects a new slurmd on this node. A new slurmd registers within seconds, and slurmctld may then remove a drain.

    While enabled, each call inspects the processes that are new since the last call.
    """

    def __init__(self, root: str, monotonic: Callable[[], float]) -> None:
        self._proc = os.path.join(root, "proc")
        self._monotonic = monotonic
        self._previous_pids: set[str] = set()
        self.deadline = float("inf")

    def watch(self, enabled: bool) -> None:
        if not enabled:
            self.deadline = float("inf")
        elif self.deadline == float("inf"):
            self._previous_pids, self.deadline = self._processes(), self._monotonic() + POLL_SECONDS

    def step(self) -> bool:
        """Return True if a slurmd has started since the last call."""
        if self._monotonic() < self.deadline:
            return False
        previous, self._previous_pids = self._previous_pids, self._processes()
        self.deadline = self._monotonic() + POLL_SECONDS
        return any(self._name(pid) == "slurmd" for pid in self._previous_pids - previous)

    def _processes(self) -> set[str]:
        try:
            return {name for name in os.listdir(self._proc) if is_decimal(name)}
        except OSError:
            return set()

    def _name(self, pid: str) -> str:
        try:
            with open(os.path.join(self._proc, pid, "comm"), encoding="utf-8", errors="replace") as file:
                return file.read().strip()
        except OSError:
            return ""
