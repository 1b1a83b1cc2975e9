"""gpu_processes: processes that use a GPU on a node without jobs."""

from __future__ import annotations

from pathlib import Path

import pytest
from fake_gpus import fake_pci_gpus
from fakes import BOOT, NOW, findings, scenarios
from hypothesis import given
from hypothesis import strategies as st
from story import Story
from trees import write

from healthd.checks import gpu_processes
from healthd.checks.gpu_processes import Config
from healthd.common.history import History
from healthd.common.model import Clears, Finding, Severity
from healthd.host.host import Host
from healthd.nvidia.nvml import NvmlError

PCI = fake_pci_gpus("dgx-h100")[3]
OF_A_JOB = "0::/system.slice/slurmstepd.scope/job_12/step_0/user/task_0\n"
OF_A_LOGIN = "0::/user.slice/user-1000.slice/session-2.scope\n"


@pytest.fixture
def node(tmp_path):
    """Create a host with these processes: node("gpu.3.processes = [7]", {7: ("python3", 1000, JOB_CGROUP)})."""
    host = scenarios(tmp_path)

    def make(text: str = "", processes: dict[int, tuple[str, int, str]] | None = None) -> Host:
        return host(text, root=write(tmp_path, files(processes or {})).root)

    return make


def files(processes: dict[int, tuple[str, int, str]]) -> dict[str, str]:
    found = {}
    for pid, (program, user, cgroup) in processes.items():
        found[f"/proc/{pid}/comm"] = f"{program}\n"
        found[f"/proc/{pid}/status"] = f"Name:\t{program}\nUmask:\t0022\nUid:\t{user}\t{user}\t{user}\t{user}\n"
        found[f"/proc/{pid}/cgroup"] = cgroup
    return found


def healthy(tmp_path: Path) -> tuple[Host, Config]:
    services = {900: ("nv-hostengine", 0, "0::/system.slice/nvidia-dcgm.service\n")}
    root = write(tmp_path, files(services)).root
    return scenarios(tmp_path)("gpu.3.processes = [900]", root=root), Config()


def test_it_is_asked_only_on_an_idle_node():
    assert gpu_processes.WHEN == "idle"


def test_what_a_validation_of_this_node_runs_is_no_leftover(node):
    """The lock file contains the pid of the validation. Its programs are children and grandchildren of that process."""
    host = node("gpu.3.processes = [40, 50]", {40: ("nvbandwidth", 0, OF_A_LOGIN), 50: ("python3", 0, OF_A_LOGIN)})
    tree = {"/proc/40/status": "PPid:\t30\n", "/proc/30/status": "PPid:\t20\n", "/proc/50/status": "PPid:\t1\n"}
    write(Path(host.root), {**tree, "/run/healthd/validation.lock": "20\n"})
    assert [f.message for f in findings(gpu_processes, host)] == ['in use by pid 50 "python3" (uid unknown, no job)']
    write(Path(host.root), {"/run/healthd/validation.lock": "\n"})
    assert len(findings(gpu_processes, host)) == 1
    assert 'pid 40 "nvbandwidth"' in findings(gpu_processes, host)[0].message


def test_gpus_that_nobody_holds_are_fine(node):
    assert findings(gpu_processes, node()) == []


def test_a_process_is_named_with_its_user_and_its_job(node):
    host = node("gpu.3.processes = [7, 8]", {7: ("python3", 1000, OF_A_JOB), 8: ("nvtop", 1001, OF_A_LOGIN)})
    (finding,) = findings(gpu_processes, host)
    assert (finding.code, finding.subject) == ("gpu_processes/leftover", PCI)
    assert (finding.severity, finding.clears, finding.confirm_seconds) == (Severity.DEGRADED, Clears.PASS, 60.0)
    assert finding.message == 'in use by pid 7 "python3" (uid 1000, job 12), pid 8 "nvtop" (uid 1001, no job)'


def test_services_that_may_hold_a_gpu_are_known_by_the_names_that_the_kernel_cuts(node):
    services = {5: ("nvidia-cuda-mps", 0, OF_A_LOGIN), 6: ("Xorg", 0, OF_A_LOGIN), 7: ("nv-hostengine", 0, OF_A_LOGIN)}
    assert findings(gpu_processes, node("gpu.3.processes = [5, 6, 7]", services)) == []
    assert len(findings(gpu_processes, node("gpu.3.processes = [5, 6, 7]", services), Config(allowed=()))) == 1


def test_a_process_that_has_ended_and_still_holds_the_gpu_is_a_leftover(node):
    (finding,) = findings(gpu_processes, node("gpu.3.processes = [7]"))
    assert finding.message == "in use by pid 7, which is not in /proc"


def test_the_gpus_are_judged_one_by_one(node):
    host = node("[gpu.0]\nprocesses = [7]\n[gpu.3]\nprocesses = [7]", {7: ("python3", 1000, OF_A_JOB)})
    assert len(findings(gpu_processes, host)) == 2


def test_a_driver_that_does_not_tell_gives_nothing(node):
    calls = '["nvmlDeviceGetComputeRunningProcesses_v3", "nvmlDeviceGetComputeRunningProcesses_v2"]'
    assert findings(gpu_processes, node(f"missing_functions = {calls}\n[gpu.3]\nprocesses = [7]")) == []


def test_a_gpu_that_cannot_be_asked_hides_no_other(node):
    text = '[gpu.0]\nerrors = { nvmlDeviceGetComputeRunningProcesses_v3 = "NoPermission" }\n[gpu.3]\nprocesses = [7]'
    given_: list[object] = []
    with pytest.raises(NvmlError, match=r"0000:1b:00\.0"):
        given_.extend(gpu_processes.run(node(text), Config(), History({}, NOW, BOOT)))
    assert [f.subject for f in given_ if isinstance(f, Finding)] == [PCI]


@given(st.text(max_size=60), st.text(max_size=60), st.text(max_size=60))
def test_whatever_proc_says_a_process_is_a_finding(tmp_path_factory, comm, status, cgroup):
    tmp_path = tmp_path_factory.mktemp("node")
    texts = {"/proc/7/comm": comm, "/proc/7/status": status, "/proc/7/cgroup": cgroup}
    root = write(tmp_path, {path: text.encode("utf-8", "replace").decode() for path, text in texts.items()}).root
    host = scenarios(tmp_path)("gpu.3.processes = [7]", root=root)
    assert len(findings(gpu_processes, host, Config(allowed=()))) == 1


def test_story_a_leftover_keeps_the_node_drained_until_it_is_gone(node):
    left = node("gpu.3.processes = [7]", {7: ("python3", 1000, OF_A_JOB)})
    story = Story(gpu_processes).look(node())
    story.look(left)
    assert not story.drained, "the process may end soon"
    story.look(left, minutes=1.5)
    assert (story.codes, story.drained, story.requeued) == (["gpu_processes/leftover"], True, False)
    story.looks(left, 20)
    assert story.drained, "time does not end it"
    story.looks(node(), 3)
    assert (story.codes, story.drained) == ([], False)


def test_story_a_process_that_ends_within_the_minute_is_no_leftover(node):
    story = Story(gpu_processes).look(node("gpu.3.processes = [7]")).looks(node(), 3)
    assert (story.conditions, story.drained) == ({}, False)
