"""Tests of rounds with a real worker and site checks: what runs, in which order, how often, and when nothing is due."""

from __future__ import annotations

import logging
import select
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from healthd.agent.scheduler.due import ScheduledRun
from healthd.agent.scheduler.worker_queue import MIN_REPEAT_SECONDS, WorkerQueue
from healthd.agent.worker.client import Reply, Request, WorkerClient
from healthd.agent.worker.process import Setup
from healthd.agent.worker.requests import LoadCopy, Run, TakeInventory, WriteFile, operation_name
from healthd.common.model import Outcome, RunName

CHECK = """
import os, time
from healthd.common.model import Observation

USES = "nvml" if "{name}".startswith("gpu") else ""

def run(host, config, past):
    if "{name}" == "gpu_asks":
        for gpu in host.gpus():
            gpu.ecc_mode()
    if "{name}" == "slow":
        time.sleep(0.2)
    while "{name}" == "hangs" and not os.path.exists({go_on!r}) and os.path.exists({folder!r}):  # until the test ends
        time.sleep(0.01)
    yield Observation("ran", 1)
"""
FAR = 100_000.0  # no check becomes due a second time in a test
INVENTORY = Request("nvml", 60.0, TakeInventory(gpus=True))


def a_run(check: str, uses: str = "", interval: float = FAR, timeout: float = 60.0) -> ScheduledRun:
    return ScheduledRun(RunName(check, ""), uses or check, interval, timeout)


class Node:
    """A worker queue of `scheduled`, with a clock that can be advanced."""

    def __init__(
        self,
        directory: Path,
        *scheduled: ScheduledRun,
        round_timeout: float = 600.0,
        scenario: str = "",
        after: Callable[[Reply], list[RunName]] = lambda reply: [],
    ) -> None:
        self.go_on = directory / "go-on"
        checks = directory / "checks"
        checks.mkdir(mode=0o755)
        for name in ("a", "b", "gpu_1", "gpu_2", "gpu_asks", "slow", "hangs"):
            (checks / f"{name}.py").write_text(CHECK.format(name=name, go_on=str(self.go_on), folder=str(directory)))
        self.ahead = 0.0
        self.scheduled = list(scheduled)
        fake = directory / "scenario.toml"
        fake.write_text(f'profile = "dgx-h100"\n{scenario}')
        self.runner = WorkerClient(Setup(fake_nvml=str(fake), checks_dir=str(checks)), "", self.monotonic)
        self.rounds = WorkerQueue(
            self.runner, "n1", round_timeout, lambda: self.scheduled, self.request_for, time.time, self.monotonic, after
        )
        self.wakes = 0
        self.round_ended = False

    def monotonic(self) -> float:
        return time.monotonic() + self.ahead

    def request_for(self, wanted: ScheduledRun) -> Run:
        return Run(wanted.check, "", {}, boot_id="b")

    def step(self) -> list[Reply]:
        step = self.rounds.step()
        self.round_ended = self.round_ended or step.round_ended
        return step.replies

    def go(self, over: Callable[[], bool], seconds: float = 240.0) -> list[Reply]:
        """Run the daemon's loop until `is_done` returns True, and return the replies."""
        end = time.monotonic() + seconds
        ended: list[Reply] = []
        while True:
            ended += self.step()
            if over():
                return ended
            assert time.monotonic() < end, f"timed out; replies so far: {words(ended)}"
            ready = select.poll()
            for descriptor, writes in self.runner.waits():
                ready.register(descriptor, select.POLLIN | (select.POLLOUT if writes else 0))
            ready.poll(max(0.0, min(self.rounds.deadline - self.monotonic(), end - time.monotonic())) * 1000 + 1)
            self.wakes += 1

    def go_for(self, seconds: float) -> list[Reply]:
        end = time.monotonic() + seconds
        self.rounds.run_early(("nobody", ""), self.monotonic())  # a check that does not exist
        self.wakes = 0
        ended: list[Reply] = []
        while time.monotonic() < end:
            ended += self.step()
            ready = select.poll()
            for descriptor, writes in self.runner.waits():
                ready.register(descriptor, select.POLLIN | (select.POLLOUT if writes else 0))
            ready.poll(max(0.0, min(self.rounds.deadline - self.monotonic(), end - time.monotonic())) * 1000 + 1)
            self.wakes += 1
        return ended

    def freed(self, *scheduled: ScheduledRun) -> None:
        """Let the hung check end. Then run `scheduled`: now after the time-out of the hung check."""
        self.scheduled = list(scheduled)
        self.ahead = max(2 * run.timeout_seconds for run in scheduled)
        self.go_on.touch()

    def round(self) -> list[Reply]:
        """Run one round to its end, with the tasks after it, and return the replies."""
        ended = self.go(lambda: self.round_ended and not self.runner.is_busy)
        self.round_ended = False
        return ended


def name_of(request: Request) -> str:
    return request.operation.check if isinstance(request.operation, Run) else operation_name(request.kind)


def words(replies: list[Reply]) -> list[str]:
    """Return the check name of each reply, or its operation if it is not a run."""
    return [name_of(reply.request) for reply in replies]


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Callable[..., Node]]:
    made: list[Node] = []

    def make(*scheduled: ScheduledRun, **settings: Any) -> Node:
        made.append(Node(tmp_path, *scheduled, **settings))
        return made[-1]

    yield make
    for one in made:
        one.go_on.touch()
        one.runner.close(2.0)


A, B, GPU_1, GPU_2, GPU_ASKS = (
    a_run("a"),
    a_run("b"),
    a_run("gpu_1", "nvml"),
    a_run("gpu_2", "nvml"),
    a_run("gpu_asks", "nvml"),
)


def test_gpu_checks_run_first_and_the_driver_is_closed_right_after_the_last(node: Callable[..., Node]) -> None:
    one = node(A, GPU_1, B, GPU_2)
    ended = one.round()
    assert words(ended) == ["gpu_1", "gpu_2", "close_nvml", "a", "b"]
    assert {reply.outcome for reply in ended} == {Outcome.COMPLETED}
    assert one.runner.started_total == 1


def once_more(reply: Reply) -> list[RunName]:
    return [GPU_1.name] if reply.has_nvml_problem else []


def test_when_a_gpu_check_meets_a_lost_gpu_others_look_once_more_in_that_round(node: Callable[..., Node]) -> None:
    one = node(A, GPU_1, GPU_ASKS, GPU_2, scenario="gpu.3.lost_after = 1", after=once_more)
    ended = one.round()
    assert words(ended) == ["gpu_1", "gpu_asks", "gpu_2", "gpu_1", "close_nvml", "a"]
    assert [reply.outcome for reply in ended[:4]] == [Outcome.COMPLETED, Outcome.FAILED, *[Outcome.COMPLETED] * 2]
    assert one.rounds.deadline > one.monotonic() + 1000, "the next round has its usual time"


def test_when_no_gpu_is_lost_nobody_looks_twice(node: Callable[..., Node]) -> None:
    assert words(node(A, GPU_1, GPU_ASKS, GPU_2, after=once_more).round()) == [
        *("gpu_1", "gpu_asks", "gpu_2", "close_nvml", "a")
    ]


def test_who_has_not_looked_yet_looks_only_once(node: Callable[..., Node]) -> None:
    one = node(GPU_ASKS, GPU_1, scenario="gpu.3.lost_after = 1", after=once_more)
    assert words(one.round()) == ["gpu_asks", "gpu_1", "close_nvml"]


def test_when_a_gpu_check_hangs_others_learn_of_it_in_that_round(node: Callable[..., Node]) -> None:
    one = node(GPU_1, a_run("hangs", "nvml", timeout=0.5), GPU_2, after=once_more)
    ended = one.go(lambda: one.round_ended)
    assert [(name_of(reply.request), reply.outcome) for reply in ended if reply.request.kind is Run] == [
        ("gpu_1", Outcome.COMPLETED),
        ("hangs", Outcome.TIMED_OUT),
        ("gpu_2", Outcome.STUCK),
        ("gpu_1", Outcome.STUCK),
    ]


def test_an_task_that_needs_the_driver_is_done_while_it_is_open(node: Callable[..., Node]) -> None:
    one = node(A, GPU_1)
    one.rounds.add_task(INVENTORY)
    assert words(one.round()) == ["gpu_1", "inventory", "close_nvml", "a"]


def test_an_task_alone_opens_and_closes_the_driver(node: Callable[..., Node]) -> None:
    one = node(A)
    one.round()
    one.rounds.add_task(INVENTORY)
    assert words(one.go(lambda: not one.runner.is_busy)) == ["inventory", "close_nvml"]


def test_other_tasks_come_after_the_checks_and_the_same_one_once(node: Callable[..., Node], tmp_path: Path) -> None:
    one = node(A, B)
    task = Request("state_dir", 60.0, LoadCopy(str(tmp_path), ()))
    one.rounds.add_task(task)
    one.rounds.add_task(task)
    assert words(one.go(lambda: one.round_ended and not one.runner.is_busy)) == ["a", "b", "load_copy"]


def test_an_early_look_runs_that_check_alone_and_in_its_time(node: Callable[..., Node]) -> None:
    one = node(A, B)
    one.round()
    began = one.monotonic()
    one.rounds.run_early(A.name, began + 0.3)
    one.rounds.run_early(A.name, began + 60)
    assert one.rounds.deadline == pytest.approx(began + 0.3)
    assert words(one.round()) == ["a"]
    assert 0.3 <= one.monotonic() - began < 30


def test_people_can_have_everything_looked_at_now(node: Callable[..., Node]) -> None:
    one = node(A, GPU_1)
    one.round()
    one.rounds.run_all_now()
    assert words(one.round()) == ["gpu_1", "close_nvml", "a"]
    assert one.rounds.status.number == 2


def test_repeated_commands_share_a_round(node: Callable[..., Node]) -> None:
    one = node(A)
    one.round()
    one.rounds.run_after_command()
    assert words(one.round()) == ["a"], "the first command has its round at once"
    for _ in range(50):
        one.rounds.run_after_command()
    assert one.rounds.deadline > one.monotonic(), "the next commands wait"
    one.ahead = MIN_REPEAT_SECONDS + 1
    assert words(one.round()) == ["a"]
    assert one.rounds.status.number == 3
    assert one.rounds.deadline > one.monotonic()


def test_an_event_runs_its_check_at_once_but_a_storm_of_events_does_not_run_it_in_a_storm(
    node: Callable[..., Node],
) -> None:
    one = node(A, B)
    one.round()
    one.ahead = MIN_REPEAT_SECONDS + 1
    one.rounds.run_after_event([A.name])
    before = one.monotonic()
    assert words(one.round()) == ["a"]
    last = one.monotonic()
    for _ in range(1000):
        one.rounds.run_after_event([A.name])
        assert one.step() == []
    assert before + MIN_REPEAT_SECONDS <= one.rounds.deadline <= last + MIN_REPEAT_SECONDS
    one.ahead += MIN_REPEAT_SECONDS
    assert words(one.round()) == ["a"]
    assert one.rounds.deadline > one.monotonic() + 100, "all these events requested one run"


def test_a_round_that_is_out_of_time_ends_without_its_last_checks_which_did_not_hang(
    node: Callable[..., Node],
) -> None:
    one = node(A, a_run("hangs", timeout=1000.0), B, round_timeout=100.0)
    before = one.go(lambda: (asked := one.runner.request) is not None and name_of(asked) == "hangs")
    one.ahead = 100.0
    one.go_on.touch()
    first, slow, last = before + one.round()
    assert (first.outcome, slow.outcome) == (Outcome.COMPLETED, Outcome.COMPLETED)
    assert (last.outcome, last.seconds) == (Outcome.TIMED_OUT, 0.0)
    assert last.error == "the round ran out of time before this run"
    one.rounds.run_early(B.name, one.monotonic())
    assert [reply.outcome for reply in one.round()] == [Outcome.COMPLETED], "the next round has its own time"


def test_a_hung_driver_stops_the_gpu_checks_only_and_they_look_again_once_it_is_free(
    node: Callable[..., Node], caplog: pytest.LogCaptureFixture
) -> None:
    one = node(A, a_run("hangs", "nvml", timeout=0.3), a_run("gpu_1", "nvml", timeout=0.3))
    by_name = dict(zip(words(ended := one.round()), ended, strict=True))
    assert words(ended) == ["hangs", "gpu_1", "a"]
    assert by_name["hangs"].outcome is Outcome.TIMED_OUT
    assert by_name["gpu_1"].outcome is Outcome.STUCK
    assert by_name["a"].outcome is Outcome.COMPLETED
    assert list(one.runner.quarantined) == ["nvml"]

    assert one.go_for(0.4) == []
    assert one.wakes < 5, "waiting for a hung worker is no busy loop"

    with caplog.at_level(logging.INFO, "healthd"):
        one.freed(A, a_run("hangs", "nvml"), GPU_1)
        freed = one.round()
    assert words(freed) == ["hangs", "gpu_1", "close_nvml"]
    assert {reply.outcome for reply in freed} == {Outcome.COMPLETED}
    assert "the worker that hung in nvml has ended" in caplog.text


def test_a_check_that_takes_just_longer_than_it_may_is_not_run_in_a_storm(node: Callable[..., Node]) -> None:
    one = node(a_run("hangs", "nvml", timeout=0.4))
    began = one.monotonic()
    one.round()
    one.go_on.touch()
    one.round()
    assert one.monotonic() - began >= 0.8


def test_an_task_into_a_hung_driver_waits_without_a_busy_loop_until_it_is_free(node: Callable[..., Node]) -> None:
    one = node(a_run("hangs", "nvml", timeout=0.3))
    one.round()
    one.rounds.add_task(INVENTORY)
    assert one.go_for(0.4) == []
    assert one.wakes < 5
    one.freed(a_run("hangs", "nvml"))
    assert words(one.round()) == ["hangs", "inventory", "close_nvml"]


def test_of_tasks_of_one_kind_that_wait_the_newest_is_done(node: Callable[..., Node], tmp_path: Path) -> None:
    one = node(a_run("slow"))
    one.step()
    path = tmp_path / "healthd.prom"
    for number in range(100):
        one.rounds.add_task(Request("textfile", 60.0, WriteFile(str(path), f"up {number}")))
    assert words(one.go(lambda: one.round_ended and not one.runner.is_busy)) == ["slow", "write_file"]
    assert path.read_text() == "up 99"


def test_when_nothing_is_to_do_nothing_is_done(node: Callable[..., Node]) -> None:
    one = node(A, GPU_1)
    one.round()
    assert one.rounds.deadline > one.monotonic() + 100
    assert one.go_for(0.5) == []
    assert one.wakes < 4


def test_without_any_check_there_is_no_deadline(node: Callable[..., Node]) -> None:
    one = node()
    assert one.step() == []
    assert one.rounds.deadline == float("inf")


def test_where_no_worker_starts_the_round_ends_all_the_same(
    node: Callable[..., Node], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "executable", "/nonexistent/python")
    one = node(A, GPU_1)
    assert [reply.outcome for reply in one.round()] == [Outcome.FAILED, Outcome.FAILED]
    assert one.rounds.deadline > one.monotonic() + 100


def test_a_check_that_the_settings_no_longer_have_is_not_run(node: Callable[..., Node]) -> None:
    one = node(a_run("slow"), A, B)
    assert one.step() == []
    one.rounds.run_early(A.name, one.monotonic())
    one.scheduled = [a_run("slow"), B]
    one.rounds.drop_unconfigured([("slow", ""), ("b", "")])
    assert words(one.round()) == ["slow", "b"]


def test_a_check_with_a_short_interval_comes_round_by_itself(node: Callable[..., Node]) -> None:
    one = node(a_run("a", interval=0.2), B)
    began = one.monotonic()
    ended = one.go(lambda: one.rounds.status.number == 5)
    assert one.monotonic() - began >= 0.6
    assert words(ended).count("b") == 1
    assert words(ended).count("a") in (4, 5)
    assert one.wakes < 40


def test_the_status_tells_of_the_round(node: Callable[..., Node]) -> None:
    one = node(A)
    before = time.time()
    one.round()
    status = one.rounds.status
    assert status.number == 1
    assert before <= status.started <= time.time()
    assert 0 < status.seconds <= time.time() - before
    assert status.next_at > time.time() + 100


def test_a_round_that_takes_longer_than_its_interval_ends_and_the_next_one_begins(tmp_path):
    """Runs that become due again during a round do not extend it."""
    node = Node(tmp_path, a_run("slow", interval=0.05), a_run("a", interval=0.05))
    try:
        ended = node.go(lambda: node.rounds.status.number >= 3)
        assert node.round_ended
        assert {reply.outcome for reply in ended} == {Outcome.COMPLETED}
        assert 4 <= len(ended) <= 5  # two rounds of both checks, and the start of the third
    finally:
        node.runner.close(5.0)


class Hanging:
    """A client whose every run hangs until its time-out. The hung worker has ended at the next step."""

    nvml_open = False

    def __init__(self) -> None:
        self.now = 0.0
        self.request: Request | None = None
        self.deadline = FAR
        self.quarantined: dict[str, int] = {}

    @property
    def is_busy(self) -> bool:
        return self.request is not None

    def send(self, request: Request) -> None:
        self.request, self.deadline = request, self.now + request.timeout_seconds

    def step(self) -> Reply | None:
        self.quarantined = {}
        if self.request is None or self.now < self.deadline:
            return None
        hung, self.request = self.request, None
        self.quarantined = {hung.resource: 1}
        return Reply(hung, Outcome.TIMED_OUT, hung.timeout_seconds)


@pytest.mark.parametrize("resource", ["", "nvml"])
@pytest.mark.parametrize("interval", [5.0, 10.0, 1000.0])
@pytest.mark.parametrize("have_each_other_look", [False, True])
def test_checks_that_time_out_again_and_again_keep_no_round_open(
    resource: str, interval: float, have_each_other_look: bool
) -> None:
    runner = Hanging()
    scheduled = [a_run(name, resource, interval, timeout=10.0) for name in ("a", "b", "c")]

    def others(reply: Reply) -> list[RunName]:
        return [run.name for run in scheduled if run.name != reply.run] if have_each_other_look else []

    rounds = WorkerQueue(
        runner,
        "n1",
        100_000.0,
        lambda: scheduled,
        lambda wanted: Run(wanted.check, "", {}, boot_id="b"),
        lambda: runner.now,
        lambda: runner.now,
        others,
    )
    ends = []
    for _ in range(400):
        if rounds.step().round_ended:
            ends.append(rounds.status.seconds)
        runner.now = max(rounds.deadline, runner.now + 0.001)
    assert len(ends) > 10
    assert max(ends) <= 2 * 3 * 10.0 + 1, "each check runs once, and at most once more"
