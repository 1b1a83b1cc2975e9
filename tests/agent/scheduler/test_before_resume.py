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
CLEAN_VIEW = NodeView(is_drained=True, is_idle=True, has_other_causes=False, is_clean=True, has_failed=False)
RUNS_LONG, ENDS_AT_ONCE, EXITS_WITH_2, CRASHES = (
    "print('up', flush=True); import time; time.sleep(600)",
    "",
    "raise SystemExit(2)",
    "1/0",
)


class Node:
    """A BeforeResume that runs the Python program `code`, with a clock set by the test."""

    def __init__(self, code: str) -> None:
        self.code, self.time, self.busy = code, 1000.0, False
        self.requested_runs: list[RunName] = []
        self.started: list[tuple[str, ...]] = []
        self.results: dict[RunName, CheckResult] = {}
        self.before = BeforeResume(self.argv, lambda: self.busy, lambda: self.time, lambda: self.time)

    def argv(self, arguments: tuple[str, ...]) -> tuple[str, ...]:
        self.started.append(arguments)
        return (sys.executable, "-c", self.code)

    def step(self, view: NodeView = CLEAN_VIEW, program: Program | None = PROGRAM) -> str:
        ended = self.before.step({RUN: program} if program else {}, view, self.results)
        self.requested_runs += [ended] if ended else []
        return self.before.waiting_reason

    def step_until(self, stage: Stage) -> None:
        until(lambda: (self.step(), self.before.stage is stage)[1], f"{stage} is reached")

    def record_check(self) -> None:
        self.time += 1
        self.results = {RUN: CheckResult(*RUN, Outcome.COMPLETED, self.time, 0.1)}


@pytest.fixture
def nodes() -> Iterator[list[Node]]:
    new_nodes: list[Node] = []
    yield new_nodes
    for node in new_nodes:
        node.before.cancel()


def start_node(nodes: list[Node], code: str) -> Node:
    nodes.append(Node(code))
    return nodes[-1]


def test_resume_waits_for_program_and_check(nodes: list[Node]) -> None:
    node = start_node(nodes, ENDS_AT_ONCE)
    node.record_check()
    assert node.step() == "the validation has ended (60 s at most)"
    assert (node.started, node.requested_runs) == ([("validate",)], [])
    node.time += 1
    node.step_until(Stage.CHECKING)
    assert node.requested_runs == [RUN]
    assert node.step() != "", "the earlier result of the check is out of date"
    node.record_check()
    assert node.step() == ""
    assert node.before.problem == ""
    for _ in range(3):
        node.record_check()
        assert node.step() == ""
    assert len(node.started) == 1, "once in a drain"


@pytest.mark.parametrize(
    "view",
    [
        CLEAN_VIEW._replace(is_idle=False),  # a job is running
        CLEAN_VIEW._replace(is_clean=False),  # a check has not completed without findings
    ],
)
def test_program_starts_on_idle_clean_node(nodes: list[Node], view: NodeView) -> None:
    node = start_node(nodes, ENDS_AT_ONCE)
    assert node.step(view).startswith("the node is idle and every check")
    assert node.started == []


@pytest.mark.parametrize("view", [CLEAN_VIEW._replace(is_drained=False), CLEAN_VIEW._replace(has_other_causes=True)])
def test_job_or_new_fault_stops_program_until_later(nodes: list[Node], view: NodeView) -> None:
    node = start_node(nodes, RUNS_LONG)
    node.step()
    child = node.before._child
    assert child is not None
    assert node.step(view) == ""
    assert list(node.before.waits()) == []
    until(lambda: child._process.pid not in live_pids(child._process.pid), "it has ended")
    assert node.step() != ""
    assert len(node.started) == 2


def live_pids(pid: int) -> set[int]:
    try:
        with open(f"/proc/{pid}/stat") as file:
            return set() if file.read().rpartition(")")[2].split()[0] == "Z" else {pid}
    except OSError:
        return set()


def test_program_is_terminated_then_killed_after_time_limit(nodes: list[Node]) -> None:
    node = start_node(nodes, f"import signal; signal.signal({signal.SIGTERM.value}, signal.SIG_IGN); {RUNS_LONG}")
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
    node.record_check()
    assert node.step() == ""


def test_check_that_never_runs_delays_resume_only_for_a_time(nodes: list[Node]) -> None:
    node = start_node(nodes, ENDS_AT_ONCE)
    node.step()
    node.step_until(Stage.CHECKING)
    assert node.before.deadline == node.time + CHECK_WAIT_SECONDS
    node.time = node.before.deadline
    assert node.step() == ""


@pytest.mark.parametrize(
    ("code", "problem"),
    [
        (EXITS_WITH_2, ""),  # failed: its check reports it
        (CRASHES, "healthd validate gave no result (status 1)"),
    ],
)
def test_program_without_result_is_reported(nodes: list[Node], code: str, problem: str) -> None:
    node = start_node(nodes, code if code != CRASHES else "raise SystemExit(3)")
    node.step()
    node.step_until(Stage.CHECKING)
    assert node.before.problem == (problem and "healthd validate gave no result (status 3): ")


def test_program_that_cannot_start_is_reported_and_does_not_block(nodes: list[Node]) -> None:
    node = start_node(nodes, ENDS_AT_ONCE)
    node.before._make_command = lambda arguments: ("/nowhere/healthd",)
    node.step()
    node.step_until(Stage.CHECKING)
    node.record_check()
    assert node.step() == ""
    assert node.before.problem != ""


def test_other_validation_is_awaited_for_a_limited_time(nodes: list[Node]) -> None:
    node = start_node(nodes, ENDS_AT_ONCE)
    node.busy = True
    assert node.step() != ""
    assert node.started == []
    node.time = node.before.deadline
    node.step()
    assert node.started == []
    node.time += PROGRAM.seconds
    node.step()
    assert node.started == [("validate",)]


def test_failed_program_is_not_repeated_in_same_drain(nodes: list[Node]) -> None:
    node = start_node(nodes, ENDS_AT_ONCE)
    assert node.step(CLEAN_VIEW._replace(has_failed=True)) == ""
    assert node.step() == ""
    assert node.started == []


def test_reload_without_program_stops_program(nodes: list[Node]) -> None:
    node = start_node(nodes, RUNS_LONG)
    node.step()
    assert node.step(program=None) == ""
    assert list(node.before.waits()) == []


@given(st.sampled_from(Stage), *(st.booleans() for _ in range(5)))
def test_delays_resume_only_in_drain_without_fault(
    stage: Stage, drained: bool, idle: bool, causes: bool, clean: bool, failed: bool
) -> None:
    view = NodeView(drained, idle, causes, clean, failed)
    following_stage = next_stage(stage, view)
    assert following_stage in (stage, Stage.BEFORE, Stage.DONE)
    assert delays_resume(following_stage, view) is (drained and not causes and following_stage is not Stage.DONE)
    assert next_stage(following_stage, view) is following_stage
