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
        self.speeds({})
        program = folder / "healthd"
        own = f'--config "{folder}/healthd.toml" --root "{folder}/tree" --runtime-dir "{folder}/run/$SLURMD_NODENAME"'
        (folder / "healthd.toml").write_text('profile = "none"\nbaseline_file = ""\n')
        self.hang = folder / "hang"
        path = f"export PYTHONPATH={REPOSITORY} PATH={tools}:$PATH\nmkdir -p {folder}/run {folder}/state\n"
        state = f'--state-dir "{folder}/state/$SLURMD_NODENAME"'
        begins = f"#!/bin/sh\n[ ! -e {self.hang} ] || exec sleep 600\n"
        program.write_text(f'{begins}{path}exec {sys.executable} -m healthd "$@" {own} {state}\n')
        program.chmod(0o755)
        self.env = {**slurm.env, "HEALTHD": str(program), "PYTHONPATH": str(REPOSITORY)}

    def speeds(self, of_sender: dict[str, float]) -> None:
        """Set the result of a transfer from each node, in Gb/s."""
        for name in self.slurm.names:
            (self.folder / f"tools/table.{name}").write_text(TABLE.format(of_sender.get(name, 391.5)))

    def begin(self, *arguments: str) -> subprocess.Popen[str]:
        argv = [sys.executable, "-m", "healthd", "validate", "--only", "cpu", "--seconds", "20", *arguments]
        pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        return subprocess.Popen(argv, env=self.env, **pipes)

    def validate(self, *arguments: str) -> tuple[int, dict[str, Any], str]:
        process = self.begin("--json", *arguments)
        out, err = process.communicate(timeout=600)
        return process.returncode, json.loads(out) if out else {}, err

    def reservations(self) -> str:
        return self.slurm.run("scontrol", "show", "reservation", "-o")

    def named(self) -> str:
        """Return the name of the current reservation, also the name of its job, or a name of no job."""
        words = self.reservations().split()
        return next((w.partition("=")[2] for w in words if w.startswith("ReservationName=")), "none")

    def must_be_free(self) -> None:
        """Check that there is no reservation and no job, and that all nodes are idle."""
        assert "ReservationName" not in self.reservations()
        for name in self.slurm.names:
            self.slurm.wait_state(name, "IDLE", without=("MAINT", "RESERVED", "COMPLETING"))


@pytest.fixture(scope="module")
def nodes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    folder = tmp_path_factory.mktemp("nodes")
    with SlurmCluster(nodes=4, gpus=0) as slurm:
        yield Cluster(slurm, folder)


def test_each_node_is_validated_and_every_pair_of_the_ring_and_the_reservation_is_gone(nodes: Cluster) -> None:
    status, told, err = nodes.validate("--nodes", "n[1-4]")
    assert status == 0, (told, err)
    assert told["problems"] == []
    assert [one["node"] for one in told["nodes"]] == ["n1", "n2", "n3", "n4"]
    assert {one["why"] for one in told["documents"]} == {"nodes"}
    pairs = {(one["sender"], one["receiver"]) for one in told["transfers"]}
    assert pairs == {("n1", "n2"), ("n2", "n3"), ("n3", "n4"), ("n4", "n1")}
    for name in nodes.slurm.names:
        kept = json.loads((nodes.folder / f"state/{name}/validation.json").read_text())
        assert (kept["node"], kept["why"]) == (name, "nodes")
    made = [line for line in err.splitlines() if "create reservation" in line]
    assert len(made) == 1
    assert "Flags=MAINT" in made[0]
    nodes.must_be_free()


def test_a_node_that_is_slow_in_both_its_pairs_is_the_suspect(nodes: Cluster) -> None:
    nodes.speeds({"n1": 203.7, "n2": 205.1})  # transfers to n2 and from n2
    try:
        status, told, err = nodes.validate("--nodes", "n1,n2,n3,n4")
    finally:
        nodes.speeds({})
    assert status == 1, (told, err)
    slow = [(one["sender"], one["receiver"]) for one in told["transfers"] if one["verdict"] == "slow"]
    assert sorted(slow) == [("n1", "n2"), ("n2", "n3")]
    assert [(one["what"], one["names"]) for one in told["suspects"]] == [("node", ["n2"])]
    nodes.must_be_free()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_person_who_has_had_enough_leaves_no_reservation_and_no_job_behind(nodes: Cluster, number: int) -> None:
    nodes.hang.touch()
    try:
        process = nodes.begin("--nodes", "n[1-2]")
        until(lambda: "RUNNING" in nodes.slurm.run("squeue", "-h", "-o", "%T", "-n", nodes.named()))
        assert "Flags=MAINT" in nodes.reservations()
        assert "PURGE_COMP=00:01:00" in nodes.reservations(), "after kill -9 it ends on its own"
        process.send_signal(number)
        out, err = process.communicate(timeout=600)
    finally:
        nodes.hang.unlink()
    assert (process.returncode, out) == (3, "")
    assert "stopped by a signal; the reservation was removed" in err
    assert nodes.slurm.run("squeue", "-h", "-t", "pending,running") == ""
    nodes.must_be_free()


def test_a_node_with_a_job_is_refused_and_the_job_goes_on(nodes: Cluster) -> None:
    job = nodes.slurm.sbatch("sleep 600", "-w", "n3")
    try:
        nodes.slurm.wait_job(job, "RUNNING")
        status, told, err = nodes.validate("--nodes", "n[2-3]")
        assert (status, told) == (3, {})
        assert "n3 is MIXED: each node must be idle, undrained and in no reservation" in err
        assert nodes.slurm.job(job)["JobState"] == "RUNNING"
        assert "ReservationName" not in nodes.reservations()
    finally:
        nodes.slurm.run("scancel", job)
        nodes.slurm.wait_state("n3", "IDLE", without=("COMPLETING",))


@pytest.mark.parametrize(
    ("names", "status", "words"),
    [("n[1-2],n77", 3, "n77"), ("--all", 64, "node names"), ("", 64, "node names")],
)
def test_names_that_are_none_of_its_nodes_are_refused(nodes: Cluster, names: str, status: int, words: str) -> None:
    found, told, err = nodes.validate(f"--nodes={names}")
    assert (found, told) == (status, {}), err
    assert words in err
    assert "ReservationName" not in nodes.reservations()
