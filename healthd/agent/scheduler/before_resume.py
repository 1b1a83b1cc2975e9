"""What checks want run on this node before it is resumed: `healthd validate`, once in each drain of ours.

It runs beside everything else, as a child of the daemon: kernel events are heard and checks come round meanwhile. The
resume waits until it has ended and its check has looked at what it left, `Program.seconds` and that look at most: what
was ended then, or could not be started, is told, and holds nothing.
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

ENDING_SECONDS = 10.0  # so long before the end of its time it is asked to end
LOOK_SECONDS = 900.0  # so long its check is waited for, which looks within a minute
BUSY_SECONDS = 5.0  # how often a node is looked at on which such a program runs that is not ours
Results = Mapping[RunName, CheckResult]


class Stage(enum.Enum):
    """How far a drain is: nothing was run in it; it runs; its check is to look; that is over."""

    BEFORE = "before"
    RUNNING = "running"
    LOOKING = "looking"
    OVER = "over"


class Sight(NamedTuple):
    """What is known of the node now.

    drained   our drain stands in Slurm, and healthd may change that
    idle      ... and Slurm shows that no job is left here
    causes    a fault that drains stands, apart from what these checks found themselves
    clean     nothing keeps the node from its resume, apart from what these checks found themselves
    failed    what these checks found themselves keeps it
    """

    drained: bool
    idle: bool
    causes: bool
    clean: bool
    failed: bool


def after(stage: Stage, sight: Sight) -> Stage:
    """Where a drain is now, before anything is started or ends. A new fault, or the end of the drain, lets it begin
    anew, and ends what runs. What has failed is not tried again by itself: a fault that comes and goes would pass."""
    if not sight.drained or sight.causes:
        return Stage.BEFORE
    if stage is Stage.BEFORE and sight.failed:
        return Stage.OVER
    return stage


def keeps(stage: Stage, sight: Sight) -> bool:
    """Whether the resume waits."""
    return sight.drained and not sight.causes and stage is not Stage.OVER


def found_by(conditions: Collection[Condition], runs: Collection[RunName], before: float) -> bool:
    """Whether one of these checks found what keeps a node drained. What was found in an earlier boot (`before`: when
    this one was first seen; 0 = in this boot) is no reason not to look again: a repair may lie between."""
    return any(
        c.run in runs and c.severity >= Severity.DEGRADED and c.state is ConditionState.OPEN and c.opened_at >= before
        for c in conditions
    )


class BeforeResume:
    """`argv_of`: the command for a program's arguments; `is_busy`: whether such a program, of whoever, runs on this
    node.

    waits_for what the resume waits for, in words; "" = for nothing
    problem   why the last one told nothing; "" = it did
    stage     of the drain that stands
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
        self._ended: dict[RunName, float] = {}  # epoch; whose check has not looked since

    def waits(self) -> Iterator[tuple[int, bool]]:
        return self._child.waits() if self._child else iter(())

    @property
    def deadline(self) -> float:
        """Monotonic."""
        if self._child is None:
            return min(self._again_at, self._look_until)
        return self._child.deadline - (0.0 if self._asked_to_end else ENDING_SECONDS)

    def step(self, programs: Mapping[RunName, Program], sight: Sight, results: Results) -> RunName | None:
        """Go on: end, take note, start. A reload may have changed the programs. Returns the check whose program has
        just ended: it looks at once."""
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
            return "the node is idle and every check that can drain has completed clean: then it is validated"
        return f"it is validated, which takes {seconds:.0f} s at most"

    def _go_on(self) -> RunName | None:
        """Ask the one that runs to end when its time is nearly over; take note of its end."""
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
        elif child.status not in (0, 1, 2):  # all well, slow, failed: its check says which
            self.problem = f"{_called(program)} told nothing (status {child.status}): {said}"
        else:
            self.problem = ""
        level = logging.WARNING if self.problem else logging.INFO
        words = self.problem or f"{_called(program)} has ended with status {child.status}"
        log.log(level, "before the resume: %s", words)
        self._ended[name] = self._now()

    def _start_next(self) -> None:
        """The next one, once no other such program runs here. One by hand has its own time, and is not waited for
        longer than ours would take."""
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
        """End what runs: a job may come, a fault stands, or the daemon ends. It is asked, and not waited for."""
        if self._child is not None:
            log.info("before the resume: what ran is ended")
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
