"""Tests of `healthd doctor` with a real Slurm: while a daemon runs, as another user, and with a file system that
hangs."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from healthd_daemon import Healthd
from requirements import require_root
from slurm_cluster import SlurmCluster

from healthd.agent.doctor import slurm
from healthd.agent.doctor.result import State
from healthd.common.slurm.commands import ENVIRONMENT, CommandResult

HANGFS = Path(__file__).with_name("hangfs.py")


@pytest.fixture(scope="module")
def cluster() -> Iterator[SlurmCluster]:
    with SlurmCluster(nodes=1, gpus=0) as running:
        yield running


def doctor(env: dict[str, str], *flags: str) -> tuple[int, dict[str, dict[str, Any]]]:
    """Return the exit status and the lines by topic."""
    command = [sys.executable, "-m", "healthd", "doctor", "--json", *flags]
    result = subprocess.run(command, env=env, capture_output=True, text=True, timeout=300)
    assert result.stderr == ""
    return result.returncode, {line["topic"]: line for line in json.loads(result.stdout)["lines"]}


def test_doctor_finds_everything_ok_with_daemon_on_slurm(cluster: SlurmCluster, tmp_path: Path) -> None:
    flags = ("--mode", "act", "--node-name", "n1", "--fake-nvml", "dgx-h100")
    with Healthd(*flags, env=cluster.env, directory=tmp_path) as daemon:
        daemon.wait_until(lambda status: status["round"]["number"] >= 1, "a round")
        config = tmp_path / "doctor.toml"
        config.write_text('mode = "act"\nnode_name = "n1"\n[metrics]\nlisten = "off"\ntextfile = "/run/x.prom"\n')
        before = cluster.node("n1").flags
        _, lines = doctor(
            cluster.env, "--config", str(config), "--runtime-dir", str(daemon.run_dir), "--fake-nvml", "dgx-h100"
        )
        for topic in ("settings", "daemon", "GPUs", "kernel log", "munge", "Slurm node", "Slurm rights", "room"):
            assert lines[topic]["state"] == "ok", lines[topic]
        assert "8 GPUs" in lines["GPUs"]["message"]
        assert "MiB" in lines["daemon"]["message"]
        assert cluster.node("n1").flags == before, "doctor changes nothing"


def test_doctor_reports_user_without_drain_rights(cluster: SlurmCluster) -> None:
    require_root()
    user = {**cluster.env}
    command = ["setpriv", "--reuid", "65534", "--regid", "65534", "--clear-groups"]
    command += ["scontrol", "update", f"NodeName={slurm.NONEXISTENT_NODE}", "State=DRAIN", "Reason=healthd doctor"]
    refused = subprocess.run(command, env=user, capture_output=True, timeout=240)

    def as_nobody(argv: tuple[str, ...]) -> CommandResult:
        completed = refused
        if "update" not in argv:
            completed = subprocess.run(argv, env={**cluster.env, **ENVIRONMENT}, capture_output=True, timeout=240)
        return CommandResult(completed.returncode, completed.stdout, completed.stderr.decode())

    from healthd.agent.settings.config import Settings
    from healthd.common.model import Mode

    lines = {line.topic: line for line in slurm.lines(Settings(mode=Mode.ACT, node_name="n1"), as_nobody)}
    assert lines["Slurm rights"].state is State.FAILED
    assert "Invalid user id" in lines["Slurm rights"].message
    assert lines["Slurm node"].state is State.OK


@pytest.fixture
def hanging_mount(tmp_path: Path) -> Iterator[Path]:
    """Mount a file system that answers no request."""
    require_root()
    point = tmp_path / "dead"
    point.mkdir()
    with contextlib.ExitStack() as stack:
        hang = subprocess.Popen([sys.executable, HANGFS, point], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        stack.callback(hang.wait, 60)
        assert hang.stdin is not None
        assert hang.stdout is not None
        stack.callback(hang.stdout.close)
        stack.callback(hang.stdin.close)
        assert hang.stdout.readline() == b"ready\n"
        yield point


def test_doctor_reports_hanging_state_directory_and_continues(tmp_path: Path, hanging_mount: Path) -> None:
    config = tmp_path / "healthd.toml"
    config.write_text(f'state_dir = "{hanging_mount}/state"\n')
    status, lines = doctor(dict(os.environ), "--config", str(config), "--runtime-dir", str(tmp_path))
    assert status == 2
    assert "no answer within" in lines["room"]["message"]
    assert lines["kernel log"]["state"] == "ok"


@pytest.mark.parametrize(
    ("setting", "topic"),
    [("baseline_file", "settings"), ("checks_dir", "settings"), ("runtime_dir", "daemon"), ("", "settings")],
)
def test_doctor_names_first_hanging_file(tmp_path: Path, hanging_mount: Path, setting: str, topic: str) -> None:
    config = tmp_path / "healthd.toml" if setting else hanging_mount / "healthd.toml"
    if setting:
        config.write_text(f'{setting} = "{hanging_mount}/it"\n')
    flags = ("--runtime-dir", str(tmp_path)) if setting != "runtime_dir" else ()
    status, lines = doctor(dict(os.environ), "--config", str(config), *flags)
    assert status == 2
    named = f"{hanging_mount}/it ({setting})" if setting else str(config)
    assert lines[topic]["message"].startswith(f"{named}: no answer within"), lines[topic]
    assert lines["kernel log"]["state"] == "ok"
