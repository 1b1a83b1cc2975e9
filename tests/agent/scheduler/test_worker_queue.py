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
NEVER_REPEATED = 100_000.0  # no check becomes due a second time in a test
INVENTORY = Request("nvml", 60.0, TakeInventory(gpus=True))


def scheduled_run(check: str, uses: str = "", interval: float = NEVER_REPEATED, timeout: float = 60.0) -> ScheduledRun:
    return ScheduledRun(RunName(check, ""), uses or check, interval, timeout)


class QueueHarness:
    """A worker queue of `scheduled`, with a clock that can be advanced."""

    def __init__(
        self,
        directory: Path,
        *scheduled: ScheduledRun,
        round_timeout: float = 600.0,
        scenario: str = "",
        after: Callable[[Reply], list[RunName]] = lambda reply: [],
    ) -> None:
        self.release_file = directory / "go-on"
        checks = directory / "checks"
        checks.mkdir(mode=0o755)
        for name in ("a", "b", "gpu_1", "gpu_2", "gpu_asks", "slow", "hangs"):
            (checks / f"{name}.py").write_text(
                CHECK.format(name=name, go_on=str(self.release_file), folder=str(directory))
            )
        self.clock_offset = 0.0
        self.scheduled = list(scheduled)
        fake = directory / "scenario.toml"
        fake.write_text(f'profile = "dgx-h100"\n{scenario}')
        self.client = WorkerClient(Setup(fake_nvml=str(fake), checks_dir=str(checks)), "", self.monotonic)
        self.queue = WorkerQueue(
            self.client, "n1", round_timeout, lambda: self.scheduled, self.request_for, time.time, self.monotonic, after
        )
        self.wakes = 0
        self.round_ended = False

    def monotonic(self) -> float:
        return time.monotonic() + self.clock_offset

    def request_for(self, run: ScheduledRun) -> Run:
        return Run(run.check, "", {}, boot_id="b")

    def step(self) -> list[Reply]:
        step = self.queue.step()
        self.round_ended = self.round_ended or step.round_ended
        return step.replies

    def run_until(self, is_done: Callable[[], bool], seconds: float = 240.0) -> list[Reply]:
        """Run the daemon's loop until `is_done` returns True, and return the replies."""
        end = time.monotonic() + seconds
        replies: list[Reply] = []
        while True:
            replies += self.step()
            if is_done():
                return replies
            assert time.monotonic() < end, f"timed out; replies so far: {run_names(replies)}"
            ready = select.poll()
            for descriptor, is_writing in self.client.waits():
                ready.register(descriptor, select.POLLIN | (select.POLLOUT if is_writing else 0))
            ready.poll(max(0.0, min(self.queue.deadline - self.monotonic(), end - time.monotonic())) * 1000 + 1)
            self.wakes += 1

    def run_for(self, seconds: float) -> list[Reply]:
        end = time.monotonic() + seconds
        self.queue.run_early(("nobody", ""), self.monotonic())  # a check that does not exist
        self.wakes = 0
        replies: list[Reply] = []
        while time.monotonic() < end:
            replies += self.step()
            ready = select.poll()
            for descriptor, is_writing in self.client.waits():
                ready.register(descriptor, select.POLLIN | (select.POLLOUT if is_writing else 0))
            ready.poll(max(0.0, min(self.queue.deadline - self.monotonic(), end - time.monotonic())) * 1000 + 1)
            self.wakes += 1
        return replies

    def release(self, *scheduled: ScheduledRun) -> None:
        """Let the hung check end. Then run `scheduled`: now after the time-out of the hung check."""
        self.scheduled = list(scheduled)
        self.clock_offset = max(2 * run.timeout_seconds for run in scheduled)
        self.release_file.touch()

    def run_round(self) -> list[Reply]:
        """Run one round to its end, with the tasks after it, and return the replies."""
        replies = self.run_until(lambda: self.round_ended and not self.client.is_busy)
        self.round_ended = False
        return replies


def name_of(request: Request) -> str:
    return request.operation.check if isinstance(request.operation, Run) else operation_name(request.kind)


def run_names(replies: list[Reply]) -> list[str]:
    """Return the check name of each reply, or its operation if it is not a run."""
    return [name_of(reply.request) for reply in replies]


@pytest.fixture
def make_harness(tmp_path: Path) -> Iterator[Callable[..., QueueHarness]]:
    harnesses: list[QueueHarness] = []

    def make(*scheduled: ScheduledRun, **settings: Any) -> QueueHarness:
        harnesses.append(QueueHarness(tmp_path, *scheduled, **settings))
        return harnesses[-1]

    yield make
    for harness in harnesses:
        harness.release_file.touch()
        harness.client.close(2.0)


A, B, GPU_1, GPU_2, GPU_QUERY = (
    scheduled_run("a"),
    scheduled_run("b"),
    scheduled_run("gpu_1", "nvml"),
    scheduled_run("gpu_2", "nvml"),
    scheduled_run("gpu_asks", "nvml"),
)


def test_nvml_checks_run_first_and_nvml_is_closed_after_them(make_harness: Callable[..., QueueHarness]) -> None:
    harness = make_harness(A, GPU_1, B, GPU_2)
    replies = harness.run_round()
    assert run_names(replies) == ["gpu_1", "gpu_2", "close_nvml", "a", "b"]
    assert {reply.outcome for reply in replies} == {Outcome.COMPLETED}
    assert harness.client.started_total == 1


def repeat_gpu_1(reply: Reply) -> list[RunName]:
    return [GPU_1.name] if reply.has_nvml_problem else []


def test_lost_gpu_repeats_other_nvml_checks_in_same_round(make_harness: Callable[..., QueueHarness]) -> None:
    harness = make_harness(A, GPU_1, GPU_QUERY, GPU_2, scenario="gpu.3.lost_after = 1", after=repeat_gpu_1)
    replies = harness.run_round()
    assert run_names(replies) == ["gpu_1", "gpu_asks", "gpu_2", "gpu_1", "close_nvml", "a"]
    assert [reply.outcome for reply in replies[:4]] == [Outcome.COMPLETED, Outcome.FAILED, *[Outcome.COMPLETED] * 2]
    assert harness.queue.deadline > harness.monotonic() + 1000, "the next round has its usual time"


def test_without_lost_gpu_no_check_runs_twice(make_harness: Callable[..., QueueHarness]) -> None:
    assert run_names(make_harness(A, GPU_1, GPU_QUERY, GPU_2, after=repeat_gpu_1).run_round()) == [
        *("gpu_1", "gpu_asks", "gpu_2", "close_nvml", "a")
    ]


def test_check_that_has_not_run_is_not_repeated(make_harness: Callable[..., QueueHarness]) -> None:
    harness = make_harness(GPU_QUERY, GPU_1, scenario="gpu.3.lost_after = 1", after=repeat_gpu_1)
    assert run_names(harness.run_round()) == ["gpu_asks", "gpu_1", "close_nvml"]


def test_hung_nvml_check_repeats_other_nvml_checks(make_harness: Callable[..., QueueHarness]) -> None:
    harness = make_harness(GPU_1, scheduled_run("hangs", "nvml", timeout=0.5), GPU_2, after=repeat_gpu_1)
    replies = harness.run_until(lambda: harness.round_ended)
    assert [(name_of(reply.request), reply.outcome) for reply in replies if reply.request.kind is Run] == [
        ("gpu_1", Outcome.COMPLETED),
        ("hangs", Outcome.TIMED_OUT),
        ("gpu_2", Outcome.STUCK),
        ("gpu_1", Outcome.STUCK),
    ]


def test_nvml_task_runs_while_nvml_is_open(make_harness: Callable[..., QueueHarness]) -> None:
    harness = make_harness(A, GPU_1)
    harness.queue.add_task(INVENTORY)
    assert run_names(harness.run_round()) == ["gpu_1", "inventory", "close_nvml", "a"]


def test_single_nvml_task_opens_and_closes_nvml(make_harness: Callable[..., QueueHarness]) -> None:
    harness = make_harness(A)
    harness.run_round()
    harness.queue.add_task(INVENTORY)
    assert run_names(harness.run_until(lambda: not harness.client.is_busy)) == ["inventory", "close_nvml"]


def test_equal_tasks_run_once_after_the_checks(make_harness: Callable[..., QueueHarness], tmp_path: Path) -> None:
    harness = make_harness(A, B)
    task = Request("state_dir", 60.0, LoadCopy(str(tmp_path), ()))
    harness.queue.add_task(task)
    harness.queue.add_task(task)
    assert run_names(harness.run_until(lambda: harness.round_ended and not harness.client.is_busy)) == [
        "a",
        "b",
        "load_copy",
    ]


def test_run_early_runs_single_check_on_time(make_harness: Callable[..., QueueHarness]) -> None:
    harness = make_harness(A, B)
    harness.run_round()
    started = harness.monotonic()
    harness.queue.run_early(A.name, started + 0.3)
    harness.queue.run_early(A.name, started + 60)
    assert harness.queue.deadline == pytest.approx(started + 0.3)
    assert run_names(harness.run_round()) == ["a"]
    assert 0.3 <= harness.monotonic() - started < 30


def test_run_all_now_runs_every_check(make_harness: Callable[..., QueueHarness]) -> None:
    harness = make_harness(A, GPU_1)
    harness.run_round()
    harness.queue.run_all_now()
    assert run_names(harness.run_round()) == ["gpu_1", "close_nvml", "a"]
    assert harness.queue.status.number == 2


def test_repeated_commands_share_a_round(make_harness: Callable[..., QueueHarness]) -> None:
    harness = make_harness(A)
    harness.run_round()
    harness.queue.run_after_command()
    assert run_names(harness.run_round()) == ["a"], "the first command has its round at once"
    for _ in range(50):
        harness.queue.run_after_command()
    assert harness.queue.deadline > harness.monotonic(), "the next commands wait"
    harness.clock_offset = MIN_REPEAT_SECONDS + 1
    assert run_names(harness.run_round()) == ["a"]
    assert harness.queue.status.number == 3
    assert harness.queue.deadline > harness.monotonic()


def test_event_storm_runs_check_at_limited_rate(
    make_harness: Callable[..., QueueHarness],
) -> None:
    harness = make_harness(A, B)
    harness.run_round()
    harness.clock_offset = MIN_REPEAT_SECONDS + 1
    harness.queue.run_after_event([A.name])
    first_start = harness.monotonic()
    assert run_names(harness.run_round()) == ["a"]
    last_end = harness.monotonic()
    for _ in range(1000):
        harness.queue.run_after_event([A.name])
        assert harness.step() == []
    assert first_start + MIN_REPEAT_SECONDS <= harness.queue.deadline <= last_end + MIN_REPEAT_SECONDS
    harness.clock_offset += MIN_REPEAT_SECONDS
    assert run_names(harness.run_round()) == ["a"]
    assert harness.queue.deadline > harness.monotonic() + 100, "all these events requested one run"


def test_round_without_time_left_skips_last_checks(
    make_harness: Callable[..., QueueHarness],
) -> None:
    harness = make_harness(A, scheduled_run("hangs", timeout=1000.0), B, round_timeout=100.0)
    earlier_replies = harness.run_until(
        lambda: (request := harness.client.request) is not None and name_of(request) == "hangs"
    )
    harness.clock_offset = 100.0
    harness.release_file.touch()
    first, slow, skipped = earlier_replies + harness.run_round()
    assert (first.outcome, slow.outcome) == (Outcome.COMPLETED, Outcome.COMPLETED)
    assert (skipped.outcome, skipped.seconds) == (Outcome.TIMED_OUT, 0.0)
    assert skipped.error == "the round ran out of time before this run"
    harness.queue.run_early(B.name, harness.monotonic())
    assert [reply.outcome for reply in harness.run_round()] == [Outcome.COMPLETED], "the next round has its own time"


def test_hung_nvml_blocks_only_nvml_checks_until_released(
    make_harness: Callable[..., QueueHarness], caplog: pytest.LogCaptureFixture
) -> None:
    harness = make_harness(A, scheduled_run("hangs", "nvml", timeout=0.3), scheduled_run("gpu_1", "nvml", timeout=0.3))
    by_name = dict(zip(run_names(replies := harness.run_round()), replies, strict=True))
    assert run_names(replies) == ["hangs", "gpu_1", "a"]
    assert by_name["hangs"].outcome is Outcome.TIMED_OUT
    assert by_name["gpu_1"].outcome is Outcome.STUCK
    assert by_name["a"].outcome is Outcome.COMPLETED
    assert list(harness.client.quarantined) == ["nvml"]

    assert harness.run_for(0.4) == []
    assert harness.wakes < 5, "waiting for a hung worker is no busy loop"

    with caplog.at_level(logging.INFO, "healthd"):
        harness.release(A, scheduled_run("hangs", "nvml"), GPU_1)
        released_replies = harness.run_round()
    assert run_names(released_replies) == ["hangs", "gpu_1", "close_nvml"]
    assert {reply.outcome for reply in released_replies} == {Outcome.COMPLETED}
    assert "the worker that hung in nvml has ended" in caplog.text


def test_check_slightly_over_timeout_is_not_repeated_at_once(make_harness: Callable[..., QueueHarness]) -> None:
    harness = make_harness(scheduled_run("hangs", "nvml", timeout=0.4))
    started = harness.monotonic()
    harness.run_round()
    harness.release_file.touch()
    harness.run_round()
    assert harness.monotonic() - started >= 0.8


def test_task_for_hung_nvml_waits_without_busy_loop(make_harness: Callable[..., QueueHarness]) -> None:
    harness = make_harness(scheduled_run("hangs", "nvml", timeout=0.3))
    harness.run_round()
    harness.queue.add_task(INVENTORY)
    assert harness.run_for(0.4) == []
    assert harness.wakes < 5
    harness.release(scheduled_run("hangs", "nvml"))
    assert run_names(harness.run_round()) == ["hangs", "inventory", "close_nvml"]


def test_newest_pending_task_per_kind_runs(make_harness: Callable[..., QueueHarness], tmp_path: Path) -> None:
    harness = make_harness(scheduled_run("slow"))
    harness.step()
    path = tmp_path / "healthd.prom"
    for number in range(100):
        harness.queue.add_task(Request("textfile", 60.0, WriteFile(str(path), f"up {number}")))
    assert run_names(harness.run_until(lambda: harness.round_ended and not harness.client.is_busy)) == [
        "slow",
        "write_file",
    ]
    assert path.read_text() == "up 99"


def test_idle_queue_does_not_wake(make_harness: Callable[..., QueueHarness]) -> None:
    harness = make_harness(A, GPU_1)
    harness.run_round()
    assert harness.queue.deadline > harness.monotonic() + 100
    assert harness.run_for(0.5) == []
    assert harness.wakes < 4


def test_queue_without_checks_has_no_deadline(make_harness: Callable[..., QueueHarness]) -> None:
    harness = make_harness()
    assert harness.step() == []
    assert harness.queue.deadline == float("inf")


def test_round_ends_if_no_worker_starts(
    make_harness: Callable[..., QueueHarness], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "executable", "/nonexistent/python")
    harness = make_harness(A, GPU_1)
    assert [reply.outcome for reply in harness.run_round()] == [Outcome.FAILED, Outcome.FAILED]
    assert harness.queue.deadline > harness.monotonic() + 100


def test_drop_unconfigured_removes_pending_run(make_harness: Callable[..., QueueHarness]) -> None:
    harness = make_harness(scheduled_run("slow"), A, B)
    assert harness.step() == []
    harness.queue.run_early(A.name, harness.monotonic())
    harness.scheduled = [scheduled_run("slow"), B]
    harness.queue.drop_unconfigured([("slow", ""), ("b", "")])
    assert run_names(harness.run_round()) == ["slow", "b"]


def test_check_with_short_interval_repeats(make_harness: Callable[..., QueueHarness]) -> None:
    harness = make_harness(scheduled_run("a", interval=0.2), B)
    started = harness.monotonic()
    replies = harness.run_until(lambda: harness.queue.status.number == 5)
    assert harness.monotonic() - started >= 0.6
    assert run_names(replies).count("b") == 1
    assert run_names(replies).count("a") in (4, 5)
    assert harness.wakes < 40


def test_status_describes_round(make_harness: Callable[..., QueueHarness]) -> None:
    harness = make_harness(A)
    started = time.time()
    harness.run_round()
    status = harness.queue.status
    assert status.number == 1
    assert started <= status.started <= time.time()
    assert 0 < status.seconds <= time.time() - started
    assert status.next_at > time.time() + 100


def test_round_longer_than_interval_ends(tmp_path):
    """Runs that become due again during a round do not extend it."""
    harness = QueueHarness(tmp_path, scheduled_run("slow", interval=0.05), scheduled_run("a", interval=0.05))
    try:
        replies = harness.run_until(lambda: harness.queue.status.number >= 3)
        assert harness.round_ended
        assert {reply.outcome for reply in replies} == {Outcome.COMPLETED}
        assert 4 <= len(replies) <= 5  # two rounds of both checks, and the start of the third
    finally:
        harness.client.close(5.0)


class HangingClient:
    """A client whose every run hangs until its time-out. The hung worker has ended at the next step."""

    nvml_open = False

    def __init__(self) -> None:
        self.now = 0.0
        self.request: Request | None = None
        self.deadline = NEVER_REPEATED
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
@pytest.mark.parametrize("repeats_others", [False, True])
def test_checks_that_always_time_out_do_not_extend_round(resource: str, interval: float, repeats_others: bool) -> None:
    client = HangingClient()
    scheduled = [scheduled_run(name, resource, interval, timeout=10.0) for name in ("a", "b", "c")]

    def repeat_others(reply: Reply) -> list[RunName]:
        return [run.name for run in scheduled if run.name != reply.run] if repeats_others else []

    queue = WorkerQueue(
        client,
        "n1",
        100_000.0,
        lambda: scheduled,
        lambda wanted: Run(wanted.check, "", {}, boot_id="b"),
        lambda: client.now,
        lambda: client.now,
        repeat_others,
    )
    ends = []
    for _ in range(400):
        if queue.step().round_ended:
            ends.append(queue.status.seconds)
        client.now = max(queue.deadline, client.now + 0.001)
    assert len(ends) > 10
    assert max(ends) <= 2 * 3 * 10.0 + 1, "each check runs once, and at most once more"
