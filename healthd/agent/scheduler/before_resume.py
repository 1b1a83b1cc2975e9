"""Programs that must run on this node before a resume: `healthd validate`, once for each drain by healthd.

A program runs as a child process of the daemon. Meanwhile, kernel events and checks are handled as usual. The resume
waits until the program has ended and its check has evaluated the result, at most `Program.seconds` plus the time until
the check has run. A program that was terminated or could not be started is reported but does not block the resume.
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

TERMINATE_SECONDS = 10.0  # a program is terminated this long before its time limit, and killed at the limit
CHECK_WAIT_SECONDS = 900.0  # the longest wait for the program's check, which is due within a minute
BUSY_RETRY_SECONDS = 5.0  # polling interval while an operator is running such a program
Results = Mapping[RunName, CheckResult]


class Stage(enum.Enum):
    """Progress during a drain: nothing has run yet, a program is running, its check is pending, or everything is
    done.
    """

    BEFORE = "before"
    RUNNING = "running"
    CHECKING = "checking"
    DONE = "done"


class NodeView(NamedTuple):
    """State of the node. "These checks" are the checks with programs that run before a resume.

    is_drained        healthd's drain is in force in Slurm, and healthd may change it
    is_idle           like is_drained, and Slurm shows no job on the node
    has_other_causes  a fault other than these checks' findings drains the node
    is_clean          nothing other than these checks' findings blocks the resume
    has_failed        these checks' findings block the resume
    """

    is_drained: bool
    is_idle: bool
    has_other_causes: bool
    is_clean: bool
    has_failed: bool


def next_stage(stage: Stage, node: NodeView) -> Stage:
    """Return the stage of a drain before `step` starts a program or records a program's end.

    If a new fault opens or the drain ends, start over and terminate any running program. A failed program is not
    retried automatically, because a retry could miss an intermittent fault.
    """
    if not node.is_drained or node.has_other_causes:
        return Stage.BEFORE
    if stage is Stage.BEFORE and node.has_failed:
        return Stage.DONE
    return stage


def delays_resume(stage: Stage, node: NodeView) -> bool:
    """Return True if the resume must wait."""
    return node.is_drained and not node.has_other_causes and stage is not Stage.DONE


def has_drain_cause(conditions: Collection[Condition], runs: Collection[RunName], before: float) -> bool:
    """Return True if one of these checks' findings keeps the node drained.

    Findings from an earlier boot are ignored, because the node may have been repaired since. `before` is the time at
    which this boot was first observed, or 0 if it was observed earlier.
    """
    return any(
        c.run in runs and c.severity >= Severity.DEGRADED and c.state is ConditionState.OPEN and c.opened_at >= before
        for c in conditions
    )


class BeforeResume:
    """Runs these programs.

    `make_command` returns the command for a program's arguments. `is_busy` returns True if such a program is running on
    this node.

        waiting_reason  why the resume waits, or ""
        problem         why the last program gave no result, or ""
        stage           stage of the current drain
    """

    def __init__(
        self,
        make_command: Callable[[tuple[str, ...]], tuple[str, ...]],
        is_busy: Callable[[], bool],
        now: Callable[[], float],
        monotonic: Callable[[], float],
    ) -> None:
        self.stage = Stage.BEFORE
        self.waiting_reason = self.problem = ""
        self._make_command = make_command
        self._is_busy = is_busy
        self._now = now
        self._monotonic = monotonic
        self._queue: list[tuple[RunName, Program]] = []
        self._running: tuple[RunName, Program] | None = None
        self._child: Child | None = None
        self._was_terminated = False
        self._retry_at, self._busy_until = FOREVER, FOREVER
        self._check_deadline = FOREVER
        self._ended_at: dict[RunName, float] = {}  # end time of each program whose check has not run since

    def waits(self) -> Iterator[tuple[int, bool]]:
        return self._child.waits() if self._child else iter(())

    @property
    def deadline(self) -> float:
        """Monotonic time at which `step` is due."""
        if self._child is None:
            return min(self._retry_at, self._check_deadline)
        return self._child.deadline - (0.0 if self._was_terminated else TERMINATE_SECONDS)

    def step(self, programs: Mapping[RunName, Program], node: NodeView, results: Results) -> RunName | None:
        """Advance: terminate a program, record a program's end, or start a program. A reload may have changed
        `programs`.

        Return the check whose program has just ended, and which must run at once.
        """
        if not programs:
            self.cancel()
            return None
        stage = next_stage(self.stage, node)
        if stage is not self.stage and self.stage is not Stage.DONE:
            self.cancel()
        self.stage = stage
        ended = self._advance()
        if self.stage is Stage.BEFORE and delays_resume(self.stage, node) and node.is_idle and node.is_clean:
            self._queue = list(programs.items())
            self._busy_until = self._monotonic() + max(program.seconds for program in programs.values())
            self.stage = Stage.RUNNING
        if self.stage is Stage.RUNNING and self._child is None:
            self._start_next()
        has_checked = all(name in results and results[name].started >= at for name, at in self._ended_at.items())
        if self.stage is Stage.CHECKING and (has_checked or self._monotonic() >= self._check_deadline):
            self.stage, self._check_deadline = Stage.DONE, FOREVER
        self.waiting_reason = self._waiting_text(programs) if delays_resume(self.stage, node) else ""
        return ended

    def _waiting_text(self, programs: Mapping[RunName, Program]) -> str:
        seconds = sum(program.seconds for program in programs.values())
        if self.stage is Stage.BEFORE:
            return "the node is idle and every check that can drain has completed clean; then a validation runs"
        return f"the validation has ended ({seconds:.0f} s at most)"

    def _advance(self) -> RunName | None:
        """Terminate the running program when its time is nearly up, and record its end."""
        child, running = self._child, self._running
        if child is None or running is None:
            return None
        name, program = running
        if child.step():
            self._child = self._running = None
            self._record_end(name, program, child)
            return name
        if not self._was_terminated and self._monotonic() >= child.deadline - TERMINATE_SECONDS:
            self._was_terminated = True
            child.terminate()
        return None

    def _record_end(self, name: RunName, program: Program, child: Child) -> None:
        out, err = child.output()
        last_line = " ".join((err.strip() or out.decode("utf-8", "replace").strip()).splitlines()[-1:])[:200]
        if child.status is None or self._was_terminated:
            self.problem = f"{_command_text(program)} did not end within {program.seconds:.0f} s"
        elif child.status not in (0, 1, 2):  # passed, slow or failed: its check reports which
            self.problem = f"{_command_text(program)} gave no result (status {child.status}): {last_line}"
        else:
            self.problem = ""
        level = logging.WARNING if self.problem else logging.INFO
        message = self.problem or f"{_command_text(program)} ended with status {child.status}"
        log.log(level, "before the resume: %s", message)
        self._ended_at[name] = self._now()

    def _start_next(self) -> None:
        """Start the next program once no such program is running on this node.

        A program that an operator started has its own time limit. healthd waits for that program no longer than its own
        programs may run.
        """
        self._retry_at = FOREVER
        if self._queue and self._is_busy() and self._monotonic() < self._busy_until:
            self._retry_at = self._monotonic() + BUSY_RETRY_SECONDS
            return
        while self._queue and self._child is None:
            self._running = self._queue.pop(0)
            program = self._running[1]
            argv = self._make_command(program.arguments)
            self._was_terminated = False
            log.info("before the resume: %s", _command_text(program))
            try:
                self._child = Child(argv, self._monotonic() + program.seconds, self._monotonic, directory="/")
            except OSError as error:
                self.problem = f"{_command_text(program)} could not be started: {error.strerror}"
                log.warning("before the resume: %s", self.problem)
                self._running = None
        if self._child is None:
            self.stage, self._check_deadline = Stage.CHECKING, self._monotonic() + CHECK_WAIT_SECONDS

    def cancel(self) -> None:
        """Terminate the running program without waiting, because a job may start, a fault is open, or the daemon is
        stopping."""
        if self._child is not None:
            log.info("before the resume: terminating the running program")
            self._child.terminate()
            self._child.abandon()
        self._child = self._running = None
        self._queue.clear()
        self._ended_at.clear()
        self.waiting_reason = ""
        self._retry_at = self._check_deadline = FOREVER
        self.stage = Stage.BEFORE


def _command_text(program: Program) -> str:
    return " ".join(("healthd", *program.arguments))
