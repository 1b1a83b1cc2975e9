"""Tests of the job of an event: the job of the process in the line, otherwise the jobs with the GPU open."""

from __future__ import annotations

import os
import select
import stat
import time
from collections.abc import Sequence
from pathlib import Path

import pytest
from msgspec.structs import replace

from healthd.agent.kernel_log.coalesce import with_jobs
from healthd.agent.slurm.event_jobs import CGROUP_INTERVAL_SECONDS, QUERY_INTERVAL_SECONDS, EventJobFinder
from healthd.common.model import Gpu, KernelEvent
from tests.host.test_job_processes import V1, V2_STEP, cgroups, holds

PCI = "0000:61:00.0"
GPUS = (Gpu("0000:1b:00.0", 0, minor=0), Gpu(PCI, 3, minor=5), Gpu("0000:5e:00.0", 4))
NOW = 1000.0


def event(
    pid: int | None = 42, pci: str = PCI, at: float = NOW, sequence: int = 1, history: bool = False
) -> KernelEvent:
    return KernelEvent(
        "xid", "13", pci, at, pid=pid, fields=(("unit", "x"),), last_time=at, sequence=sequence, history=history
    )


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


def source(root: Path, clock: Clock) -> EventJobFinder:
    return EventJobFinder(str(root), "n1", clock)


def named(source: EventJobFinder, *events: KernelEvent, gpus: Sequence[Gpu] = GPUS, now: float = NOW + 1) -> list[str]:
    found = source.add_jobs(events, {event.sequence for event in events}, gpus, now)
    return [dict(event.fields).get("job", "") for event in found]


def process(root: Path, pid: int, cgroup: str, *links: str) -> None:
    holds(root, pid, *links)
    (root / f"proc/{pid}/cgroup").write_text(cgroup)


def test_an_event_gets_the_job_of_its_process_while_that_is_there(tmp_path: Path, clock: Clock) -> None:
    process(tmp_path, 42, V1)
    made = source(tmp_path, clock)
    (found,) = made.add_jobs([event()], {1}, GPUS, NOW + 1)
    assert found.fields == (("unit", "x"), ("job", "4711"))
    assert made.add_jobs([found], {1}, GPUS, NOW + 2) == (found,)
    assert named(made, event(pid=43), event(pid=None), event(history=True), event(at=900.0)) == ["", "", "", ""]
    assert made.add_jobs([event()], (), GPUS, NOW + 1) == (event(),), "not among the touched events"


@pytest.fixture
def shared(tmp_path: Path) -> Path:
    """Create two jobs on GPU 3 (device node 5). One job also uses GPU 0."""
    other = V2_STEP.replace("job_12", "job_13")
    cgroups(tmp_path, **{f"{V2_STEP}/user/task_0": "100 101", f"{other}/user/task_0": "102"})
    process(tmp_path, 100, f"0::/{V2_STEP}/user/task_0\n", "/dev/nvidiactl", "/dev/nvidia5")
    process(tmp_path, 101, f"0::/{V2_STEP}/user/task_0\n", "/dev/nvidia0")
    process(tmp_path, 102, f"0::/{other}/user/task_0\n", "/dev/nvidia5")
    process(tmp_path, 103, "0::/system.slice/nvidia-dcgm.service\n", "/dev/nvidia5", "/dev/nvidia0")
    return tmp_path


def test_a_line_that_can_be_forged_accuses_nobody(tmp_path: Path, clock: Clock) -> None:
    process(tmp_path, 42, V1)
    seen = event(sequence=2)
    assert named(source(tmp_path, clock), replace(event(), observed=True), seen) == ["", "4711"]


def test_without_a_process_in_the_line_the_jobs_that_hold_the_gpu_are_named(shared: Path, clock: Clock) -> None:
    lost, first = event(pid=None), event(pid=None, pci="0000:1b:00.0", sequence=2)
    assert named(source(shared, clock), lost, first) == ["12,13", "12"]
    unknown = event(pid=None, pci="0000:5e:00.0", sequence=3)
    no_gpu = event(pid=None, pci="0000:aa:00.0", sequence=4)
    assert named(source(shared, clock), unknown, no_gpu) == ["", ""]


def test_of_a_process_that_is_gone_the_gpu_tells_the_job_and_one_of_no_job_accuses_none(
    shared: Path, clock: Clock
) -> None:
    assert named(source(shared, clock), event(pid=99), event(pid=103, sequence=2)) == ["12,13", ""]
    assert named(source(shared, clock), event(pid=102)) == ["13"]


def test_a_storm_does_not_walk_the_cgroups_in_a_storm(shared: Path, clock: Clock) -> None:
    made = source(shared, clock)
    assert named(made, event(pid=None)) == ["12,13"]
    (shared / "proc/102/fd/0").unlink()
    assert named(made, event(pid=None)) == ["12,13"]
    clock.now += CGROUP_INTERVAL_SECONDS
    assert named(made, event(pid=None)) == ["12"]


# --- queries to Slurm on a node without cgroups


@pytest.fixture
def scontrol(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Create a scontrol that prints the content of a file and logs its arguments."""
    program = tmp_path / "bin/scontrol"
    program.parent.mkdir()
    program.write_text(f'#!/bin/sh\necho "$*" >> {tmp_path}/asked\nexec cat {tmp_path}/listed\n')
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", f"{program.parent}:{os.environ['PATH']}")
    return tmp_path


LISTED = """\
PID      JOBID    STEPID   LOCALID GLOBALID
100      12       batch    0       0
101      12       0        -       -
-1       13       0        0       0
102      14       0        0       0
"""


def answered(
    made: EventJobFinder, events: Sequence[KernelEvent], now: float = NOW + 1, may_ask: bool = True
) -> dict[int, str]:
    end = time.monotonic() + 120
    while time.monotonic() < end:
        told = made.step(events, GPUS, now, may_ask)
        waits = [descriptor for descriptor, _ in made.waits()]
        if told or not waits:
            return told
        select.select(waits, [], [], 0.05)
    raise AssertionError("no answer")


def test_where_slurm_uses_no_cgroups_listpids_tells_the_jobs_a_moment_later(scontrol: Path) -> None:
    (scontrol / "listed").write_text(LISTED)
    for pid in (100, 101, 102, 50):
        process(scontrol, pid, "0::/user.slice\n", *(["/dev/nvidia5"] if pid in (101, 102, 50) else []))
    events = (event(pid=None), event(pid=100, sequence=2), event(pid=50, sequence=3), event(pid=99, sequence=4))
    made = EventJobFinder(str(scontrol), "n1", time.monotonic)
    assert named(made, *events) == ["", "", "", ""]
    jobs = answered(made, events)
    assert jobs == {1: "12,14", 2: "12", 4: "12,14"}
    assert [dict(e.fields).get("job") for e in with_jobs(events, jobs)] == ["12,14", "12", None, "12,14"]
    assert (scontrol / "asked").read_text() == "listpids * n1\n"
    assert not list(made.waits())


def test_slurm_is_asked_again_only_after_a_while_and_then_for_all_that_waits(scontrol: Path) -> None:
    (scontrol / "listed").write_text(LISTED)
    process(scontrol, 100, "0::/\n")
    made = EventJobFinder(str(scontrol), "n1", time.monotonic)
    began = time.monotonic()
    named(made, event(pid=7))
    assert answered(made, [event(pid=7)]) == {}
    second = event(pid=100, sequence=2)
    named(made, second)
    assert made.step([second], GPUS, NOW + 1, True) == {}
    assert not list(made.waits())
    assert began + QUERY_INTERVAL_SECONDS <= made.deadline <= time.monotonic() + QUERY_INTERVAL_SECONDS
    time.sleep(max(0.0, made.deadline - time.monotonic()) + 0.01)
    assert answered(made, [second]) == {2: "12"}
    assert (scontrol / "asked").read_text().count("listpids") == 2


def test_an_event_that_waited_too_long_is_not_asked_about(scontrol: Path) -> None:
    (scontrol / "listed").write_text(LISTED)
    made = EventJobFinder(str(scontrol), "n1", time.monotonic)
    named(made, event(pid=7))
    assert made.step([event(pid=7)], GPUS, NOW + 60, True) == {}
    assert not list(made.waits())
    assert made.deadline == float("inf")


def test_in_mode_observe_slurm_is_not_asked(scontrol: Path, clock: Clock) -> None:
    made = source(scontrol, clock)
    named(made, event(pid=7))
    assert answered(made, [event(pid=7)], may_ask=False) == {}
    assert not (scontrol / "asked").exists()


@pytest.mark.parametrize("said", ["", "No job steps exist on this node.\n", "\x00\n1 2 3\n", "PID JOBID\n5\n"])
def test_whatever_scontrol_prints_accuses_nobody(scontrol: Path, said: str) -> None:
    (scontrol / "listed").write_text(said)
    made = EventJobFinder(str(scontrol), "n1", time.monotonic)
    named(made, event(pid=7), event(pid=None, sequence=2))
    assert answered(made, [event(pid=7), event(pid=None, sequence=2)]) == {}


def test_a_node_without_slurm_has_no_jobs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    made = EventJobFinder(str(tmp_path), "n1", time.monotonic)
    assert named(made, replace(event(), pid=7)) == [""]
    assert answered(made, [event(pid=7)]) == {}
