"""Tests with files that are replaced while their daemon runs, as by a package upgrade or a rollback.

The daemon continues, and the daemon that is started afterwards has its conditions.
"""

from __future__ import annotations

import os
import shutil
import signal
import time
from pathlib import Path
from typing import Any

import pytest
from healthd_daemon import REPOSITORY, Healthd, condition, have_all_run_since, xid_line
from machine import GPUS, Machine

SHIPPED = ("healthd", "checks", "conf/profiles")
# Without it, an editable installation would supply missing files from the repository.
WITHOUT_EDITABLE = """\
import sys
sys.meta_path[:] = [finder for finder in sys.meta_path if "editable" not in getattr(finder, "__module__", "")]
"""
OTHER_VERSION = "0.1.0+other"
NO_SLURM = {"SLURM_CONF": "/nonexistent/slurm.conf"}
CONFIG = """\
profile = "none"
baseline_file = ""
interval_seconds = 1.0
[slurm]
command_timeout_seconds = 1.0
[checks.ipmi_sel]
interval_seconds = 1.0
"""
SXID = "nvidia-nvswitch0: SXid (PCI:0000:85:00.0): 12028, Non-fatal, Link 32 egress non-posted PRIV error (First)"


@pytest.fixture
def install_dir(directory: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Create the directory of the program: `python -m healthd` finds it first in the current directory."""
    path = directory / "installed"
    path.mkdir()
    (path / "sitecustomize.py").write_text(WITHOUT_EDITABLE)
    monkeypatch.chdir(path)
    return path


def install_other_version(installed: Path) -> None:
    """Install the same program with another version: the daemon detects other files and another version."""
    install_checkout(installed)
    (installed / "healthd/__init__.py").write_text(f'"""Another version."""\n\n__version__ = "{OTHER_VERSION}"\n')


def install_checkout(installed: Path) -> None:
    _remove(installed)
    for part in SHIPPED:
        ignore_bytecode = shutil.ignore_patterns("__pycache__")
        shutil.copytree(REPOSITORY / part, installed / part, symlinks=True, ignore=ignore_bytecode)


def _remove(installed: Path) -> None:
    """Remove each part atomically: a running process may write bytecode into it."""
    for part in filter(Path.exists, (installed / name for name in SHIPPED)):
        shutil.rmtree(part.rename(installed.parent / "removed"))


def daemon_of(installed: Path, machine: Machine) -> Healthd:
    machine.now()
    return Healthd(
        *("--root", str(machine.root), "--mode", "observe", "--node-name", "n1"),
        directory=machine.root.parent,
        config=CONFIG,
        fake_nvml=str(machine.scenario),
        env={"PYTHONPATH": str(installed), **NO_SLURM},
    )


def outcomes(status: dict[str, Any]) -> dict[tuple[str, str], str]:
    return {(result["check"], result["instance"]): result["outcome"] for result in status["results"]}


def restart_worker(daemon: Healthd) -> None:
    """Kill the worker, so that the next one starts from the current files, and wait until all checks have run with
    it."""
    before = daemon.worker_pid()
    os.kill(before, signal.SIGKILL)
    killed = time.time()
    daemon.wait_until(lambda s: have_all_run_since(s, killed + 0.5), "all checks ran in a new worker")
    assert daemon.worker_pid() != before


@pytest.mark.parametrize("first", ["other", "checkout"])
def test_daemon_with_replaced_files_continues_and_next_one_takes_over(
    first: str, install_dir: Path, directory: Path
) -> None:
    """Covers an upgrade and a rollback."""
    installs = [install_other_version, install_checkout]
    install_first, install_second = installs if first == "other" else reversed(installs)
    install_first(install_dir)
    machine = Machine(directory)
    machine.gpus("gpu.5.remap_pending = true")
    with daemon_of(install_dir, machine) as daemon:
        running = daemon.wait_until(
            lambda s: "timed_out" not in outcomes(s).values(), "each check had the time it needs"
        )
        assert (running["version"] == OTHER_VERSION) == (first == "other")
        install_second(install_dir)
        restart_worker(daemon)
        status = daemon.wait_until(
            lambda s: "timed_out" not in outcomes(s).values(), "each check had the time it needs"
        )
        assert status["version"] == running["version"]
        assert outcomes(status) == outcomes(running)
        assert "failed" not in outcomes(status).values()
        # The texts of its codes are read at the first Xid.
        daemon.kernel_line(xid_line(79, GPUS[3].removesuffix(".0")), SXID)
        daemon.wait_until(
            lambda s: condition(s, "gpu_xid/79") and condition(s, "sxid/12028"), "Xid and SXid are evaluated"
        )
        open_conditions = daemon.status()["conditions"]
        assert daemon.stop() == 0

        daemon.start()
        status = daemon.status()
        assert status["version"] != running["version"]
        for before in open_conditions:
            current = condition(status, before["code"], before["subject"])
            assert current is not None, before
            assert (current["severity"], current["first_seen"]) == (before["severity"], before["first_seen"])
        daemon.wait_until(lambda s: outcomes(s) == outcomes(running), "the new daemon runs the same checks")
        daemon.kernel_line(xid_line(31, GPUS[1].removesuffix(".0")))
        daemon.wait_until(lambda s: condition(s, "gpu_xid/31", GPUS[1]), "a new Xid is evaluated")
