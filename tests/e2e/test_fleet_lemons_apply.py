"""Tests of `healthd fleet lemons --apply` with a real slurmctld. With three nodes the fleet limit is its minimum, 2."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from slurm_cluster import SlurmCluster

DAY = 86400
OTHERS = 150  # nodes that Slurm does not have: the fleet with which the lemons are compared


@pytest.fixture(scope="module")
def cluster() -> Iterator[SlurmCluster]:
    with SlurmCluster(nodes=3, gpus=0) as running:
        yield running


@pytest.fixture
def clean_cluster(cluster: SlurmCluster) -> SlurmCluster:
    """Return the cluster with all nodes idle and without a reason."""
    for name in cluster.names:
        cluster.attempt("scontrol", "update", f"NodeName={name}", "State=RESUME", "Reason=")
        cluster.attempt("scontrol", "update", f"NodeName={name}", "Reason=")
        cluster.wait_state(name, "IDLE", without=("DRAIN", "NOT_RESPONDING"))
    return cluster


def run_fleet(cluster: SlurmCluster, *words: str) -> subprocess.CompletedProcess[str]:
    argv = [sys.executable, "-m", "healthd", "fleet", *words]
    return subprocess.run(argv, env=cluster.env, timeout=400, capture_output=True, text=True, check=False)


def make_store(
    cluster: SlurmCluster, folder: Path, lemons: dict[str, int], days_ago: int = 0, others: int = OTHERS
) -> Path:
    """Ingest failures from another tool until an hour ago: these numbers of failures on these nodes, one on the
    others."""
    now = int(time.time()) - days_ago * DAY
    lines = [
        f"{name},{now - 3 * time_ago * DAY - 3600},hw" for name, times in lemons.items() for time_ago in range(times)
    ]
    lines += [f"g{number:03d},{now - (number + 1) * DAY},hw" for number in range(others)]
    file = folder / "failures.csv"
    file.write_text("\n".join(["node,time,kind", *lines]) + "\n")
    db = folder / "db"
    result = run_fleet(cluster, "ingest", "--out", str(db), "--cluster", "test", "--failures", str(file))
    assert result.returncode == 0, result.stderr
    return db


def run_lemons(cluster: SlurmCluster, db: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return run_fleet(cluster, "lemons", "--db", str(db), "--cluster", "test", *words)


def flags(cluster: SlurmCluster, name: str) -> frozenset[str]:
    return cluster.node(name).flags


def test_lemons_without_apply_changes_nothing_and_printed_command_works(
    clean_cluster: SlurmCluster, tmp_path: Path
) -> None:
    db = make_store(clean_cluster, tmp_path, {"n1": 8})
    result = run_lemons(clean_cluster, db)
    assert result.returncode == 1, result.stderr
    assert "DRAIN" not in flags(clean_cluster, "n1")
    line = next(line.strip() for line in result.stdout.splitlines() if "scontrol update" in line)
    subprocess.run(["sh", "-c", line], env=clean_cluster.env, timeout=240, check=True)
    clean_cluster.wait_state("n1", "DRAIN", reason="lemon: 8 failures in 28 d")


def test_apply_drains_up_to_fleet_limit(clean_cluster: SlurmCluster, tmp_path: Path) -> None:
    db = make_store(clean_cluster, tmp_path, {"n1": 9, "n2": 8, "n3": 7})
    result = run_lemons(clean_cluster, db, "--apply", "--json")
    assert result.returncode == 1, result.stderr
    applied = json.loads(result.stdout)["applied"]
    assert [(entry["node"], entry["drained"]) for entry in applied] == [("n1", True), ("n2", True), ("n3", False)]
    assert "fleet limit: healthd keeps 2 of 3 nodes in partition gpu drained; the limit is 2" in applied[2]["text"]
    for name in ("n1", "n2"):
        clean_cluster.wait_state(name, "DRAIN", reason="lemon: ")
    assert "DRAIN" not in flags(clean_cluster, "n3")

    again = json.loads(run_lemons(clean_cluster, db, "--apply", "--json").stdout)["applied"]
    assert [entry["drained"] for entry in again] == [False, False, False]
    assert "lemon: " in again[0]["text"]
    for name in ("n1", "n2"):
        assert "DRAIN" in flags(clean_cluster, name), "apply resumes no node"


def test_apply_keeps_foreign_drains_and_counts_drains_of_daemons(clean_cluster: SlurmCluster, tmp_path: Path) -> None:
    clean_cluster.run("scontrol", "update", "NodeName=n1", "State=DRAIN", "Reason=anna looks at it")
    clean_cluster.run("scontrol", "update", "NodeName=n2", "State=DRAIN", "Reason=healthd: gpu_xid/79 gpu: lost")
    db = make_store(clean_cluster, tmp_path, {"n1": 9, "n2": 8, "n3": 7})
    before = {name: clean_cluster.node(name) for name in ("n1", "n2")}
    applied = json.loads(run_lemons(clean_cluster, db, "--apply", "--json").stdout)["applied"]
    assert [(entry["node"], entry["drained"]) for entry in applied] == [("n1", False), ("n2", False), ("n3", True)]
    assert "anna looks at it" in applied[0]["text"]
    assert {name: clean_cluster.node(name) for name in ("n1", "n2")} == before


def test_apply_respects_limit_0_and_refuses_other_cluster(clean_cluster: SlurmCluster, tmp_path: Path) -> None:
    db = make_store(clean_cluster, tmp_path, {"n1": 8})
    config = tmp_path / "healthd.toml"
    config.write_text("[fleet]\nlimit_percent = 0.0\nlimit_min_nodes = 0\n")
    result = run_fleet(clean_cluster, "lemons", "--db", str(db), "--apply", "--config", str(config))
    assert "n1: skipped: fleet limit: healthd keeps " in " ".join(result.stdout.split())
    other = tmp_path / "other"
    other.mkdir()
    db = make_store(clean_cluster, other, {"n1": 8})
    ingested = subprocess.run(
        [
            sys.executable,
            "-m",
            "healthd",
            "fleet",
            "ingest",
            "--out",
            str(other / "db2"),
            "--cluster",
            "far",
            "--failures",
            str(other / "failures.csv"),
        ],
        env=clean_cluster.env,
        timeout=400,
        capture_output=True,
        text=True,
        check=False,
    )
    assert ingested.returncode == 0, ingested.stderr
    for cluster_flags in ((), ("--cluster", "far")):
        refused = run_fleet(clean_cluster, "lemons", "--db", str(other / "db2"), "--apply", *cluster_flags)
        assert refused.returncode == 64
        assert "the store has cluster far, but the local cluster is test" in refused.stderr
    assert "DRAIN" not in flags(clean_cluster, "n1")


def test_apply_without_slurm_is_one_sentence(clean_cluster: SlurmCluster, tmp_path: Path) -> None:
    db = make_store(clean_cluster, tmp_path, {"n1": 8})
    env = clean_cluster.env | {"SLURM_CONF": str(tmp_path / "none.conf")}
    (tmp_path / "none.conf").write_text("ClusterName=test\nSlurmctldHost=localhost(127.0.0.1)\nSlurmctldPort=1\n")
    argv = [sys.executable, "-m", "healthd", "fleet", "lemons", "--db", str(db), "--cluster", "test", "--apply"]
    result = subprocess.run(argv, env=env, timeout=400, capture_output=True, text=True, check=False)
    assert result.returncode == 3, result.stdout
    assert result.stderr.startswith("healthd fleet lemons: --apply: scontrol show: ")
    assert result.stderr.endswith("(drained so far: none)\n")
    assert "Traceback" not in result.stderr


def test_apply_refuses_old_store_and_printed_commands_state_its_age(
    clean_cluster: SlurmCluster, tmp_path: Path
) -> None:
    db = make_store(clean_cluster, tmp_path, {"n1": 8}, days_ago=60)
    result = run_lemons(clean_cluster, db)
    assert result.returncode == 1
    assert "The store ends at " in result.stdout.partition("scontrol update NodeName=n1")[0]
    refused = run_lemons(clean_cluster, db, "--apply")
    assert (refused.returncode, refused.stdout) == (3, "")
    assert "not within a day of now" in refused.stderr
    yesterday = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(time.time() - DAY))
    refused = run_lemons(clean_cluster, db, "--apply", "--to", yesterday)
    assert (refused.returncode, refused.stdout) == (64, "")
    assert "omit --to" in refused.stderr
    assert "DRAIN" not in flags(clean_cluster, "n1")


def test_apply_counts_lemons_of_earlier_runs(clean_cluster: SlurmCluster, tmp_path: Path) -> None:
    """With 53 nodes, one may be drained as a lemon; the second run counts that of the first."""
    db = make_store(clean_cluster, tmp_path, {"n1": 9}, others=50)
    (first,) = json.loads(run_lemons(clean_cluster, db, "--apply", "--json").stdout)["applied"]
    assert first["drained"]
    later = tmp_path / "later"
    later.mkdir()
    db = make_store(clean_cluster, later, {"n2": 9}, others=50)
    (second,) = json.loads(run_lemons(clean_cluster, db, "--apply", "--json").stdout)["applied"]
    assert (second["node"], second["drained"]) == ("n2", False)
    assert "1 nodes in the cluster are already drained as lemons; the limit is 1" in second["text"]
    assert "DRAIN" not in flags(clean_cluster, "n2")


def environment_with_wrapper(cluster: SlurmCluster, folder: Path, name: str, before: str) -> dict[str, str]:
    """Return an environment in which one of Slurm's programs runs `before` first."""
    program_path = subprocess.run(
        ["sh", "-c", f"command -v {name}"], env=cluster.env, timeout=240, capture_output=True, text=True, check=True
    ).stdout.strip()
    wrapper_dir = folder / "programs"
    wrapper_dir.mkdir(exist_ok=True)
    program = wrapper_dir / name
    program.write_text(f'#!/bin/sh\n{before}\nexec {program_path} "$@"\n')
    program.chmod(0o755)
    return cluster.env | {"PATH": f"{wrapper_dir}:{cluster.env.get('PATH', os.environ['PATH'])}"}


@pytest.mark.parametrize(
    ("program", "before", "seconds", "sentence"),
    [
        (
            "scontrol",
            'case "$*" in *NodeName=n2*) echo "slurm_update error: no" >&2; exit 1;; esac',
            60,
            "scontrol update: slurm_update error: no (drained so far: n1)\n",
        ),
        (
            "sinfo",
            'case "$*" in *"-n n2 "*) scontrol show node n2 | grep -q DRAIN && exec sleep 600;; esac',
            10,
            "sinfo did not end in time (drained so far: n1; the drain of n2 was sent but not confirmed)\n",
        ),
    ],
)
def test_apply_reports_slurm_failure_with_drains_so_far(
    clean_cluster: SlurmCluster, tmp_path: Path, program: str, before: str, seconds: int, sentence: str
) -> None:
    db = make_store(clean_cluster, tmp_path, {"n1": 9, "n2": 8})
    config = tmp_path / "healthd.toml"
    config.write_text(f"[slurm]\ncommand_timeout_seconds = {seconds}\n")
    argv = [sys.executable, "-m", "healthd", "fleet", "lemons", "--db", str(db), "--apply", "--config", str(config)]
    env = environment_with_wrapper(clean_cluster, tmp_path, program, before)
    result = subprocess.run(argv, env=env, timeout=400, capture_output=True, text=True, check=False)
    assert (result.returncode, result.stdout) == (3, "")
    assert result.stderr == f"healthd fleet lemons: --apply: {sentence}"
    assert "DRAIN" in flags(clean_cluster, "n1")


def test_apply_skips_lemon_unknown_to_slurm(clean_cluster: SlurmCluster, tmp_path: Path) -> None:
    db = make_store(clean_cluster, tmp_path, {"gone": 9, "n2": 8})
    applied = json.loads(run_lemons(clean_cluster, db, "--apply", "--json").stdout)["applied"]
    assert [(entry["node"], entry["drained"]) for entry in applied] == [("gone", False), ("n2", True)]
    assert applied[0]["text"] == 'skipped: Slurm has no node "gone" in any partition'
