"""Drives reconcile.reconcile beside everything else: each Command is a child process of its own, with its own deadline.

A Slurm that hangs, is away or refuses is never the node's fault: the generator gets a CommandResult, and the daemon
looks again later, with backoff and jitter so that ten thousand nodes do not come back in the same second.
"""

from __future__ import annotations

import logging
import os
import random
from collections.abc import Callable, Generator, Iterator

from msgspec.structs import replace

from healthd.agent.settings.config import Settings
from healthd.agent.slurm.node_gpus import NOT_TOLD, NodeGpus
from healthd.agent.slurm.policy import Policy
from healthd.agent.slurm.reconcile import ReconcileReport, Remember, reconcile
from healthd.common.guard import SLURM, drop, words
from healthd.common.model import SlurmMemory, SlurmStatus, Verdict
from healthd.common.slurm.commands import ENVIRONMENT, Command, CommandResult, shown
from healthd.common.text import is_decimal
from healthd.host.child_process import Child

log = logging.getLogger("healthd.agent.slurm")

FIRST_RETRY_SECONDS = 5.0
LAST_RETRY_SECONDS = 300.0
# After a boot slurmd may register late, and Slurm may then take our drain away: until then we look more often.
BOOT_SECONDS, BOOT_RETRY_SECONDS = 1800.0, 15.0
# slurmd registers within seconds of its start.
REGISTRATION_SECONDS, REGISTRATION_RETRY_SECONDS = 15.0, 0.5
LOOK_SECONDS = 1.0  # between two looks for a slurmd that has started


class SlurmDriver:
    """One look at Slurm at a time. `remember` writes the memory down before the generator goes on; `may_change` is
    asked before each command that changes something: a pause or another mode may have come meanwhile. `tell` is told
    of each of these, right before it begins (None) and how it ended.
    """

    def __init__(
        self,
        settings: Settings,
        boot_id: str,
        remember: Callable[[SlurmMemory], None],
        may_change: Callable[[], bool],
        now: Callable[[], float],
        monotonic: Callable[[], float],
        refusals: Callable[[], tuple[float, ...]] = tuple,
        tell: Callable[[Command, CommandResult | None], None] = lambda command, result: None,
    ) -> None:
        self._tell = tell
        self._refusals = refusals
        self._node_name = settings.node_name
        self._boot_id = boot_id
        self._remember = remember
        self._may_change = may_change
        self._memory = SlurmMemory()  # as it was last remembered
        self._now = now
        self._monotonic = monotonic
        self._steps: Generator[Command | Remember, CommandResult | None, ReconcileReport] | None = None
        self._command: Command | None = None
        self._child: Child | None = None
        self._failures = 0
        self._started = monotonic()
        self._registers_until = -float("inf")
        self.status = SlurmStatus()

    @property
    def busy(self) -> bool:
        return self._steps is not None or self._child is not None

    @property
    def deadline(self) -> float:
        return self._child.deadline if self._child else float("inf")

    def waits(self) -> Iterator[tuple[int, bool]]:
        return self._child.waits() if self._child else iter(())

    def begin(
        self, verdict: Verdict, memory: SlurmMemory, policy: Policy, gpus: NodeGpus = NOT_TOLD
    ) -> ReconcileReport | None:
        """Look, decide, act. Returns the report at once if no command was needed."""
        self._memory = memory
        now, refusals = self._now, self._refusals
        self._steps = reconcile(verdict, memory, policy, self._node_name, self._boot_id, now, gpus, refusals)
        return self._go_on(None)

    def step(self) -> ReconcileReport | None:
        """Go on if a command ended. Returns the report when the look is over."""
        if self._child is None or not self._child.step():
            return None
        child, self._child = self._child, None
        if self._steps is None:
            return None  # the look was dropped
        out, err = child.output()
        seconds = self._monotonic() - child.started
        return self._go_on(self._counted(CommandResult(child.status, out, err, self._now() - seconds, seconds)))

    def retry_seconds(self, report: ReconcileReport) -> float:
        """In how many seconds to look again: doubling, jittered; infinity if all is as we want it. A drain that waits
        for the fleet, and one that is over, have their own time."""
        if report.look_at:
            self._failures = 0
            return max(report.look_at - self._now(), 0.0)
        if report.settled:
            self._failures = 0
            return float("inf")
        if not report.problem and self._monotonic() < self._registers_until:
            return REGISTRATION_RETRY_SECONDS
        longest = BOOT_RETRY_SECONDS if self.waits_for_slurmd(report) else LAST_RETRY_SECONDS
        wait = min(FIRST_RETRY_SECONDS * 2.0 ** min(self._failures, 10), longest)
        self._failures += 1
        return wait * random.uniform(0.8, 1.2)

    def waits_for_slurmd(self, report: ReconcileReport) -> bool:
        """Whether the node is not yet steady in Slurm, shortly after healthd's start."""
        boots = self._monotonic() < self._started + BOOT_SECONDS
        return boots and not report.settled and not report.problem and not report.look_at

    def expect_registration(self) -> None:
        """slurmd was just started here."""
        self._registers_until = self._monotonic() + REGISTRATION_SECONDS

    def drop(self) -> None:
        """End the look here. A running command is left to end, and nothing follows from it."""
        if self._steps is not None:
            self._steps.close()
            self._steps = None

    def close(self) -> None:
        """Leave a running scontrol alone: it ends by itself, and the next start reads what it did."""
        self.drop()

    def _go_on(self, result: CommandResult | None) -> ReconcileReport | None:
        assert self._steps is not None
        try:
            step = self._steps.send(result)
            while True:
                if isinstance(step, Remember):
                    self._memory = step.memory
                    self._remember(step.memory)
                    step = self._steps.send(None)
                    continue
                if step.changes and not self._may_change():
                    self.drop()
                    return None
                try:
                    if step.changes:
                        self._tell(step, None)
                    self._start(step)
                    return None
                except OSError as error:
                    missing = CommandResult(127, b"", f"{step.argv[0]}: {error.strerror}", self._now(), 0.0)
                    step = self._steps.send(self._counted(missing))
        except StopIteration as end:
            return self._ended(end.value)
        except Exception as error:  # over what Slurm said: at a later look it may say something else
            drop(SLURM, error, result.text if result else "")
            problem = f"healthd makes a mistake with what Slurm says: {words(error)}"
            return self._ended(ReconcileReport(self._memory, problem=problem))

    def _ended(self, report: ReconcileReport) -> ReconcileReport:
        self._steps = None
        self.status = replace(
            self.status,
            node=report.node or self.status.node,
            owner=report.owner.value if report.node else self.status.owner,
            read_at=self._now() if report.node else self.status.read_at,
            problem=report.problem,
        )
        return report

    def _start(self, command: Command) -> None:
        self._command = command
        if command.changes:
            log.info("running: %s", shown(" ".join(command.argv)))
        deadline = self._monotonic() + command.deadline_seconds
        self._child = Child(command.argv, deadline, self._monotonic, ENVIRONMENT)

    def _counted(self, result: CommandResult) -> CommandResult:
        assert self._command is not None
        name = " ".join(self._command.argv[:2]) if self._command.argv[0].endswith("scontrol") else self._command.argv[0]
        how = "timeout" if result.status is None else "ok" if result.status == 0 else "error"
        key = (name.rpartition("/")[2], how)
        commands = dict(self.status.commands)
        commands[key] = commands.get(key, 0) + 1
        self.status = replace(self.status, commands=commands)
        if self._command.changes:
            self._tell(self._command, result)
        return result


class SlurmdStart:
    """Whether slurmd was just started here: it registers within seconds, and then slurmctld may take a drain away.

    It looks, only while that is wanted, among the processes that are new since the last look.
    """

    def __init__(self, root: str, monotonic: Callable[[], float]) -> None:
        self._proc = os.path.join(root, "proc")
        self._monotonic = monotonic
        self._known: set[str] = set()
        self.deadline = float("inf")

    def watch(self, wanted: bool) -> None:
        if not wanted:
            self.deadline = float("inf")
        elif self.deadline == float("inf"):
            self._known, self.deadline = self._processes(), self._monotonic() + LOOK_SECONDS

    def step(self) -> bool:
        """Whether there is a slurmd that was not there at the last look."""
        if self._monotonic() < self.deadline:
            return False
        before, self._known = self._known, self._processes()
        self.deadline = self._monotonic() + LOOK_SECONDS
        return any(self._name(pid) == "slurmd" for pid in self._known - before)

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
