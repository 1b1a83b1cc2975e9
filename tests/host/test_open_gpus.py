"""Search for open GPUs: no change because of an incomplete search, and a bounded cost."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from fakes import stopped_clock

from healthd.host import open_gpus
from healthd.host.open_gpus import SEARCH_SECONDS, OpenGpus, find_open_gpus


class Node:
    """A node with processes of job 7. Each inspection of a process takes `seconds`."""

    def __init__(self, root: Path, monkeypatch: pytest.MonkeyPatch, seconds: float) -> None:
        self.root, self.now, self.inspections = root, 0.0, 0
        self.result = OpenGpus()
        read = open_gpus.gpu_numbers

        def timed(pid: int, root: str) -> list[str]:
            self.now += seconds
            self.inspections += 1
            return list(read(pid, root))

        monkeypatch.setattr(open_gpus, "gpu_numbers", timed)

    def run(self, *pids: int) -> None:
        folder = self.root / "sys/fs/cgroup/system.slice/slurmstepd.scope/job_7/step_0/user/task_0"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "cgroup.procs").write_text("".join(f"{pid}\n" for pid in pids))
        for pid in pids:
            (self.root / f"proc/{pid}/fd").mkdir(parents=True, exist_ok=True)

    def open(self, pid: int, minor: int) -> None:
        (self.root / f"proc/{pid}/fd/{minor + 10}").symlink_to(f"/dev/nvidia{minor}")

    def close(self, pid: int, minor: int) -> None:
        (self.root / f"proc/{pid}/fd/{minor + 10}").unlink()

    def search(self) -> set[int]:
        self.result = find_open_gpus(str(self.root), self.result, lambda: self.now)
        return set(self.result.minors)


@pytest.fixture
def make(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[float], Node]:
    return lambda seconds: Node(tmp_path, monkeypatch, seconds)


def test_gpu_of_the_last_of_many_processes_is_found_and_stays_found(make: Callable[[float], Node]) -> None:
    node = make(SEARCH_SECONDS / 100)
    node.run(*range(1, 1501))
    node.open(1500, 0)
    searches = next(number for number in range(1, 100) if node.search() == {0})
    assert searches <= 15
    before = node.inspections
    assert [node.search() for _ in range(40)] == [{0}] * 40, "NVML stays open"
    assert node.inspections - before <= 40 * 34, "within the limit, and the user in each search"


def test_gpu_counts_as_open_until_all_processes_were_inspected(make: Callable[[float], Node]) -> None:
    node = make(SEARCH_SECONDS / 10)
    node.run(*range(1, 41))
    node.open(1, 0)
    assert node.search() == {0}
    node.close(1, 0)
    node.open(1, 2)
    node.open(30, 0)  # another process of the job
    found = [node.search() for _ in range(6)]
    assert found == [{0, 2}] * 6
    assert node.result.closed == frozenset()
    node.close(30, 0)
    found = [node.search() for _ in range(6)]
    assert (found[0], found[-1]) == ({0, 2}, {2})
    assert node.result.waiting == frozenset()


def test_new_process_is_inspected_before_the_others(make: Callable[[float], Node]) -> None:
    node = make(SEARCH_SECONDS / 100)
    node.run(*range(1, 1001))
    node.open(1, 0)
    for _ in range(20):
        node.search()
    node.run(*range(1, 1011))
    node.open(1010, 3)
    assert node.search() == {0, 3}


def test_old_process_that_opens_a_gpu_is_found_in_turn(make: Callable[[float], Node]) -> None:
    node = make(SEARCH_SECONDS / 100)
    node.run(*range(1, 301))
    node.open(1, 0)
    for _ in range(5):
        node.search()
    node.open(200, 3)
    assert any(node.search() == {0, 3} for _ in range(12))


def test_small_job_is_searched_completely(make: Callable[[float], Node]) -> None:
    node = make(SEARCH_SECONDS / 100)
    node.run(1, 2, 3)
    node.open(2, 0)
    node.open(3, 1)
    assert node.search() == {0, 1}
    node.close(2, 0)
    assert node.search() == {1}
    node.run()
    assert (node.search(), node.result) == (set(), OpenGpus())


def test_process_that_has_ended_is_no_user(make: Callable[[float], Node]) -> None:
    node = make(0.0)
    node.run(1, 2)
    node.open(1, 0)
    assert node.search() == {0}
    node.run(2)  # its pid may belong to a process outside the job
    assert node.search() == set()


def test_incomplete_list_of_processes_changes_nothing(make: Callable[[float], Node]) -> None:
    node = make(0.0)
    node.run(1, 2)
    node.open(1, 0)
    assert node.search() == {0}
    node.run(2)
    ticks = iter(range(1000))
    node.result = find_open_gpus(str(node.root), node.result, lambda: float(next(ticks)))
    assert node.result.minors == {0}
    assert node.search() == set()


def test_files_with_other_names_are_no_gpus(tmp_path: Path, make: Callable[[float], Node]) -> None:
    node = make(0.0)
    node.run(1)
    for number, name in enumerate(("nvidiactl", "nvidia-uvm", "nvidia12345", "nvidia\u0663")):
        (tmp_path / f"proc/1/fd/{number}").symlink_to(f"/dev/{name}")
    assert find_open_gpus(str(tmp_path), OpenGpus(), stopped_clock).minors == frozenset()
