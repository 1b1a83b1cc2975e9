"""`healthd validate --nodes` on a real Slurm: it creates, uses and always removes a maintenance reservation."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from healthd_daemon import REPOSITORY
from slurm_cluster import SlurmCluster
from waiting import until

# The table of ib_write_bw --report_gbits, with the numbers of this test.
TABLE = """\
---------------------------------------------------------------------------------------
 #bytes     #iterations    BW peak[Gb/sec]    BW average[Gb/sec]   MsgRate[Mpps]
 8388608    500            {0:.2f}            {0:.2f}              0.005843
---------------------------------------------------------------------------------------
"""
IB_WRITE_BW = """\
#!/bin/sh
for word; do last=$word; done
case $last in
    --report_gbits) exit 0 ;;
    *) cat "$(dirname "$0")/table.$SLURMD_NODENAME" ;;
esac
"""


class Cluster:
    """Four nodes with a `healthd` script, and a state directory and file tree for each node."""

    def __init__(self, slurm: SlurmCluster, folder: Path) -> None:
        self.slurm, self.folder = slurm, folder
        tree = folder / "tree/sys/class/infiniband/mlx5_0/ports/1"
        tree.mkdir(parents=True)
        (tree / "state").write_text("4: ACTIVE\n")
        tools = folder / "tools"
        tools.mkdir()
        (tools / "ib_write_bw").write_text(IB_WRITE_BW)
        (tools / "ib_write_bw").chmod(0o755)
        self.set_speeds({})
        program = folder / "healthd"
        own_options = (
            f'--config "{folder}/healthd.toml" --root "{folder}/tree" --runtime-dir "{folder}/run/$SLURMD_NODENAME"'
        )
        (folder / "healthd.toml").write_text('profile = "none"\nbaseline_file = ""\n')
        self.hang = folder / "hang"
        path = f"export PYTHONPATH={REPOSITORY} PATH={tools}:$PATH\nmkdir -p {folder}/run {folder}/state\n"
        state = f'--state-dir "{folder}/state/$SLURMD_NODENAME"'
        script_start = f"#!/bin/sh\n[ ! -e {self.hang} ] || exec sleep 600\n"
        program.write_text(f'{script_start}{path}exec {sys.executable} -m healthd "$@" {own_options} {state}\n')
        program.chmod(0o755)
        self.env = {**slurm.env, "HEALTHD": str(program), "PYTHONPATH": str(REPOSITORY)}

    def set_speeds(self, speed_by_sender: dict[str, float]) -> None:
        """Set the result of a transfer from each node, in Gb/s."""
        for name in self.slurm.names:
            (self.folder / f"tools/table.{name}").write_text(TABLE.format(speed_by_sender.get(name, 391.5)))

    def start(self, *arguments: str) -> subprocess.Popen[str]:
        argv = [sys.executable, "-m", "healthd", "validate", "--only", "cpu", "--seconds", "20", *arguments]
        pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        return subprocess.Popen(argv, env=self.env, **pipes)

    def validate(self, *arguments: str) -> tuple[int, dict[str, Any], str]:
        process = self.start("--json", *arguments)
        out, err = process.communicate(timeout=600)
        return process.returncode, json.loads(out) if out else {}, err

    def reservations(self) -> str:
        return self.slurm.run("scontrol", "show", "reservation", "-o")

    def job_name(self) -> str:
        """Return the name of the current reservation, also the name of its job, or a name of no job."""
        words = self.reservations().split()
        return next((word.partition("=")[2] for word in words if word.startswith("ReservationName=")), "none")

    def check_free(self) -> None:
        """Check that there is no reservation and no job, and that all nodes are idle."""
        assert "ReservationName" not in self.reservations()
        for name in self.slurm.names:
            self.slurm.wait_state(name, "IDLE", without=("MAINT", "RESERVED", "COMPLETING"))


@pytest.fixture(scope="module")
def nodes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    folder = tmp_path_factory.mktemp("nodes")
    with SlurmCluster(nodes=4, gpus=0) as slurm:
        yield Cluster(slurm, folder)


def test_validate_checks_each_node_and_pair_and_removes_reservation(nodes: Cluster) -> None:
    status, report, err = nodes.validate("--nodes", "n[1-4]")
    assert status == 0, (report, err)
    assert report["problems"] == []
    assert [entry["node"] for entry in report["nodes"]] == ["n1", "n2", "n3", "n4"]
    assert {entry["why"] for entry in report["documents"]} == {"nodes"}
    pairs = {(entry["sender"], entry["receiver"]) for entry in report["transfers"]}
    assert pairs == {("n1", "n2"), ("n2", "n3"), ("n3", "n4"), ("n4", "n1")}
    for name in nodes.slurm.names:
        document = json.loads((nodes.folder / f"state/{name}/validation.json").read_text())
        assert (document["node"], document["why"]) == (name, "nodes")
    creation_lines = [line for line in err.splitlines() if "create reservation" in line]
    assert len(creation_lines) == 1
    assert "Flags=MAINT" in creation_lines[0]
    nodes.check_free()


def test_node_slow_in_both_pairs_is_suspect(nodes: Cluster) -> None:
    nodes.set_speeds({"n1": 203.7, "n2": 205.1})  # transfers to n2 and from n2
    try:
        status, report, err = nodes.validate("--nodes", "n1,n2,n3,n4")
    finally:
        nodes.set_speeds({})
    assert status == 1, (report, err)
    slow = [(entry["sender"], entry["receiver"]) for entry in report["transfers"] if entry["verdict"] == "slow"]
    assert sorted(slow) == [("n1", "n2"), ("n2", "n3")]
    assert [(entry["what"], entry["names"]) for entry in report["suspects"]] == [("node", ["n2"])]
    nodes.check_free()


@pytest.mark.parametrize("signal_number", [signal.SIGINT, signal.SIGTERM])
def test_interrupted_validate_leaves_no_reservation_and_no_job(nodes: Cluster, signal_number: int) -> None:
    nodes.hang.touch()
    try:
        process = nodes.start("--nodes", "n[1-2]")
        until(lambda: "RUNNING" in nodes.slurm.run("squeue", "-h", "-o", "%T", "-n", nodes.job_name()))
        assert "Flags=MAINT" in nodes.reservations()
        assert "PURGE_COMP=00:01:00" in nodes.reservations(), "after kill -9 it ends on its own"
        process.send_signal(signal_number)
        out, err = process.communicate(timeout=600)
    finally:
        nodes.hang.unlink()
    assert (process.returncode, out) == (3, "")
    assert "stopped by a signal; the reservation was removed" in err
    assert nodes.slurm.run("squeue", "-h", "-t", "pending,running") == ""
    nodes.check_free()


def test_validate_refuses_node_with_job_and_lets_job_run(nodes: Cluster) -> None:
    job = nodes.slurm.sbatch("sleep 600", "-w", "n3")
    try:
        nodes.slurm.wait_job(job, "RUNNING")
        status, report, err = nodes.validate("--nodes", "n[2-3]")
        assert (status, report) == (3, {})
        assert "n3 is MIXED: each node must be idle, not drained and not reserved" in err
        assert nodes.slurm.job(job)["JobState"] == "RUNNING"
        assert "ReservationName" not in nodes.reservations()
    finally:
        nodes.slurm.run("scancel", job)
        nodes.slurm.wait_state("n3", "IDLE", without=("COMPLETING",))


@pytest.mark.parametrize(
    ("names", "status", "message"),
    [("n[1-2],n77", 3, "n77"), ("--all", 64, "node names"), ("", 64, "node names")],
)
def test_validate_refuses_unknown_nodes(nodes: Cluster, names: str, status: int, message: str) -> None:
    exit_status, report, err = nodes.validate(f"--nodes={names}")
    assert (exit_status, report) == (status, {}), err
    assert message in err
    assert "ReservationName" not in nodes.reservations()
