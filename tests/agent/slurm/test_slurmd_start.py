"""Tests of the detection of a started slurmd: within a second, while it is watched."""

from __future__ import annotations

from pathlib import Path

import pytest

from healthd.agent.slurm.driver import POLL_SECONDS, SlurmdStartDetector


class FakeNode:
    def __init__(self, root: Path) -> None:
        self.root, self.now = root, 100.0
        self.start_process("1", "systemd")
        self.slurmd = SlurmdStartDetector(str(root), lambda: self.now)

    def start_process(self, pid: str, name: str) -> None:
        (self.root / "proc" / pid).mkdir(parents=True)
        (self.root / "proc" / pid / "comm").write_text(f"{name}\n")

    def step_later(self) -> bool:
        self.now += POLL_SECONDS
        return self.slurmd.step()


@pytest.fixture
def node(tmp_path: Path) -> FakeNode:
    return FakeNode(tmp_path)


def test_slurmd_start_is_detected_once(node: FakeNode) -> None:
    node.slurmd.watch(True)
    assert not node.step_later()
    node.start_process("7", "slurmstepd")
    assert not node.step_later()
    node.start_process("8", "slurmd")
    assert [node.slurmd.step(), node.step_later(), node.step_later()] == [False, True, False]


def test_running_slurmd_is_not_detected(node: FakeNode) -> None:
    node.start_process("8", "slurmd")
    node.slurmd.watch(True)
    assert not node.step_later()


def test_unwatched_slurmd_is_not_polled(node: FakeNode) -> None:
    assert node.slurmd.deadline == float("inf")
    node.slurmd.watch(True)
    node.slurmd.watch(False)
    node.start_process("8", "slurmd")
    assert (node.step_later(), node.slurmd.deadline) == (False, float("inf"))


def test_ended_process_and_missing_proc_are_ignored(node: FakeNode, tmp_path: Path) -> None:
    node.slurmd.watch(True)
    (tmp_path / "proc" / "9").mkdir()
    assert not node.step_later()
    assert not SlurmdStartDetector(str(tmp_path / "nowhere"), lambda: node.now).step()
