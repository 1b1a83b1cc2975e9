"""Tests of the detection of a started slurmd: within a second, while it is watched."""

from __future__ import annotations

from pathlib import Path

import pytest

from healthd.agent.slurm.driver import POLL_SECONDS, SlurmdStartDetector


class Node:
    def __init__(self, root: Path) -> None:
        self.root, self.now = root, 100.0
        self.starts("1", "systemd")
        self.slurmd = SlurmdStartDetector(str(root), lambda: self.now)

    def starts(self, pid: str, name: str) -> None:
        (self.root / "proc" / pid).mkdir(parents=True)
        (self.root / "proc" / pid / "comm").write_text(f"{name}\n")

    def later(self) -> bool:
        self.now += POLL_SECONDS
        return self.slurmd.step()


@pytest.fixture
def node(tmp_path: Path) -> Node:
    return Node(tmp_path)


def test_a_slurmd_that_is_started_is_noticed_once(node: Node) -> None:
    node.slurmd.watch(True)
    assert not node.later()
    node.starts("7", "slurmstepd")
    assert not node.later()
    node.starts("8", "slurmd")
    assert [node.slurmd.step(), node.later(), node.later()] == [False, True, False]


def test_one_that_runs_already_is_no_news(node: Node) -> None:
    node.starts("8", "slurmd")
    node.slurmd.watch(True)
    assert not node.later()


def test_nobody_looks_unless_it_is_wanted(node: Node) -> None:
    assert node.slurmd.deadline == float("inf")
    node.slurmd.watch(True)
    node.slurmd.watch(False)
    node.starts("8", "slurmd")
    assert (node.later(), node.slurmd.deadline) == (False, float("inf"))


def test_a_process_that_is_gone_again_or_no_processes_at_all_are_nothing(node: Node, tmp_path: Path) -> None:
    node.slurmd.watch(True)
    (tmp_path / "proc" / "9").mkdir()
    assert not node.later()
    assert not SlurmdStartDetector(str(tmp_path / "nowhere"), lambda: node.now).step()
