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
from tests.host.test_job_processes import V1, V2_STEP, cgroups, open_descriptors

PCI = "0000:61:00.0"
GPUS = (Gpu("0000:1b:00.0", 0, minor=0), Gpu(PCI, 3, minor=5), Gpu("0000:5e:00.0", 4))
NOW = 1000.0


def event(
    pid: int | None = 42, pci: str = PCI, timestamp: float = NOW, sequence: int = 1, history: bool = False
) -> KernelEvent:
    return KernelEvent(
        "xid",
        "13",
        pci,
        timestamp,
        pid=pid,
        fields=(("unit", "x"),),
        last_time=timestamp,
        sequence=sequence,
        history=history,
    )


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


def make_finder(root: Path, clock: Clock) -> EventJobFinder:
    return EventJobFinder(str(root), "n1", clock)


def add_jobs(
    finder: EventJobFinder, *events: KernelEvent, gpus: Sequence[Gpu] = GPUS, now: float = NOW + 1
) -> list[str]:
    with_jobs_added = finder.add_jobs(events, {event.sequence for event in events}, gpus, now)
    return [dict(event.fields).get("job", "") for event in with_jobs_added]


def add_process(root: Path, pid: int, cgroup: str, *links: str) -> None:
    open_descriptors(root, pid, *links)
    (root / f"proc/{pid}/cgroup").write_text(cgroup)


def test_add_jobs_names_job_with_process(tmp_path: Path, clock: Clock) -> None:
    add_process(tmp_path, 42, V1)
    finder = make_finder(tmp_path, clock)
    (event_with_job,) = finder.add_jobs([event()], {1}, GPUS, NOW + 1)
    assert event_with_job.fields == (("unit", "x"), ("job", "4711"))
    assert finder.add_jobs([event_with_job], {1}, GPUS, NOW + 2) == (event_with_job,)
    assert add_jobs(finder, event(pid=43), event(pid=None), event(history=True), event(timestamp=900.0)) == [
        "",
        "",
        "",
        "",
    ]
    assert finder.add_jobs([event()], (), GPUS, NOW + 1) == (event(),), "not among the touched events"


@pytest.fixture
def two_jobs_on_gpu(tmp_path: Path) -> Path:
    """Create two jobs on GPU 3 (device node 5). One job also uses GPU 0."""
    other_step = V2_STEP.replace("job_12", "job_13")
    cgroups(tmp_path, **{f"{V2_STEP}/user/task_0": "100 101", f"{other_step}/user/task_0": "102"})
    add_process(tmp_path, 100, f"0::/{V2_STEP}/user/task_0\n", "/dev/nvidiactl", "/dev/nvidia5")
    add_process(tmp_path, 101, f"0::/{V2_STEP}/user/task_0\n", "/dev/nvidia0")
    add_process(tmp_path, 102, f"0::/{other_step}/user/task_0\n", "/dev/nvidia5")
    add_process(tmp_path, 103, "0::/system.slice/nvidia-dcgm.service\n", "/dev/nvidia5", "/dev/nvidia0")
    return tmp_path


def test_add_jobs_ignores_observed_event(tmp_path: Path, clock: Clock) -> None:
    add_process(tmp_path, 42, V1)
    proven_event = event(sequence=2)
    assert add_jobs(make_finder(tmp_path, clock), replace(event(), observed=True), proven_event) == ["", "4711"]


def test_add_jobs_without_process_names_jobs_on_gpu(two_jobs_on_gpu: Path, clock: Clock) -> None:
    on_gpu_3, on_gpu_0 = event(pid=None), event(pid=None, pci="0000:1b:00.0", sequence=2)
    assert add_jobs(make_finder(two_jobs_on_gpu, clock), on_gpu_3, on_gpu_0) == ["12,13", "12"]
    unknown = event(pid=None, pci="0000:5e:00.0", sequence=3)
    no_gpu = event(pid=None, pci="0000:aa:00.0", sequence=4)
    assert add_jobs(make_finder(two_jobs_on_gpu, clock), unknown, no_gpu) == ["", ""]


def test_add_jobs_names_jobs_on_gpu_for_ended_process(two_jobs_on_gpu: Path, clock: Clock) -> None:
    assert add_jobs(make_finder(two_jobs_on_gpu, clock), event(pid=99), event(pid=103, sequence=2)) == ["12,13", ""]
    assert add_jobs(make_finder(two_jobs_on_gpu, clock), event(pid=102)) == ["13"]


def test_add_jobs_reads_cgroups_at_limited_rate(two_jobs_on_gpu: Path, clock: Clock) -> None:
    finder = make_finder(two_jobs_on_gpu, clock)
    assert add_jobs(finder, event(pid=None)) == ["12,13"]
    (two_jobs_on_gpu / "proc/102/fd/0").unlink()
    assert add_jobs(finder, event(pid=None)) == ["12,13"]
    clock.now += CGROUP_INTERVAL_SECONDS
    assert add_jobs(finder, event(pid=None)) == ["12"]


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


LISTPIDS_OUTPUT = """\
PID      JOBID    STEPID   LOCALID GLOBALID
100      12       batch    0       0
101      12       0        -       -
-1       13       0        0       0
102      14       0        0       0
"""


def step_until_answered(
    finder: EventJobFinder, events: Sequence[KernelEvent], now: float = NOW + 1, may_query: bool = True
) -> dict[int, str]:
    end = time.monotonic() + 120
    while time.monotonic() < end:
        job_by_sequence = finder.step(events, GPUS, now, may_query)
        waits = [descriptor for descriptor, _ in finder.waits()]
        if job_by_sequence or not waits:
            return job_by_sequence
        select.select(waits, [], [], 0.05)
    raise AssertionError("no answer")


def test_step_reads_jobs_from_listpids_without_cgroups(scontrol: Path) -> None:
    (scontrol / "listed").write_text(LISTPIDS_OUTPUT)
    for pid in (100, 101, 102, 50):
        add_process(scontrol, pid, "0::/user.slice\n", *(["/dev/nvidia5"] if pid in (101, 102, 50) else []))
    events = (event(pid=None), event(pid=100, sequence=2), event(pid=50, sequence=3), event(pid=99, sequence=4))
    finder = EventJobFinder(str(scontrol), "n1", time.monotonic)
    assert add_jobs(finder, *events) == ["", "", "", ""]
    jobs = step_until_answered(finder, events)
    assert jobs == {1: "12,14", 2: "12", 4: "12,14"}
    assert [dict(e.fields).get("job") for e in with_jobs(events, jobs)] == ["12,14", "12", None, "12,14"]
    assert (scontrol / "asked").read_text() == "listpids * n1\n"
    assert not list(finder.waits())


def test_step_queries_slurm_at_limited_rate(scontrol: Path) -> None:
    (scontrol / "listed").write_text(LISTPIDS_OUTPUT)
    add_process(scontrol, 100, "0::/\n")
    finder = EventJobFinder(str(scontrol), "n1", time.monotonic)
    started = time.monotonic()
    add_jobs(finder, event(pid=7))
    assert step_until_answered(finder, [event(pid=7)]) == {}
    second = event(pid=100, sequence=2)
    add_jobs(finder, second)
    assert finder.step([second], GPUS, NOW + 1, True) == {}
    assert not list(finder.waits())
    assert started + QUERY_INTERVAL_SECONDS <= finder.deadline <= time.monotonic() + QUERY_INTERVAL_SECONDS
    time.sleep(max(0.0, finder.deadline - time.monotonic()) + 0.01)
    assert step_until_answered(finder, [second]) == {2: "12"}
    assert (scontrol / "asked").read_text().count("listpids") == 2


def test_step_ignores_event_that_waited_too_long(scontrol: Path) -> None:
    (scontrol / "listed").write_text(LISTPIDS_OUTPUT)
    finder = EventJobFinder(str(scontrol), "n1", time.monotonic)
    add_jobs(finder, event(pid=7))
    assert finder.step([event(pid=7)], GPUS, NOW + 60, True) == {}
    assert not list(finder.waits())
    assert finder.deadline == float("inf")


def test_step_does_not_query_slurm_in_mode_observe(scontrol: Path, clock: Clock) -> None:
    finder = make_finder(scontrol, clock)
    add_jobs(finder, event(pid=7))
    assert step_until_answered(finder, [event(pid=7)], may_query=False) == {}
    assert not (scontrol / "asked").exists()


@pytest.mark.parametrize("output", ["", "No job steps exist on this node.\n", "\x00\n1 2 3\n", "PID JOBID\n5\n"])
def test_step_ignores_invalid_listpids_output(scontrol: Path, output: str) -> None:
    (scontrol / "listed").write_text(output)
    finder = EventJobFinder(str(scontrol), "n1", time.monotonic)
    add_jobs(finder, event(pid=7), event(pid=None, sequence=2))
    assert step_until_answered(finder, [event(pid=7), event(pid=None, sequence=2)]) == {}


def test_node_without_slurm_has_no_jobs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    finder = EventJobFinder(str(tmp_path), "n1", time.monotonic)
    assert add_jobs(finder, replace(event(), pid=7)) == [""]
    assert step_until_answered(finder, [event(pid=7)]) == {}
