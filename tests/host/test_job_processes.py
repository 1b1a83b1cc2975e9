"""Jobs of processes and of GPUs, from cgroup paths as slurmd creates them with cgroup/v1 and v2."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from fakes import stopped_clock
from hypothesis import given
from hypothesis import strategies as st

from healthd.host import job_processes as process
from healthd.host.cgroup import job_in
from healthd.host.job_processes import MAX_DESCRIPTORS, gpus_open_by_job, job_of_process, job_processes, jobs_using_gpus

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
        # forms of other set-ups: CgroupSlice, a container's cgroup in front, healthd in a container next to slurmd's
        ("0::/hpc.slice/slurmstepd.scope/job_31/step_0\n", "31"),
        ("0::/docker.slice/docker-0a1b.scope/system.slice/n1_slurmstepd.scope/job_32/step_0/user/task_0\n", "32"),
        ("0::/machine.slice/systemd-nspawn@n1.service/payload/system.slice/slurmstepd.scope/job_33\n", "33"),
        ("0::/../system.slice/slurmstepd.scope/job_34/step_0\n", "34"),
        ("4:memory:/docker/0a1b/slurm_n1/uid_1000/job_35/step_batch\n1:name=systemd:/docker/0a1b\n", "35"),
        # cgroups that users can create below their own
        ("0::/user.slice/user-1000.slice/user@1000.service/app.slice/slurmstepd.scope/job_77\n", ""),
        ("0::/user.slice/user-1000.slice/user@1000.service/system.slice/slurmstepd.scope/job_77/step_0\n", ""),
        ("0::/user.slice/slurmstepd.scope/job_77/step_0\n", ""),
        ("0::/user.slice/user-1000.slice/user@1000.service/slurm/uid_1000/job_77\n", ""),
        ("0::/docker/0a1b/user.slice/user-1000.slice/user@1000.service/slurm/uid_1000/job_77\n", ""),
        ("5:devices:/user/alice/0/slurm/uid_1000/job_77\n", ""),
        ("0::/system.slice/jupyter-alice.service/system.slice/slurmstepd.scope/job_77\n", ""),
        ("0::/system.slice/jupyter-alice.service/my-slurm/job_77\n", ""),
        ("0::/system.slice/my-slurm-tools.scope/job_77\n", ""),
        ("0::/system.slice/slurmd.service/job_77\n", ""),
        ("0::/system.slice/slurmstepd.scope/job_123x/step_0\n", ""),
        ("0::/system.slice/slurmstepd.scope/system\n", ""),
        ("0::/system.slice/slurmstepd.scope/job_\u0664\u0667/step_0\n", ""),
        (f"0::/system.slice/slurmstepd.scope/job_{'1' * 5000}/step_0\n", ""),
        ("", ""),
    ],
)
def test_job_in_reads_job_from_cgroup_path(cgroup: str, job: str) -> None:
    assert job_in(cgroup) == job


USERS = st.sampled_from(["user.slice", "user", "user@1000.service", "user-1000.slice", "x.service"])
NAMES = st.sampled_from(
    ["system.slice", "slurmstepd.scope", "slurm", "uid_1000", "job_77", "n_slurmstepd.scope", "step_0"]
)


@given(st.lists(st.sampled_from(["docker", "a.scope", ".."]), max_size=3), USERS, st.lists(NAMES, max_size=8))
def test_job_in_returns_none_below_cgroup_of_a_user(above: list[str], users: str, below: list[str]) -> None:
    assert job_in(f"0::/{'/'.join([*above, users, *below])}\n") == ""


@given(st.text())
def test_job_in_accepts_any_text(text: str) -> None:
    assert job_in(text) == "" or job_in(text).isdecimal()


def test_job_of_process_distinguishes_job_no_job_and_ended_process(tmp_path: Path) -> None:
    for pid, text in ((42, V1), (43, "0::/system.slice/nvidia-persistenced.service\n")):
        (tmp_path / f"proc/{pid}").mkdir(parents=True)
        (tmp_path / f"proc/{pid}/cgroup").write_text(text)
    assert [job_of_process(pid, str(tmp_path)) for pid in (42, 43, 44)] == ["4711", "", None]


# --- processes of all jobs


def cgroups(root: Path, **members: str) -> str:
    for path, pids in members.items():
        directory = root / "sys/fs/cgroup" / path
        directory.mkdir(parents=True)
        (directory / "cgroup.procs").write_text("".join(f"{pid}\n" for pid in pids.split()))
    return str(root)


V2_STEP = "system.slice/slurmstepd.scope/job_12/step_0"


@pytest.mark.parametrize(
    ("members", "processes"),
    [
        (
            {f"{V2_STEP}/slurm": "100", f"{V2_STEP}/user/task_0": "101 102", f"{V2_STEP}/user/task_1": "103"},
            {100: "12", 101: "12", 102: "12", 103: "12"},
        ),
        (
            {
                "system.slice/n1_slurmstepd.scope/job_7/step_batch/user/task_0": "5",
                "system.slice/n2_slurmstepd.scope/job_8/step_batch/user/task_0/mine/deeper": "6",
                "system.slice/sshd.service/job_9/step_0": "7",
                "user.slice/user-1000.slice/job_9/step_0": "8",
                "user.slice/slurmstepd.scope/job_9/step_0": "10",
            },
            {5: "7", 6: "8"},
        ),
        (
            {
                "freezer/slurm/uid_1000/job_4711/step_0": "20 21",
                "freezer/slurm/uid_1001/job_4712/step_batch": "22",
                "cpuset/slurm/uid_1000/job_4711/step_0/task_0": "20",
            },
            {20: "4711", 21: "4711", 22: "4712"},
        ),
        ({"devices/slurm_n1/uid_0/job_8/step_0/task_3": "9", "unified/system.slice/x.service": "1"}, {9: "8"}),
        ({"unified/system.slice/slurmstepd.scope/job_3/step_0/user/task_0": "31"}, {31: "3"}),
        ({"system.slice/slurmd.service": "1", "system.slice/slurmstepd.scope/system": "2"}, {}),
        ({}, {}),
    ],
)
def test_job_processes_and_local_jobs_read_cgroups_of_slurmd(
    members: dict[str, str], processes: dict[int, str], tmp_path: Path
) -> None:
    assert job_processes(cgroups(tmp_path, **members), stopped_clock) == processes
    assert process.local_jobs(str(tmp_path)) == frozenset(processes.values())


@pytest.mark.parametrize(
    ("members", "empty"),
    [
        ({V2_STEP: ""}, True),
        ({"system.slice/slurmstepd.scope/system": "2"}, True),
        ({"freezer/slurm/uid_0": ""}, True),
        ({V2_STEP: "7"}, False),
        ({"system.slice/slurmd.service": "1"}, False),
        ({}, False),
    ],
)
def test_has_no_jobs_is_true_only_with_cgroups_of_slurm(members: dict[str, str], empty: bool, tmp_path: Path) -> None:
    assert process.has_no_jobs(cgroups(tmp_path, **members)) is empty


def test_job_processes_skips_unreadable_cgroup(tmp_path: Path) -> None:
    root = cgroups(tmp_path, **{f"{V2_STEP}/user/task_0": "1", f"{V2_STEP}/user/task_1": "2"})
    threaded = tmp_path / "sys/fs/cgroup" / V2_STEP / "user/task_0/cgroup.procs"
    threaded.write_text("Operation not supported\n")
    assert job_processes(root, stopped_clock) == {2: "12"}


def test_job_processes_stops_after_scan_seconds(tmp_path: Path) -> None:
    root = cgroups(tmp_path, **{f"{V2_STEP}/user/task_{n}": str(n) for n in range(1, 50)})
    ticks = iter(range(10**6))
    found = job_processes(root, lambda: next(ticks) * process.SCAN_SECONDS / 10)
    assert 0 < len(found) < 49


def test_local_jobs_does_not_depend_on_scan_seconds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    other_cgroup = "system.slice/slurmstepd.scope/job_13/step_0"
    empty_cgroup = "system.slice/slurmstepd.scope/job_14/step_0"
    root = cgroups(
        tmp_path, **{f"{V2_STEP}/user/task_{n}": str(n) for n in range(1, 50)}, **{other_cgroup: "99", empty_cgroup: ""}
    )
    monkeypatch.setattr(process, "SCAN_SECONDS", 0.0)
    assert process.local_jobs(root) == {"12", "13"}


# --- processes that use a GPU


def open_descriptors(root: Path, pid: int, *links: str) -> None:
    descriptors = root / f"proc/{pid}/fd"
    descriptors.mkdir(parents=True)
    for number, link in enumerate(links):
        (descriptors / str(number)).symlink_to(link)


def test_jobs_using_gpus_finds_open_device_files(tmp_path: Path) -> None:
    open_descriptors(tmp_path, 1, "/dev/null", "pipe:[4711]", "/dev/nvidiactl", "/dev/nvidia-uvm", "/dev/nvidia3")
    open_descriptors(tmp_path, 2, "/dev/null", "/dev/nvidia30")
    open_descriptors(tmp_path, 3, "/dev/nvidia3 (deleted)")
    open_descriptors(tmp_path, 4, "/dev/nvidia1", "/dev/nvidia3", "/dev/nvidia4")
    jobs = {1: "9", 2: "9", 3: "10", 4: "10", 5: "11"}
    found = jobs_using_gpus({1, 3, 4, 7}, jobs, str(tmp_path), stopped_clock)
    assert found == {1: ("10",), 3: ("9", "10"), 4: ("10",), 7: ()}
    assert jobs_using_gpus((), jobs, str(tmp_path)) == {}


def test_jobs_using_gpus_stops_after_a_time_limit(tmp_path: Path) -> None:
    for pid in range(1, 30):
        open_descriptors(tmp_path, pid, "/dev/nvidia0")
    ticks = iter(range(10**6))
    found = jobs_using_gpus({0}, {pid: str(pid) for pid in range(1, 30)}, str(tmp_path), lambda: next(ticks) * 0.02)
    assert 0 < len(found[0]) < 10


def test_gpus_open_by_job_limits_descriptors_and_reports_it(tmp_path: Path) -> None:
    open_descriptors(tmp_path, 1, "/dev/nvidia3", *["/dev/null"] * (MAX_DESCRIPTORS - 1))
    assert gpus_open_by_job({1: "9"}, str(tmp_path)) == ({"9": frozenset({3})}, True)
    open_descriptors(tmp_path, 2, *[f"/dev/nvidia{number % 8}" for number in range(MAX_DESCRIPTORS + 1)])
    assert gpus_open_by_job({2: "9"}, str(tmp_path)) == ({"9": frozenset(range(8))}, False)
    assert jobs_using_gpus({5}, {2: "9"}, str(tmp_path), stopped_clock) == {5: ("9",)}


@pytest.fixture
def process_with_device(tmp_path: Path) -> Iterator[int]:
    """A real process with an open file whose path ends like that of a GPU."""
    (tmp_path / "dev").mkdir()
    (tmp_path / "dev/nvidia5").touch()
    with (
        open(tmp_path / "dev/nvidia5") as device,
        subprocess.Popen(["sleep", "60"], stdin=device, start_new_session=True) as running,
    ):
        yield running.pid
        running.kill()


def test_jobs_using_gpus_finds_a_real_process(process_with_device: int) -> None:
    jobs = {process_with_device: "12", os.getppid(): "13"}
    assert jobs_using_gpus({4, 5}, jobs, "/", stopped_clock) == {4: (), 5: ("12",)}
