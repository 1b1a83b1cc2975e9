"""Requirements before a repair step: everything on the node that a reset or a reboot would end."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from healthd.agent.evidence.case import Process as StuckProcess
from healthd.agent.repair import node_reading
from healthd.agent.repair.node_reading import own_pids, read_node
from healthd.agent.repair.requirements import (
    Inhibitor,
    NodeReading,
    Process,
    parse_inhibitors,
    parse_locks,
    parse_parent,
    parse_state,
    parse_unit,
    requirements,
)
from healthd.common.model import RepairStep
from healthd.host.program import ENVIRONMENT

INIT = Process(1, 0, "systemd")
SLURMD = Process(50, 1, "slurmd", "/usr/sbin/slurmd -D", "slurmd.service")
SERVICES = ("nvidia-dcgm", "dcgm-exporter.service")


def unmet(*processes: Process, **reading: Any) -> dict[str, str]:
    """Return the requirements that are not met, with the reason."""
    found = requirements(NodeReading(processes=(INIT, SLURMD, *processes), **reading), SERVICES, (99,))
    assert all(r.met is not None for r in found)
    return {r.name: r.problem for r in found if not r.met}


def test_idle_node_meets_all_requirements() -> None:
    assert unmet() == {}


@pytest.mark.parametrize(
    ("process", "name"),
    [
        (Process(60, 1, "slurmstepd", "slurmstepd: [123.batch]"), "jobs"),
        (Process(60, 50, "epilog.sh", "/bin/sh /etc/slurm/epilog.sh"), "jobs"),
        (Process(60, 1, "python3", "python3 x.py", "", ("/dev/nvidia0",)), "gpu_users"),
        (Process(60, 1, "nvidia-smi", "", "user.service", ("/dev/nvidiactl",)), "gpu_users"),
        (Process(60, 1, "apt-get"), "packages"),
        (Process(60, 1, "unattended-upgr"), "packages"),
        (Process(60, 1, "mlxfwmanager"), "firmware"),
        (Process(60, 1, "ipmitool", "ipmitool hpm upgrade x"), "firmware"),
        (Process(60, 1, "python3.11", "python3 /usr/bin/nvfwupd update"), "firmware"),
        (Process(60, 1, "nvme", "nvme fw-commit /dev/nvme0"), "firmware"),
        (Process(60, 1, "makedumpfile"), "crash_dump"),
    ],
)
def test_process_that_a_step_would_end_is_named(process: Process, name: str) -> None:
    assert unmet(process) == {name: f"{process.name} (pid 60)"}


@pytest.mark.parametrize(
    "process",
    [
        Process(60, 50, "slurmstepd", "/usr/sbin/slurmstepd infinity"),
        Process(60, 50, "slurmd"),
        Process(60, 1, "nv-hostengine", "", "nvidia-dcgm.service", ("/dev/nvidia0",)),
        Process(60, 1, "dcgm-exporter", "", "dcgm-exporter.service", ("/dev/nvidia0",)),
        Process(99, 1, "python3", "python3 -m healthd.agent.worker", "", ("/dev/nvidia0",)),
        Process(60, 1, "ipmitool", "ipmitool sel list"),
        Process(60, 1, "nvme", "nvme list"),
        Process(60, 1, "python3", "python3 -m healthd run"),
        Process(60, 1, "packagekitd"),
    ],
)
def test_process_that_may_run_is_no_problem(process: Process) -> None:
    assert unmet(process) == {}


@pytest.mark.parametrize(
    ("reading", "name"),
    [
        ({"package_locks": ("/var/lib/dpkg/lock",)}, "packages"),
        ({"inhibitors": (Inhibitor("shutdown:sleep", "backup", "a backup runs", "block"),)}, "inhibitors"),
        ({"inhibitors": (Inhibitor("shutdown", "backup", "a backup runs", "block-weak"),)}, "inhibitors"),
        ({"system_state": "stopping"}, "settled"),
        ({"shutdown_scheduled": True}, "settled"),
        ({"is_capture_kernel": True}, "crash_dump"),
    ],
)
def test_state_of_machine_is_named(reading: dict[str, Any], name: str) -> None:
    assert set(unmet(**reading)) == {name}


@pytest.mark.parametrize("mode", ["delay", "block"])
def test_inhibitor_of_delay_or_sleep_blocks_nothing(mode: str) -> None:
    what = "shutdown" if mode == "delay" else "sleep:idle"
    assert unmet(inhibitors=(Inhibitor(what, "NetworkManager", "w", mode),)) == {}
    assert unmet(system_state="degraded") == {}


def test_unreadable_processes_and_inhibitors_are_unknown() -> None:
    found = {r.name: r.met for r in requirements(NodeReading(None, inhibitors=None), SERVICES, ())}
    assert {name for name, met in found.items() if met is None} == {
        *("jobs", "gpu_users", "packages", "firmware", "crash_dump", "inhibitors")
    }


@pytest.mark.parametrize("state", ["unknown", "offline", "a-state-of-a-later-systemd"])
def test_unknown_state_of_systemd_is_not_met(state: str) -> None:
    found = requirements(NodeReading(processes=(), system_state=state), SERVICES, ())
    assert {r.name: r.met for r in found}["settled"] is None


def test_unreadable_locks_are_unknown_unless_a_package_manager_runs() -> None:
    found = requirements(NodeReading(processes=(), package_locks=None), SERVICES, ())
    assert {r.name: r.met for r in found}["packages"] is None
    found = requirements(NodeReading(processes=(Process(60, 1, "dpkg"),), package_locks=None), SERVICES, ())
    assert {r.name: r.met for r in found}["packages"] is False


@pytest.mark.parametrize(
    ("name", "requirement"),
    [("slurmstepd", "jobs"), ("ipmitool", "firmware"), ("nvme", "firmware"), ("python3", "firmware")],
)
def test_program_with_hidden_arguments_counts_by_its_name(name: str, requirement: str) -> None:
    assert set(unmet(Process(60, 1, name, is_hidden=True))) == {requirement}


def test_hidden_arguments_of_healthds_own_program_are_no_firmware_update() -> None:
    assert unmet(Process(99, 1, "python3", is_hidden=True)) == {}


def test_many_processes_are_counted() -> None:
    many = [Process(100 + number, 1, "flint") for number in range(9)]
    assert unmet(*many)["firmware"].endswith("and 6 more")


# --- parsers


def test_parse_inhibitors_reads_answer_of_busctl() -> None:
    row = ["shutdown:sleep", "apt", "dpkg runs", "block", 0, 812]
    assert parse_inhibitors(json.dumps({"type": "a(ssssuu)", "data": [[row]]})) == (
        Inhibitor("shutdown:sleep", "apt", "dpkg runs", "block"),
    )
    assert parse_inhibitors('{"type":"a(ssssuu)","data":[[]]}') == ()


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.sampled_from(["data", "type"]), inner),
    max_leaves=12,
)


@given(st.text() | JSON.map(json.dumps))
def test_parse_inhibitors_of_any_text_gives_rows_or_value_error(text: str) -> None:
    try:
        found = parse_inhibitors(text)
    except ValueError:
        return
    assert all(isinstance(word, str) for row in found for word in (row.what, row.who, row.why, row.mode))


def test_parse_locks_reads_hexadecimal_devices() -> None:
    text = (
        "1: POSIX  ADVISORY  WRITE 17079 fe:00:402117 0 EOF\n"
        "1: -> POSIX  ADVISORY  READ  17080 fe:00:402117 0 EOF\n"
        "2: FLOCK  ADVISORY  WRITE 700 00:1a:55 0 EOF\n"
    )
    assert parse_locks(text) == {(0xFE, 0, 402117), (0, 0x1A, 55)}


@given(st.text())
def test_parsers_of_any_text_raise_nothing(text: str) -> None:
    parse_locks(text)
    parse_unit(text)
    assert parse_parent(text) >= 0


@pytest.mark.parametrize(
    ("cgroup", "unit"),
    [
        ("0::/system.slice/nvidia-dcgm.service\n", "nvidia-dcgm.service"),
        ("0::/system.slice/system-x.slice/x@1.service/sub\n", "x@1.service"),
        ("12:cpu:/other\n1:name=systemd:/system.slice/sshd.service\n", "sshd.service"),
        ("0::/user.slice/user-1000.slice/user@1000.service/app.slice/nvidia-dcgm.service\n", ""),
        ("0::/system.slice/slurmstepd.scope/job_1\n", ""),
        ("0::/\n", ""),
    ],
)
def test_parse_unit_reads_system_services_only(cgroup: str, unit: str) -> None:
    assert parse_unit(cgroup) == unit


def test_parse_parent_ignores_parentheses_in_name() -> None:
    assert parse_parent("12 (a) S 7 (b)) S 34 1 1 0") == 34
    assert parse_state("12 (a) S 7 (b)) D 34 1 1 0") == "D"
    assert parse_state("") == ""


# --- the real machine


def test_reading_of_this_machine_has_this_process() -> None:
    reading = read_node()
    if reading.processes is None:
        pytest.skip("needs root")
    own = next(p for p in reading.processes if p.pid == os.getpid())
    assert own.parent == os.getppid()
    assert own.name == Path("/proc/self/comm").read_text().strip()
    assert bool(own.command) is own.name.startswith("python")


def test_lock_of_package_manager_is_found(tmp_path: Path) -> None:
    lock = tmp_path / "var/lib/dpkg/lock"
    lock.parent.mkdir(parents=True)
    (tmp_path / "proc").symlink_to("/proc")
    with open(lock, "w") as file:
        assert read_node(str(tmp_path)).package_locks == ()
        fcntl.lockf(file, fcntl.LOCK_EX)
        assert read_node(str(tmp_path)).package_locks == (str(lock),)


def test_regular_file_named_like_gpu_is_no_gpu(tmp_path: Path) -> None:
    script = "import sys; file = open(sys.argv[1], 'w'); print(flush=True); sys.stdin.read()"
    path = tmp_path / "nvidia0"
    child = subprocess.Popen(
        [sys.executable, "-c", script, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        assert child.stdout is not None
        child.stdout.readline()
        reading = read_node()
        if reading.processes is not None:
            assert next(p for p in reading.processes if p.pid == child.pid).gpu_files == ()
    finally:
        child.kill()
        child.communicate()


def test_unreadable_process_makes_all_unknown() -> None:
    reading = replace(NodeReading(), processes=None)
    assert requirements(reading, (), ())[0].met is None


# --- healthd's own processes

OWN = (
    Process(7, 1, "healthd", unit="healthd.service"),
    Process(8, 1, "nvidia-smi", unit="healthd-evidence.service"),
    Process(9, 1, "nvidia-smi", unit="healthd-repair.service"),
    Process(10, 1, "hook", unit="healthd-hooks.service"),
    Process(11, 1, "x", unit="other.service"),
)


@pytest.mark.parametrize(
    ("step", "expected"),
    [
        (RepairStep.GPU_RESET, {7}),
        (RepairStep.REBOOT, {7, 8, 9, 10}),
        (RepairStep.POWER_CYCLE, {7, 8, 9, 10}),
    ],
)
def test_only_a_boot_ends_healthds_programs(step: RepairStep, expected: set[int]) -> None:
    reading = NodeReading(processes=OWN, system_state="running")
    assert own_pids(reading, step, daemon=11) == {*expected, os.getpid()}


@pytest.mark.parametrize(("step", "is_own"), [(RepairStep.GPU_RESET, False), (RepairStep.REBOOT, True)])
def test_only_a_boot_ends_a_process_that_hangs(step: RepairStep, is_own: bool) -> None:
    start = int(Path(f"/proc/{os.getppid()}/stat").read_text().rpartition(")")[2].split()[19])
    reading = NodeReading(processes=(), system_state="running")
    found = own_pids(reading, step, [StuckProcess(os.getppid(), start)])
    assert (os.getppid() in found) is is_own
    assert os.getppid() not in own_pids(reading, step, [StuckProcess(os.getppid(), start + 1)]), "a later process"


def test_processes_below_the_daemon_are_own_without_systemd() -> None:
    below = (Process(50, 1, "healthd"), Process(70, 50, "healthd"), Process(71, 70, "healthd"), *OWN[1:])
    assert own_pids(NodeReading(processes=below), RepairStep.GPU_RESET, daemon=50) == {50, 70, 71, os.getpid()}


@pytest.mark.parametrize(("is_reset", "met"), [(True, False), (False, True)])
def test_reset_waits_for_a_process_of_the_daemon_that_has_a_gpu_open(is_reset: bool, met: bool) -> None:
    """It hangs in the driver, because the daemon has requested its end. A boot ends it."""
    hung = Process(7, 1, "python3", unit="healthd.service", gpu_files=("/dev/nvidia0",))
    reading = NodeReading(processes=(INIT, hung), system_state="running")
    found = {r.name: r for r in requirements(reading, SERVICES, (7,), is_reset)}
    assert found["gpu_users"].met is met


# --- a made-up /proc, and systemd without logind


class MadeUpProc:
    """A /proc with one process. `threads` are the states of its threads; the first is the main thread."""

    def __init__(self, root: Path, name: str = "python3", threads: tuple[str, ...] = ("S",)) -> None:
        self.root, self.folder = root, root / "proc/12"
        (root / "proc").mkdir(parents=True)
        (root / "proc/locks").write_text("")
        for number, state in enumerate(threads):
            thread = self.folder / f"task/{12 + number}"
            (thread / "fd").mkdir(parents=True)
            (thread / "stat").write_text(f"{12 + number} ({name}) {state} 1 1\n")
        (self.folder / "fd").mkdir()
        (self.folder / "stat").write_text(f"12 ({name}) {threads[0]} 1 1\n")
        (self.folder / "comm").write_text(f"{name}\n")
        (self.folder / "cmdline").write_text(f"{name}\0nvfwupd\0")
        (self.folder / "cgroup").write_text("0::/\n")

    def process(self) -> Process:
        processes = read_node(str(self.root)).processes
        assert processes is not None
        (found,) = processes
        return found


@pytest.mark.parametrize(
    ("name", "threads", "command", "is_hidden"),
    [
        ("python3", ("S", "S"), "python3 nvfwupd", False),
        ("python3", ("D",), "", True),
        ("python3", ("S", "D"), "", True),
        ("nvidia-smi", ("D",), "", False),
        ("nvidia-smi", ("S",), "", False),
    ],
)
def test_arguments_are_read_only_if_they_matter_and_no_thread_hangs(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    threads: tuple[str, ...],
    command: str,
    is_hidden: bool,
) -> None:
    monkeypatch.setattr(node_reading, "STATE_SECONDS", 0.0)
    made = MadeUpProc(tmp_path, name, threads)
    if not command:
        (made.folder / "cmdline").unlink()
        os.mkfifo(made.folder / "cmdline")  # to open it would wait without end
    found = made.process()
    assert (found.command, found.is_hidden) == (command, is_hidden)


def test_files_of_a_process_whose_main_thread_has_exited_are_those_of_its_other_threads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(node_reading, "GPU_FILES", "/dev/null")
    made = MadeUpProc(tmp_path, threads=("Z", "S"))
    (made.folder / "task/13/fd/4").symlink_to("/dev/null")
    assert made.process().gpu_files == ("/dev/null",)
    (made.folder / "task/13/stat").write_text("13 (python3) Z 1 1\n")
    assert made.process().gpu_files == ()


@pytest.mark.parametrize(("number", "is_known"), [(errno.ENOENT, True), (errno.ESRCH, True), (errno.EIO, False)])
def test_only_a_process_that_has_exited_is_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, is_known: bool
) -> None:
    def read(folder: str, name: str) -> str:
        raise OSError(number, os.strerror(number))

    made = MadeUpProc(tmp_path)
    monkeypatch.setattr(node_reading, "_read", read)
    assert read_node(str(made.root)).processes == (() if is_known else None)


def test_locks_that_cannot_be_read_are_unknown(tmp_path: Path) -> None:
    made = MadeUpProc(tmp_path)
    assert read_node(str(made.root)).package_locks == ()
    (made.root / "proc/locks").unlink()
    assert read_node(str(made.root)).package_locks is None


@pytest.mark.parametrize(
    ("load", "active", "owner", "expected"),
    [
        ("masked", "inactive", "exit 1", ()),
        ("not-found", "inactive", "exit 1", ()),
        ("masked", "failed", "exit 1", ()),
        ("masked", "active", "echo b true", None),
        ("loaded", "inactive", "echo b false", ()),
        ("loaded", "inactive", "echo b true", None),
        ("loaded", "inactive", "exit 1", None),
        ("loaded", "active", "echo b true", None),
    ],
)
def test_without_logind_there_are_no_inhibitors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, load: str, active: str, owner: str, expected: tuple[()] | None
) -> None:
    programs = {
        "systemctl": f"case $1 in show) echo LoadState={load}; echo ActiveState={active} ;; *) echo running ;; esac",
        "busctl": f'case "$*" in *NameHasOwner*) {owner} ;; *) echo "Unit is masked." >&2; exit 1 ;; esac',
    }
    for name, text in programs.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{text}\n")
        (tmp_path / name).chmod(0o755)
    made = MadeUpProc(tmp_path / "root")
    (made.root / "run/systemd/system").mkdir(parents=True)
    monkeypatch.setitem(ENVIRONMENT, "PATH", f"{tmp_path}:{ENVIRONMENT['PATH']}")
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    reading = read_node(str(made.root))
    assert (reading.inhibitors, reading.system_state) == (expected, "running")
