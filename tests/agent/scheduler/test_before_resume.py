"""Tests of the program before a resume: once in a drain, on the idle node, and for a limited time."""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st
from waiting import until

from healthd.agent.scheduler.before_resume import (
    CHECK_WAIT_SECONDS,
    TERMINATE_SECONDS,
    BeforeResume,
    NodeView,
    Stage,
    delays_resume,
    next_stage,
)
from healthd.common.model import CheckResult, Outcome, Program, RunName

RUN = RunName("validation")
PROGRAM = Program(("validate",), 60.0)
WELL = NodeView(is_drained=True, is_idle=True, has_other_causes=False, is_clean=True, has_failed=False)
UP, ENDS, FAILS, ILL = "print('up', flush=True); import time; time.sleep(600)", "", "raise SystemExit(2)", "1/0"


class Node:
    """A BeforeResume that runs the Python program `code`, with a clock set by the test."""

    def __init__(self, code: str) -> None:
        self.code, self.time, self.busy = code, 1000.0, False
        self.looks: list[RunName] = []
        self.started: list[tuple[str, ...]] = []
        self.results: dict[RunName, CheckResult] = {}
        self.before = BeforeResume(self.argv, lambda: self.busy, lambda: self.time, lambda: self.time)

    def argv(self, arguments: tuple[str, ...]) -> tuple[str, ...]:
        self.started.append(arguments)
        return (sys.executable, "-c", self.code)

    def step(self, sight: NodeView = WELL, program: Program | None = PROGRAM) -> str:
        ended = self.before.step({RUN: program} if program else {}, sight, self.results)
        self.looks += [ended] if ended else []
        return self.before.waiting_reason

    def step_until(self, stage: Stage) -> None:
        until(lambda: (self.step(), self.before.stage is stage)[1], f"{stage} is reached")

    def looked(self) -> None:
        self.time += 1
        self.results = {RUN: CheckResult(*RUN, Outcome.COMPLETED, self.time, 0.1)}


@pytest.fixture
def nodes() -> Iterator[list[Node]]:
    made: list[Node] = []
    yield made
    for node in made:
        node.before.cancel()


def node_of(nodes: list[Node], code: str) -> Node:
    nodes.append(Node(code))
    return nodes[-1]


def test_the_resume_waits_until_the_program_has_ended_and_its_check_has_looked(nodes: list[Node]) -> None:
    node = node_of(nodes, ENDS)
    node.looked()
    assert node.step() == "the validation has ended (60 s at most)"
    assert (node.started, node.looks) == ([("validate",)], [])
    node.time += 1
    node.step_until(Stage.CHECKING)
    assert node.looks == [RUN]
    assert node.step() != "", "the earlier result of the check is out of date"
    node.looked()
    assert node.step() == ""
    assert node.before.problem == ""
    for _ in range(3):
        node.looked()
        assert node.step() == ""
    assert len(node.started) == 1, "once in a drain"


@pytest.mark.parametrize(
    "sight",
    [
        WELL._replace(is_idle=False),  # a job is running
        WELL._replace(is_clean=False),  # a check has not completed without findings
    ],
)
def test_it_waits_for_an_idle_node_on_which_all_else_is_clean(nodes: list[Node], sight: NodeView) -> None:
    node = node_of(nodes, ENDS)
    assert node.step(sight).startswith("the node is idle and every check")
    assert node.started == []


@pytest.mark.parametrize("sight", [WELL._replace(is_drained=False), WELL._replace(has_other_causes=True)])
def test_a_job_that_may_come_or_a_new_fault_ends_what_runs_and_it_begins_anew_later(
    nodes: list[Node], sight: NodeView
) -> None:
    node = node_of(nodes, UP)
    node.step()
    child = node.before._child
    assert child is not None
    assert node.step(sight) == ""
    assert list(node.before.waits()) == []
    until(lambda: child._process.pid not in pids_alive(child._process.pid), "it has ended")
    assert node.step() != ""
    assert len(node.started) == 2


def pids_alive(pid: int) -> set[int]:
    try:
        with open(f"/proc/{pid}/stat") as file:
            return set() if file.read().rpartition(")")[2].split()[0] == "Z" else {pid}
    except OSError:
        return set()


def test_one_that_does_not_end_in_its_time_is_asked_then_killed_and_holds_nothing(nodes: list[Node]) -> None:
    node = node_of(nodes, f"import signal; signal.signal({signal.SIGTERM.value}, signal.SIG_IGN); {UP}")
    node.step()
    child = node.before._child
    assert child is not None
    until(lambda: (node.step(), b"up" in child.output()[0])[1], "it ignores SIGTERM")
    assert node.before.deadline == node.time + PROGRAM.seconds - TERMINATE_SECONDS
    node.time = node.before.deadline
    node.step()
    assert node.before.stage is Stage.RUNNING
    node.time = node.before.deadline
    node.step()
    assert node.before.stage is Stage.CHECKING
    assert node.before.problem == "healthd validate did not end within 60 s"
    node.looked()
    assert node.step() == ""


def test_a_check_that_never_looks_holds_nothing_for_ever(nodes: list[Node]) -> None:
    node = node_of(nodes, ENDS)
    node.step()
    node.step_until(Stage.CHECKING)
    assert node.before.deadline == node.time + CHECK_WAIT_SECONDS
    node.time = node.before.deadline
    assert node.step() == ""


@pytest.mark.parametrize(
    ("code", "problem"),
    [
        (FAILS, ""),  # failed: its check reports it
        (ILL, "healthd validate gave no result (status 1)"),
    ],
)
def test_one_that_told_nothing_is_told(nodes: list[Node], code: str, problem: str) -> None:
    node = node_of(nodes, code if code != ILL else "raise SystemExit(3)")
    node.step()
    node.step_until(Stage.CHECKING)
    assert node.before.problem == (problem and "healthd validate gave no result (status 3): ")


def test_one_that_cannot_be_started_is_told_and_holds_nothing(nodes: list[Node]) -> None:
    node = node_of(nodes, ENDS)
    node.before._make_command = lambda arguments: ("/nowhere/healthd",)
    node.step()
    node.step_until(Stage.CHECKING)
    node.looked()
    assert node.step() == ""
    assert node.before.problem != ""


def test_another_ones_validation_is_waited_for_but_no_longer_than_ours_would_take(nodes: list[Node]) -> None:
    node = node_of(nodes, ENDS)
    node.busy = True
    assert node.step() != ""
    assert node.started == []
    node.time = node.before.deadline
    node.step()
    assert node.started == []
    node.time += PROGRAM.seconds
    node.step()
    assert node.started == [("validate",)]


def test_what_failed_in_this_drain_is_not_tried_again_by_itself(nodes: list[Node]) -> None:
    node = node_of(nodes, ENDS)
    assert node.step(WELL._replace(has_failed=True)) == ""
    assert node.step() == ""
    assert node.started == []


def test_a_reload_that_wants_it_no_more_ends_it(nodes: list[Node]) -> None:
    node = node_of(nodes, UP)
    node.step()
    assert node.step(program=None) == ""
    assert list(node.before.waits()) == []


@given(st.sampled_from(Stage), *(st.booleans() for _ in range(5)))
def test_a_resume_waits_only_in_a_drain_without_a_fault_and_not_when_all_is_over(
    stage: Stage, drained: bool, idle: bool, causes: bool, clean: bool, failed: bool
) -> None:
    sight = NodeView(drained, idle, causes, clean, failed)
    now = next_stage(stage, sight)
    assert now in (stage, Stage.BEFORE, Stage.DONE)
    assert delays_resume(now, sight) is (drained and not causes and now is not Stage.DONE)
    assert next_stage(now, sight) is now
