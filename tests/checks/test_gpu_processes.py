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
JOB_CGROUP = "0::/system.slice/slurmstepd.scope/job_12/step_0/user/task_0\n"
LOGIN_CGROUP = "0::/user.slice/user-1000.slice/session-2.scope\n"


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


def test_gpu_processes_runs_only_on_idle_node():
    assert gpu_processes.WHEN == "idle"


def test_processes_of_running_validation_are_no_leftovers(node):
    """The lock file contains the pid of the validation. Its programs are children and grandchildren of that process."""
    host = node("gpu.3.processes = [40, 50]", {40: ("nvbandwidth", 0, LOGIN_CGROUP), 50: ("python3", 0, LOGIN_CGROUP)})
    tree = {"/proc/40/status": "PPid:\t30\n", "/proc/30/status": "PPid:\t20\n", "/proc/50/status": "PPid:\t1\n"}
    write(Path(host.root), {**tree, "/run/healthd/validation.lock": "20\n"})
    assert [f.message for f in findings(gpu_processes, host)] == ['in use by pid 50 "python3" (uid unknown, no job)']
    write(Path(host.root), {"/run/healthd/validation.lock": "\n"})
    assert len(findings(gpu_processes, host)) == 1
    assert 'pid 40 "nvbandwidth"' in findings(gpu_processes, host)[0].message


def test_gpus_without_processes_give_no_finding(node):
    assert findings(gpu_processes, node()) == []


def test_process_is_reported_with_user_and_job(node):
    host = node("gpu.3.processes = [7, 8]", {7: ("python3", 1000, JOB_CGROUP), 8: ("nvtop", 1001, LOGIN_CGROUP)})
    (finding,) = findings(gpu_processes, host)
    assert (finding.code, finding.subject) == ("gpu_processes/leftover", PCI)
    assert (finding.severity, finding.clears, finding.confirm_seconds) == (Severity.DEGRADED, Clears.PASS, 60.0)
    assert finding.message == 'in use by pid 7 "python3" (uid 1000, job 12), pid 8 "nvtop" (uid 1001, no job)'


def test_allowed_services_match_names_truncated_by_kernel(node):
    services = {
        5: ("nvidia-cuda-mps", 0, LOGIN_CGROUP),
        6: ("Xorg", 0, LOGIN_CGROUP),
        7: ("nv-hostengine", 0, LOGIN_CGROUP),
    }
    assert findings(gpu_processes, node("gpu.3.processes = [5, 6, 7]", services)) == []
    assert len(findings(gpu_processes, node("gpu.3.processes = [5, 6, 7]", services), Config(allowed=()))) == 1


def test_ended_process_that_still_uses_gpu_is_a_leftover(node):
    (finding,) = findings(gpu_processes, node("gpu.3.processes = [7]"))
    assert finding.message == "in use by pid 7, which is not in /proc"


def test_each_gpu_has_its_own_finding(node):
    host = node("[gpu.0]\nprocesses = [7]\n[gpu.3]\nprocesses = [7]", {7: ("python3", 1000, JOB_CGROUP)})
    assert len(findings(gpu_processes, host)) == 2


def test_driver_without_process_list_gives_nothing(node):
    calls = '["nvmlDeviceGetComputeRunningProcesses_v3", "nvmlDeviceGetComputeRunningProcesses_v2"]'
    assert findings(gpu_processes, node(f"missing_functions = {calls}\n[gpu.3]\nprocesses = [7]")) == []


def test_unreadable_gpu_hides_no_other_finding(node):
    text = '[gpu.0]\nerrors = { nvmlDeviceGetComputeRunningProcesses_v3 = "NoPermission" }\n[gpu.3]\nprocesses = [7]'
    results: list[object] = []
    with pytest.raises(NvmlError, match=r"0000:1b:00\.0"):
        results.extend(gpu_processes.run(node(text), Config(), History({}, NOW, BOOT)))
    assert [f.subject for f in results if isinstance(f, Finding)] == [PCI]


@given(st.text(max_size=60), st.text(max_size=60), st.text(max_size=60))
def test_process_is_a_finding_with_any_text_in_proc(tmp_path_factory, comm, status, cgroup):
    tmp_path = tmp_path_factory.mktemp("node")
    texts = {"/proc/7/comm": comm, "/proc/7/status": status, "/proc/7/cgroup": cgroup}
    root = write(tmp_path, {path: text.encode("utf-8", "replace").decode() for path, text in texts.items()}).root
    host = scenarios(tmp_path)("gpu.3.processes = [7]", root=root)
    assert len(findings(gpu_processes, host, Config(allowed=()))) == 1


def test_leftover_process_drains_until_it_ends(node):
    leftover = node("gpu.3.processes = [7]", {7: ("python3", 1000, JOB_CGROUP)})
    story = Story(gpu_processes).run_check(node())
    story.run_check(leftover)
    assert not story.drained, "the process may end soon"
    story.run_check(leftover, minutes=1.5)
    assert (story.codes, story.drained, story.requeued) == (["gpu_processes/leftover"], True, False)
    story.run_checks(leftover, 20)
    assert story.drained, "time does not end it"
    story.run_checks(node(), 3)
    assert (story.codes, story.drained) == ([], False)


def test_process_that_ends_within_a_minute_is_no_leftover(node):
    story = Story(gpu_processes).run_check(node("gpu.3.processes = [7]")).run_checks(node(), 3)
    assert (story.conditions, story.drained) == ({}, False)
