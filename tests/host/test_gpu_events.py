"""The process that receives GPU events: when NVML is open, and the limits of what it sends."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from fakes import stopped_clock

from healthd.host.gpu_events import (
    ALIVE_SECONDS,
    JOBS_SECONDS,
    LIMIT_SECONDS,
    MAX_EVENTS,
    NO_CGROUPS,
    REPEAT_SECONDS,
    RETRY_SECONDS,
    JobGpuFinder,
    JobGpus,
    Limit,
    Receiver,
    admit,
)
from healthd.nvidia.fake_nvml import open_fake
from healthd.nvidia.gpu_event import GpuEvent
from healthd.nvidia.nvml import Nvml

CLOCK = 1.8e9
GPU_3, GPU_4 = "0000:61:00.0", "0000:9d:00.0"  # of the scenario's profile


class Node:
    """A node with a scenario file. Jobs have the GPUs in `found` open."""

    def __init__(self, folder: Path) -> None:
        self.file = folder / "gpus.toml"
        self.found = JobGpus(frozenset({GPU_3}))
        self.sent: list[Mapping[str, Any]] = []
        self.opened = 0
        self.receiver = Receiver(self._open, lambda: self.found, self.sent.append)

    def _open(self) -> Nvml:
        self.opened += 1
        return open_fake(str(self.file))

    def scenario(self, text: str) -> None:
        self.file.write_text(f'profile = "dgx-h100"\n{text}')

    def gpus_with_handle(self) -> set[int]:
        events = self.receiver._events
        assert events is not None
        return set(events._set.masks)

    def step(self, now: float) -> None:
        self.receiver.step(now, CLOCK + now)

    def events(self) -> list[tuple[str, tuple[int, ...]]]:
        return [(line["event"]["kind"], tuple(line["event"]["xids"])) for line in self.sent if "event" in line]


@pytest.fixture
def node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Node:
    monkeypatch.setattr("healthd.nvidia.fake_nvml.time.sleep", lambda seconds: None)  # the wait for an event
    made = Node(tmp_path)
    made.scenario('gpu.3.events = [{kind = "xid", xid = 79}, {xid = 63}]')
    return made


def test_nvml_is_open_only_while_a_job_uses_a_gpu(node: Node) -> None:
    gpus, node.found = node.found, JobGpus()
    node.step(100)
    assert (node.receiver.is_open, node.opened) == (False, 0)
    node.found = gpus
    node.step(100 + JOBS_SECONDS)
    assert node.receiver.is_open
    node.found = JobGpus()
    node.step(100 + 2 * JOBS_SECONDS)
    assert (node.receiver.is_open, node.opened) == (False, 1)


def test_only_gpus_of_jobs_are_open(node: Node) -> None:
    """A GPU that no job uses can be reset, so it must be closed."""
    node.scenario('gpu.3.events = [{kind = "xid", xid = 79}]\ngpu.4.events = [{kind = "xid", xid = 63}]')
    for now in (100, 101):
        node.step(now)
    assert node.events() == [("xid", (79,))]
    assert node.gpus_with_handle() == {3}
    node.found = JobGpus(frozenset({GPU_3, GPU_4}))
    for now in (105, 106, 107):
        node.step(now)
    assert node.opened == 2
    assert ("xid", (63,)) in node.events()
    assert node.gpus_with_handle() == {3, 4}
    node.step(110)
    assert node.opened == 2, "unchanged"


def test_gpu_that_does_not_answer_does_not_prevent_events_of_others(node: Node) -> None:
    node.scenario('gpu.4.lost = true\ngpu.4.errors = { nvmlDeviceGetHandleByPciBusId = "GpuIsLost" }')
    node.found = JobGpus(frozenset({GPU_3, GPU_4}))
    for now in (100, 105, 110):
        node.step(now)
    assert (node.receiver.is_open, node.opened) == (True, 1)
    node.found = JobGpus(frozenset({GPU_4}))
    node.step(115)
    assert not node.receiver.is_open
    assert "nvmlDeviceGetHandleByPciBusId" in node.sent[-1]["problem"]


def test_problem_of_the_search_is_reported_until_it_ends(node: Node) -> None:
    node.found = JobGpus(problem=NO_CGROUPS)
    for now in (100, 105, 110):
        node.step(now)
    node.found = JobGpus()
    node.step(115)
    assert [line["problem"] for line in node.sent if "problem" in line] == [NO_CGROUPS, ""]


def test_events_are_sent_with_the_time_at_which_there_was_none(node: Node) -> None:
    for now in (100, 101, 102):
        node.step(now)
    assert node.events() == [("xid", (79,)), ("operational", (63,))]
    assert {line["since"] for line in node.sent if "event" in line} == {CLOCK + 100}
    assert node.receiver._empty_at == CLOCK + 102


def test_failure_of_nvml_is_reported_once_and_tried_again(node: Node) -> None:
    node.scenario("missing_functions = ['nvmlEventSetCreate']")
    for now in range(100, 200, 5):
        node.step(now)
    problems = [line["problem"] for line in node.sent if "problem" in line]
    assert (len(problems), node.opened) == (1, 2)
    assert "nvmlEventSetCreate" in problems[0]
    node.scenario("")
    node.step(200 + RETRY_SECONDS)
    assert {"problem": ""} in node.sent
    assert node.receiver.is_open


def test_error_of_the_wait_closes_nvml(node: Node) -> None:
    node.scenario("missing_functions = ['nvmlEventSetWait_v3']")
    node.step(100)
    assert not node.receiver.is_open
    assert "nvmlEventSetWait_v3" in node.sent[-1]["problem"]


def test_process_shows_that_it_is_alive(node: Node) -> None:
    node.found = JobGpus()
    for now in range(100, 100 + 3 * int(ALIVE_SECONDS)):
        node.step(now)
    assert node.sent == [{}] * 3


def many(count: int, at: Callable[[int], float], event: Callable[[int], GpuEvent]) -> tuple[Limit, int]:
    limit, sent = Limit(), 0
    for number in range(count):
        limit, is_admitted = admit(limit, event(number), at(number))
        sent += is_admitted
    return limit, sent


def test_flood_is_limited_and_counted() -> None:
    limit, sent = many(1000, lambda n: 100 + n / 1000, lambda n: GpuEvent("xid", "", (n,)))
    assert (sent, limit.dropped) == (MAX_EVENTS, 1000 - MAX_EVENTS)
    limit, is_admitted = admit(limit, GpuEvent("xid", "", (1,)), 100 + LIMIT_SECONDS)
    assert (is_admitted, limit.dropped) == (True, 1000 - MAX_EVENTS)
    assert len(limit.recent) <= MAX_EVENTS


def test_repeats_within_a_second_are_not_sent_and_not_dropped() -> None:
    limit, sent = many(1000, lambda n: 100 + 3 * REPEAT_SECONDS * n / 1000, lambda n: GpuEvent("xid", "", (79,)))
    assert (sent, limit.dropped) == (3, 0)


def test_clock_that_goes_back_does_not_stop_events() -> None:
    limit, _ = admit(Limit(), GpuEvent("xid", "", (79,)), 1000.0)
    assert admit(limit, GpuEvent("xid", "", (79,)), 500.0)[1]


def cgroups(root: Path, *pids: int) -> str:
    """Create files like those of a Slurm node with cgroup/v2, with these processes in job 7."""
    scope = root / "sys/fs/cgroup/system.slice/slurmstepd.scope"
    task = scope / "job_7/step_0/user/task_0"
    task.mkdir(parents=True, exist_ok=True)
    (task / "cgroup.procs").write_text("".join(f"{pid}\n" for pid in pids))
    for number, pci in enumerate(("0000:43:00.0", GPU_3)):
        folder = root / f"proc/driver/nvidia/gpus/{pci.upper()}"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "information").write_text(f"Model: \t\t NVIDIA H100\nDevice Minor: \t {number}\n")
    return str(root)


def open_file(root: Path, pid: int, target: str) -> None:
    folder = root / f"proc/{pid}/fd"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / str(len(list(folder.iterdir())))).symlink_to(target)


def test_finder_returns_addresses_of_open_gpus(tmp_path: Path) -> None:
    finder = JobGpuFinder(cgroups(tmp_path, 5, 6), stopped_clock)
    open_file(tmp_path, 5, "/dev/null")
    assert finder.find() == JobGpus()
    open_file(tmp_path, 6, "/dev/nvidia1")
    assert finder.find() == JobGpus(frozenset({GPU_3}))
    cgroups(tmp_path)
    assert finder.find() == JobGpus()


def test_finder_reports_gpu_without_address(tmp_path: Path) -> None:
    finder = JobGpuFinder(cgroups(tmp_path, 5), stopped_clock)
    open_file(tmp_path, 5, "/dev/nvidia9")
    found = finder.find()
    assert found.pcis == frozenset()
    assert "/dev/nvidia9" in found.problem


@pytest.mark.parametrize(("name", "problem"), [("slurmstepd", NO_CGROUPS), ("slurmd", "")])
def test_finder_reports_job_without_cgroup(tmp_path: Path, name: str, problem: str) -> None:
    (tmp_path / "proc/7").mkdir(parents=True)
    (tmp_path / "proc/7/comm").write_text(f"{name}\n")
    finder = JobGpuFinder(str(tmp_path), stopped_clock)
    assert finder.find() == JobGpus(problem=problem)
    cgroups(tmp_path, 5)
    open_file(tmp_path, 5, "/dev/nvidia1")
    assert finder.find() == JobGpus(frozenset({GPU_3}))


def test_idle_node_with_cgroups_has_no_problem(tmp_path: Path) -> None:
    finder = JobGpuFinder(cgroups(tmp_path), stopped_clock)
    (tmp_path / "proc/7").mkdir(parents=True)
    (tmp_path / "proc/7/comm").write_text("slurmstepd\n")  # "slurmstepd infinity" of cgroup/v2
    assert finder.find() == JobGpus()
