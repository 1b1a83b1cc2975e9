"""`healthd fleet lemons --apply` against a real slurmctld. With three nodes the fleet limit is "at least 2"."""

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
OTHERS = 150  # nodes of the store that Slurm does not have: the fleet that the lemons are held against


@pytest.fixture(scope="module")
def cluster() -> Iterator[SlurmCluster]:
    with SlurmCluster(nodes=3, gpus=0) as running:
        yield running


@pytest.fixture
def rested(cluster: SlurmCluster) -> SlurmCluster:
    """All nodes are idle, and nobody wrote on them."""
    for name in cluster.names:
        cluster.attempt("scontrol", "update", f"NodeName={name}", "State=RESUME", "Reason=")
        cluster.attempt("scontrol", "update", f"NodeName={name}", "Reason=")
        cluster.wait_state(name, "IDLE", without=("DRAIN", "NOT_RESPONDING"))
    return cluster


def healthd(cluster: SlurmCluster, *words: str) -> subprocess.CompletedProcess[str]:
    argv = [sys.executable, "-m", "healthd", "fleet", *words]
    return subprocess.run(argv, env=cluster.env, timeout=400, capture_output=True, text=True, check=False)


def store(cluster: SlurmCluster, folder: Path, lemons: dict[str, int], days_ago: int = 0, others: int = OTHERS) -> Path:
    """Failures of another tool, up to an hour ago: each of these nodes failed so often, the others once."""
    now = int(time.time()) - days_ago * DAY
    lines = [
        f"{name},{now - 3 * time_ago * DAY - 3600},hw" for name, times in lemons.items() for time_ago in range(times)
    ]
    lines += [f"g{number:03d},{now - (number + 1) * DAY},hw" for number in range(others)]
    file = folder / "failures.csv"
    file.write_text("\n".join(["node,time,kind", *lines]) + "\n")
    db = folder / "db"
    done = healthd(cluster, "ingest", "--out", str(db), "--cluster", "test", "--failures", str(file))
    assert done.returncode == 0, done.stderr
    return db


def lemons(cluster: SlurmCluster, db: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return healthd(cluster, "lemons", "--db", str(db), "--cluster", "test", *words)


def flags(cluster: SlurmCluster, name: str) -> frozenset[str]:
    return cluster.node(name).flags


def test_without_apply_nothing_changes_and_the_line_that_is_shown_works(rested: SlurmCluster, tmp_path: Path) -> None:
    db = store(rested, tmp_path, {"n1": 8})
    shown = lemons(rested, db)
    assert shown.returncode == 1, shown.stderr
    assert "DRAIN" not in flags(rested, "n1")
    line = next(line.strip() for line in shown.stdout.splitlines() if "scontrol update" in line)
    subprocess.run(["sh", "-c", line], env=rested.env, timeout=240, check=True)
    rested.wait_state("n1", "DRAIN", reason="lemon: 8 failures in 28 d")


def test_apply_drains_each_within_the_limit_and_never_beyond(rested: SlurmCluster, tmp_path: Path) -> None:
    db = store(rested, tmp_path, {"n1": 9, "n2": 8, "n3": 7})
    done = lemons(rested, db, "--apply", "--json")
    assert done.returncode == 1, done.stderr
    applied = json.loads(done.stdout)["applied"]
    assert [(one["node"], one["drained"]) for one in applied] == [("n1", True), ("n2", True), ("n3", False)]
    assert "fleet limit: healthd keeps 2 of 3 nodes in partition gpu drained; the limit is 2" in applied[2]["text"]
    for name in ("n1", "n2"):
        rested.wait_state(name, "DRAIN", reason="lemon: ")
    assert "DRAIN" not in flags(rested, "n3")

    again = json.loads(lemons(rested, db, "--apply", "--json").stdout)["applied"]
    assert [one["drained"] for one in again] == [False, False, False]
    assert "lemon: " in again[0]["text"]
    for name in ("n1", "n2"):
        assert "DRAIN" in flags(rested, name), "nothing resumes"


def test_what_somebody_else_drained_is_left_as_it_is_and_daemons_drains_count(
    rested: SlurmCluster, tmp_path: Path
) -> None:
    rested.run("scontrol", "update", "NodeName=n1", "State=DRAIN", "Reason=anna looks at it")
    rested.run("scontrol", "update", "NodeName=n2", "State=DRAIN", "Reason=healthd: gpu_xid/79 gpu: lost")
    db = store(rested, tmp_path, {"n1": 9, "n2": 8, "n3": 7})
    before = {name: rested.node(name) for name in ("n1", "n2")}
    applied = json.loads(lemons(rested, db, "--apply", "--json").stdout)["applied"]
    assert [(one["node"], one["drained"]) for one in applied] == [("n1", False), ("n2", False), ("n3", True)]
    assert "anna looks at it" in applied[0]["text"]
    assert {name: rested.node(name) for name in ("n1", "n2")} == before


def test_a_limit_of_none_drains_none_and_the_other_cluster_has_to_be_named(
    rested: SlurmCluster, tmp_path: Path
) -> None:
    db = store(rested, tmp_path, {"n1": 8})
    config = tmp_path / "healthd.toml"
    config.write_text("[fleet]\nlimit_percent = 0.0\nlimit_min_nodes = 0\n")
    done = healthd(rested, "lemons", "--db", str(db), "--apply", "--config", str(config))
    assert "n1: left: fleet limit: healthd keeps " in " ".join(done.stdout.split())
    other = tmp_path / "other"
    other.mkdir()
    db = store(rested, other, {"n1": 8})
    named = subprocess.run(
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
        env=rested.env,
        timeout=400,
        capture_output=True,
        text=True,
        check=False,
    )
    assert named.returncode == 0, named.stderr
    for said in ((), ("--cluster", "far")):
        refused = healthd(rested, "lemons", "--db", str(other / "db2"), "--apply", *said)
        assert refused.returncode == 64
        assert "the store has cluster far, but the local cluster is test" in refused.stderr
    assert "DRAIN" not in flags(rested, "n1")


def test_a_slurm_that_does_not_answer_is_said_in_one_sentence(rested: SlurmCluster, tmp_path: Path) -> None:
    db = store(rested, tmp_path, {"n1": 8})
    env = rested.env | {"SLURM_CONF": str(tmp_path / "none.conf")}
    (tmp_path / "none.conf").write_text("ClusterName=test\nSlurmctldHost=localhost(127.0.0.1)\nSlurmctldPort=1\n")
    argv = [sys.executable, "-m", "healthd", "fleet", "lemons", "--db", str(db), "--cluster", "test", "--apply"]
    done = subprocess.run(argv, env=env, timeout=400, capture_output=True, text=True, check=False)
    assert done.returncode == 3, done.stdout
    assert done.stderr.startswith("healthd fleet lemons: --apply: scontrol show: ")
    assert done.stderr.endswith("(drained so far: none)\n")
    assert "Traceback" not in done.stderr


def test_what_is_long_past_drains_nothing_and_its_lines_say_how_old_it_is(rested: SlurmCluster, tmp_path: Path) -> None:
    db = store(rested, tmp_path, {"n1": 8}, days_ago=60)
    shown = lemons(rested, db)
    assert shown.returncode == 1
    assert "The store ends at " in shown.stdout.partition("scontrol update NodeName=n1")[0]
    refused = lemons(rested, db, "--apply")
    assert (refused.returncode, refused.stdout) == (3, "")
    assert "not within a day of now" in refused.stderr
    yesterday = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(time.time() - DAY))
    refused = lemons(rested, db, "--apply", "--to", yesterday)
    assert (refused.returncode, refused.stdout) == (64, "")
    assert "leave --to out" in refused.stderr
    assert "DRAIN" not in flags(rested, "n1")


def test_one_run_after_another_drains_no_more_than_the_cluster_may_have(rested: SlurmCluster, tmp_path: Path) -> None:
    """Of 53 nodes one may be out as a lemon: the second run is told of the first one's."""
    db = store(rested, tmp_path, {"n1": 9}, others=50)
    (first,) = json.loads(lemons(rested, db, "--apply", "--json").stdout)["applied"]
    assert first["drained"]
    later = tmp_path / "later"
    later.mkdir()
    db = store(rested, later, {"n2": 9}, others=50)
    (second,) = json.loads(lemons(rested, db, "--apply", "--json").stdout)["applied"]
    assert (second["node"], second["drained"]) == ("n2", False)
    assert "1 nodes in the cluster are already drained as lemons; the limit is 1" in second["text"]
    assert "DRAIN" not in flags(rested, "n2")


def programs(cluster: SlurmCluster, folder: Path, name: str, before: str) -> dict[str, str]:
    """The environment with one of Slurm's programs that does this first."""
    real = subprocess.run(
        ["sh", "-c", f"command -v {name}"], env=cluster.env, timeout=240, capture_output=True, text=True, check=True
    ).stdout.strip()
    where = folder / "programs"
    where.mkdir(exist_ok=True)
    program = where / name
    program.write_text(f'#!/bin/sh\n{before}\nexec {real} "$@"\n')
    program.chmod(0o755)
    return cluster.env | {"PATH": f"{where}:{cluster.env.get('PATH', os.environ['PATH'])}"}


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
def test_a_slurm_that_fails_half_way_is_told_with_what_was_done(
    rested: SlurmCluster, tmp_path: Path, program: str, before: str, seconds: int, sentence: str
) -> None:
    db = store(rested, tmp_path, {"n1": 9, "n2": 8})
    config = tmp_path / "healthd.toml"
    config.write_text(f"[slurm]\ncommand_timeout_seconds = {seconds}\n")
    argv = [sys.executable, "-m", "healthd", "fleet", "lemons", "--db", str(db), "--apply", "--config", str(config)]
    env = programs(rested, tmp_path, program, before)
    done = subprocess.run(argv, env=env, timeout=400, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (3, "")
    assert done.stderr == f"healthd fleet lemons: --apply: {sentence}"
    assert "DRAIN" in flags(rested, "n1")


def test_a_lemon_that_slurm_does_not_have_keeps_no_other_from_its_drain(rested: SlurmCluster, tmp_path: Path) -> None:
    db = store(rested, tmp_path, {"gone": 9, "n2": 8})
    applied = json.loads(lemons(rested, db, "--apply", "--json").stdout)["applied"]
    assert [(one["node"], one["drained"]) for one in applied] == [("gone", False), ("n2", True)]
    assert applied[0]["text"] == 'left: Slurm has no node "gone" in any partition'
