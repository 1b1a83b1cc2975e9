"""Which Slurm job a process belongs to: paths as slurmd makes them with cgroup/v1 and cgroup/v2."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from healthd.cgroup import job_in
from healthd.model import KernelEvent
from healthd.process import with_job

V1 = """12:devices:/slurm/uid_1000/job_4711/step_0/task_2
11:cpuset:/slurm/uid_1000/job_4711/step_0/task_2
4:memory:/slurm/uid_1000/job_4711/step_0/task_2
1:name=systemd:/system.slice/slurmd.service
0::/system.slice/slurmd.service
"""


@pytest.mark.parametrize(
    ("cgroup", "job"),
    [
        (V1, "4711"),
        ("0::/system.slice/slurmstepd.scope/job_123/step_0/user/task_0\n", "123"),
        ("0::/system.slice/slurmstepd.scope/job_123/step_batch/user/task_special\n", "123"),
        ("0::/system.slice/n1_slurmstepd.scope/job_7/step_extern\n", "7"),
        ("5:devices:/slurm_n1/uid_0/job_8\n", "8"),
        ("0::/kubepods/pod1/slurm/uid_1000/job_9/step_0\n", "9"),
        ("0::/system.slice/slurmstepd.scope/job_1/step_0/user/task_0/slurm/job_2\n", "1"),
        ("0::/user.slice/user-1000.slice/session-3.scope\n", ""),
        ("0::/user.slice/job_5/x\n", ""),
        ("0::/system.slice/slurmstepd.scope/job_123x/step_0\n", ""),
        ("0::/system.slice/slurmstepd.scope/system\n", ""),
        ("", ""),
    ],
)
def test_the_job_is_in_the_path_of_the_cgroup(cgroup: str, job: str) -> None:
    assert job_in(cgroup) == job


@given(st.text())
def test_any_text_has_a_job_or_none(text: str) -> None:
    assert job_in(text) == "" or job_in(text).isdecimal()


def event(pid: int | None = 42, at: float = 1000.0, history: bool = False) -> KernelEvent:
    return KernelEvent("xid", "13", pid=pid, time=at, last_time=at, fields=(("unit", "x"),), history=history)


def test_an_event_gets_the_job_of_its_process_while_that_is_there(tmp_path: Path) -> None:
    (tmp_path / "proc/42").mkdir(parents=True)
    (tmp_path / "proc/42/cgroup").write_text(V1)
    root = str(tmp_path)
    found = with_job(event(), root, 1001.0)
    assert found.fields == (("unit", "x"), ("job", "4711"))
    assert with_job(found, root, 1002.0) == found
    for other in (event(pid=43), event(pid=None), event(history=True), event(at=900.0)):
        assert with_job(other, root, 1001.0) == other
