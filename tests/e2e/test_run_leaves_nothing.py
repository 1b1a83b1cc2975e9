"""After a hang or a kill -9 in the middle of a test, nothing is left.

scripts/run_tests.py ends everything the test had started, or the next run does: a real Slurm and its job, healthd, a
frozen disk, mounts, loop devices and cgroups.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from requirements import require_programs, require_root
from waiting import until

E2E = Path(__file__).parent
RUN_TESTS = E2E.parents[1] / "scripts" / "run_tests.py"

CONFTEST = f"""
import sys
sys.path[:0] = {[str(E2E), str(E2E.parent / "support"), str(E2E.parents[1])]!r}
pytest_plugins = ["alone", "started"]
"""
# Starts what tests start, without the code that would end it when they are killed.
STARTING_TEST = """
import json, os, subprocess, time
from pathlib import Path

import psutil
from frozen import wait_for_d_state
from healthd_daemon import Healthd
from of_this_run import FOLDER, name_with_run
from slurm_cluster import SlurmCluster
from slurm_look import listed_pids
from waiting import until

NOTE, ELSEWHERE = Path({note!r}), Path({elsewhere!r})
UNMARKED = {{"PATH": os.environ["PATH"]}}

def run(*argv):
    return subprocess.run(argv, check=True, capture_output=True, text=True, timeout=240).stdout

def image(name):
    with open(FOLDER / name, "wb") as file:
        file.truncate(16 << 20)
    return str(FOLDER / name)

def frozen_cgroup():
    for root, file, value in (("freezer", "freezer.state", "FROZEN"), ("", "cgroup.freeze", "1")):
        cgroup = Path("/sys/fs/cgroup", root, name_with_run("cgroup"))
        if Path("/sys/fs/cgroup", root, "cgroup.procs").exists():
            (cgroup / "inner").mkdir(parents=True)
            sleeper = subprocess.Popen(["setsid", "sleep", "3000"], env=UNMARKED, cwd="/")
            (cgroup / "inner" / "cgroup.procs").write_text(str(sleeper.pid))
            (cgroup / file).write_text(value)
            return cgroup, sleeper
    raise AssertionError("no cgroup can be frozen here")

def test_it():
    cluster = SlurmCluster(nodes=1).__enter__()
    job = cluster.sbatch("sleep 3000", "-w", "n1", "--export=NONE")
    until(lambda: len(listed_pids(cluster, job, "n1")) == 2, "the script and its sleep run")
    daemon = Healthd("--interval", "0.5").__enter__()
    cgroup, sleeper = frozen_cgroup()

    disk, memory = FOLDER / "disk", FOLDER / "memory"
    disk.mkdir()
    memory.mkdir()
    run("mount", "-t", "tmpfs", "tmpfs", str(memory))
    run("mount", "-t", "tmpfs", str(FOLDER), str(ELSEWHERE))
    run("losetup", "--find", image("loop.img"))
    run("mkfs.ext4", "-q", "-F", image("disk.img"))
    run("mount", "-o", "loop", str(FOLDER / "disk.img"), str(disk))
    run("fsfreeze", "--freeze", str(disk))
    stuck = subprocess.Popen(["setsid", "touch", str(disk / "x")], env=UNMARKED, cwd="/")
    wait_for_d_state(stuck.pid)

    jobs = [psutil.Process(pid) for pid in listed_pids(cluster, job, "n1")]
    stepds = {{above for process in jobs for above in process.parents() if above.name() == "slurmstepd"}}
    assert stepds, "the job has a slurmstepd"
    daemons = [psutil.Process(pid) for pid in (daemon.process.pid, daemon.worker_pid(), sleeper.pid, stuck.pid)]
    begun = {{*jobs, *stepds, *daemons, *psutil.Process().children(recursive=True)}}
    names = {{process.name() for process in begun}}
    assert {{"slurmctld", "slurmd", "munged"}} <= names, names
    found = {{
        "pytest": os.getpid(),
        "folder": str(FOLDER),
        "processes": [[process.pid, process.create_time()] for process in begun],
    }}
    NOTE.with_suffix(".new").write_text(json.dumps(found))
    NOTE.with_suffix(".new").rename(NOTE)
    time.sleep(3000)
"""


@pytest.fixture
def elsewhere(tmp_path: Path) -> Path:
    """Return a mount point outside the folder of the run."""
    folder = tmp_path / "elsewhere"
    folder.mkdir()
    return folder


def start_run(directory: Path) -> subprocess.Popen[bytes]:
    with open(directory / "printed", "ab") as printed:
        environment = {**os.environ, "TMPDIR": str(directory)}
        argv = [sys.executable, str(RUN_TESTS), "-q"]
        return subprocess.Popen(argv, cwd=directory, env=environment, stdout=printed, stderr=printed)


def leftovers(started_items: dict[str, Any], elsewhere: Path) -> Iterator[str]:
    """Yield everything still there of a run, in words."""
    for pid, created in started_items["processes"]:
        try:
            process = psutil.Process(pid)
            if process.create_time() == created and process.status() != psutil.STATUS_ZOMBIE:
                yield f"process {pid}, {process.cmdline()}"
        except psutil.NoSuchProcess:
            pass
    run_folder = Path(started_items["folder"])
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        if f"{run_folder}/" in line or str(elsewhere) in line:
            yield f"mount {line}"
    for backing in Path("/sys/block").glob("loop*/loop/backing_file"):
        if f"{run_folder}/" in backing.read_text():
            yield f"loop device {backing.parts[3]} of {backing.read_text().strip()}"
    for folder, names, _ in os.walk("/sys/fs/cgroup"):
        yield from (f"cgroup {folder}/{name}" for name in names if run_folder.name in name)
    if run_folder.exists():
        yield f"{run_folder}: {os.listdir(run_folder)}"


@pytest.mark.parametrize(
    ("killed", "signal_number", "cleans_up_itself"),
    [
        (("pytest",), signal.SIGKILL, True),
        (("run",), signal.SIGTERM, True),
        (("run",), signal.SIGKILL, False),
        (("run", "pytest"), signal.SIGKILL, False),
    ],
    ids=["pytest killed", "time over", "run killed", "both killed"],
)
def test_run_killed_in_middle_of_test_leaves_nothing(
    directory: Path,
    tmp_path: Path,
    elsewhere: Path,
    killed: tuple[str, ...],
    signal_number: int,
    cleans_up_itself: bool,
) -> None:
    require_root()
    require_programs("mkfs.ext4", "mount", "fsfreeze", "losetup", packages="e2fsprogs mount util-linux")
    directory.chmod(0o755)  # munged requires it
    note_file, test, printed = tmp_path / "note", directory / "test_begins.py", directory / "printed"
    (directory / "conftest.py").write_text(CONFTEST)
    (directory / "pytest.ini").write_text("[pytest]\n")
    test.write_text(STARTING_TEST.format(note=str(note_file), elsewhere=str(elsewhere)))
    with start_run(directory) as run:
        until(lambda: note_file.exists() or run.poll() is not None, "everything is started", 400)
        assert note_file.exists(), printed.read_text()
        started_items = json.loads(note_file.read_text())
        remaining = list(leftovers(started_items, elsewhere))
        kinds = [word.split()[0] for word in remaining]
        assert kinds.count("process") == len(started_items["processes"]), remaining
        assert (kinds.count("mount"), kinds.count("loop"), kinds.count("cgroup")) == (3, 2, 1), remaining
        for target in killed:
            os.kill(run.pid if target == "run" else started_items["pytest"], signal_number)
    if cleans_up_itself:
        assert list(leftovers(started_items, elsewhere)) == []
    test.write_text("def test_right(): pass\n")
    with start_run(directory) as next_run:
        assert next_run.wait(400) == 0, printed.read_text()
    assert list(leftovers(started_items, elsewhere)) == []
