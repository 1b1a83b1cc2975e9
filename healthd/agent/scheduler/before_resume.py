"""Programs that must run on this node before a resume: `healthd validate`, once in each drain by healthd.

A program runs as a child of the daemon; kernel events and checks continue meanwhile. The resume waits until the program
has ended and its check has evaluated the result, but at most `Program.seconds` plus the wait for the check. A program
that was terminated or could not be started is reported, and does not block the resume.
"""

from __future__ import annotations

import enum
import logging
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import NamedTuple

from healthd.common.model import CheckResult, Condition, ConditionState, Program, RunName, Severity
from healthd.host.child_process import Child
from healthd.host.wakeup import FOREVER

log = logging.getLogger("healthd")

ENDING_SECONDS = 10.0  # a program is terminated this long before its time limit, then killed
LOOK_SECONDS = 900.0  # the longest wait for its check, which is due within a minute
BUSY_SECONDS = 5.0  # polling interval while an operator's program of this kind runs
Results = Mapping[RunName, CheckResult]


class Stage(enum.Enum):
    """Progress of a drain: nothing has run; a program runs; its check is pending; done."""

    BEFORE = "before"
    RUNNING = "running"
    LOOKING = "looking"
    OVER = "over"


class Sight(NamedTuple):
    """State of the node.

    is_drained        healthd's drain is in force in Slurm, and healthd may change that
    is_idle           ... and Slurm shows no job on the node
    has_other_causes  a fault drains the node, other than findings of these checks
    is_clean          nothing blocks the resume, other than findings of these checks
    has_failed        findings of these checks block the resume
    """

    drained: bool
    idle: bool
    causes: bool
    clean: bool
    failed: bool


def after(stage: Stage, sight: Sight) -> Stage:
    """Return the stage of a drain before a program is started or ends.

    A new fault or the end of the drain starts over and ends a running program. A failed program is not retried
    automatically: an intermittent fault would pass.
    """
    if not sight.drained or sight.causes:
        return Stage.BEFORE
    if stage is Stage.BEFORE and sight.failed:
        return Stage.OVER
    return stage


def keeps(stage: Stage, sight: Sight) -> bool:
    """Return True if the resume waits."""
    return sight.drained and not sight.causes and stage is not Stage.OVER


def found_by(conditions: Collection[Condition], runs: Collection[RunName], before: float) -> bool:
    """Return True if a finding of these checks keeps the node drained.

    Findings from an earlier boot do not count, because a repair may lie between. `before`: when this boot was first
    observed; 0 = in this boot.
    """
    return any(
        c.run in runs and c.severity >= Severity.DEGRADED and c.state is ConditionState.OPEN and c.opened_at >= before
        for c in conditions
    )


class BeforeResume:
    """Runs the programs.

    `make_command` returns the command for a program's arguments. `is_busy` returns True if any such program runs on
    this node.

        waiting_reason  why the resume waits; "" = it does not wait
        problem         why the last program gave no result; "" = it did
        stage           of the current drain
    """

    def __init__(
        self,
        argv_of: Callable[[tuple[str, ...]], tuple[str, ...]],
        is_busy: Callable[[], bool],
        now: Callable[[], float],
        monotonic: Callable[[], float],
    ) -> None:
        self.stage = Stage.BEFORE
        self.waits_for = self.problem = ""
        self._argv_of = argv_of
        self._is_busy = is_busy
        self._now = now
        self._monotonic = monotonic
        self._ahead: list[tuple[RunName, Program]] = []
        self._running: tuple[RunName, Program] | None = None
        self._child: Child | None = None
        self._asked_to_end = False
        self._again_at, self._busy_until = FOREVER, FOREVER
        self._look_until = FOREVER
        self._ended: dict[RunName, float] = {}  # epoch; runs whose check has not run since

    def waits(self) -> Iterator[tuple[int, bool]]:
        return self._child.waits() if self._child else iter(())

    @property
    def deadline(self) -> float:
        """When `step` is due, monotonic."""
        if self._child is None:
            return min(self._again_at, self._look_until)
        return self._child.deadline - (0.0 if self._asked_to_end else ENDING_SECONDS)

    def step(self, programs: Mapping[RunName, Program], sight: Sight, results: Results) -> RunName | None:
        """Advance: terminate, record an end, start. A reload may have changed the programs.

        Return the check whose program has just ended: it runs at once.
        """
        if not programs:
            self.drop()
            return None
        stage = after(self.stage, sight)
        if stage is not self.stage and self.stage is not Stage.OVER:
            self.drop()
        self.stage = stage
        ended = self._go_on()
        if self.stage is Stage.BEFORE and keeps(self.stage, sight) and sight.idle and sight.clean:
            self._ahead = list(programs.items())
            self._busy_until = self._monotonic() + max(program.seconds for program in programs.values())
            self.stage = Stage.RUNNING
        if self.stage is Stage.RUNNING and self._child is None:
            self._start_next()
        looked = all(name in results and results[name].started >= at for name, at in self._ended.items())
        if self.stage is Stage.LOOKING and (looked or self._monotonic() >= self._look_until):
            self.stage, self._look_until = Stage.OVER, FOREVER
        self.waits_for = self._words(programs) if keeps(self.stage, sight) else ""
        return ended

    def _words(self, programs: Mapping[RunName, Program]) -> str:
        seconds = sum(program.seconds for program in programs.values())
        if self.stage is Stage.BEFORE:
            return "the node is idle and every check that can drain has completed clean; then a validation runs"
        return f"the validation has ended ({seconds:.0f} s at most)"

    def _go_on(self) -> RunName | None:
        """Terminate the running program when its time is nearly over, and record its end."""
        child, running = self._child, self._running
        if child is None or running is None:
            return None
        name, program = running
        if child.step():
            self._child = self._running = None
            self._take(name, program, child)
            return name
        if not self._asked_to_end and self._monotonic() >= child.deadline - ENDING_SECONDS:
            self._asked_to_end = True
            child.terminate()
        return None

    def _take(self, name: RunName, program: Program, child: Child) -> None:
        out, err = child.output()
        said = " ".join((err.strip() or out.decode("utf-8", "replace").strip()).splitlines()[-1:])[:200]
        if child.status is None or self._asked_to_end:
            self.problem = f"{_called(program)} did not end within {program.seconds:.0f} s"
        elif child.status not in (0, 1, 2):  # passed, slow or failed: its check reports which
            self.problem = f"{_called(program)} gave no result (status {child.status}): {said}"
        else:
            self.problem = ""
        level = logging.WARNING if self.problem else logging.INFO
        words = self.problem or f"{_called(program)} ended with status {child.status}"
        log.log(level, "before the resume: %s", words)
        self._ended[name] = self._now()

    def _start_next(self) -> None:
        """Start the next program once no other such program runs on this node.

        A program that an operator started has its own time limit. The wait for it is limited to the time of healthd's
        own programs.
        """
        self._again_at = FOREVER
        if self._ahead and self._is_busy() and self._monotonic() < self._busy_until:
            self._again_at = self._monotonic() + BUSY_SECONDS
            return
        while self._ahead and self._child is None:
            self._running = self._ahead.pop(0)
            program = self._running[1]
            argv = self._argv_of(program.arguments)
            self._asked_to_end = False
            log.info("before the resume: %s", _called(program))
            try:
                self._child = Child(argv, self._monotonic() + program.seconds, self._monotonic, directory="/")
            except OSError as error:
                self.problem = f"{_called(program)} could not be started: {error.strerror}"
                log.warning("before the resume: %s", self.problem)
                self._running = None
        if self._child is None:
            self.stage, self._look_until = Stage.LOOKING, self._monotonic() + LOOK_SECONDS

    def drop(self) -> None:
        """Terminate the running program without waiting: a job may come, a fault is open, or the daemon stops."""
        if self._child is not None:
            log.info("before the resume: the running program is terminated")
            self._child.terminate()
            self._child.leave()
        self._child = self._running = None
        self._ahead.clear()
        self._ended.clear()
        self.waits_for = ""
        self._again_at = self._look_until = FOREVER
        self.stage = Stage.BEFORE


def _called(program: Program) -> str:
    return " ".join(("healthd", *program.arguments))
