"""The files are replaced under a daemon that runs, as an upgrade of the package does, and a rollback: it goes on, and
the one that is started after it knows what it knew.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import time
from pathlib import Path
from typing import Any

import pytest
from healthd_daemon import REPOSITORY, Healthd, condition, looked_since, xid
from machine import GPUS, Machine
from old_healthd import OLD

SHIPPED = ("healthd", "checks", "conf/profiles")
# An editable installation gives what is missing here from the repository.
ALONE = """\
import sys
sys.meta_path[:] = [finder for finder in sys.meta_path if "editable" not in getattr(finder, "__module__", "")]
"""
OLD_VERSION = "0.1.0+old"
NO_SLURM = {"SLURM_CONF": "/nonexistent/slurm.conf"}
CONFIG = """\
profile = "none"
baseline_file = ""
interval_seconds = 1.0
[slurm]
command_seconds = 1.0
[checks.ipmi_sel]
interval_seconds = 1.0
"""
SXID = "nvidia-nvswitch0: SXid (PCI:0000:85:00.0): 12028, Non-fatal, Link 32 egress non-posted PRIV error (First)"
MOMENT = 1_700_000_000.0  # what is larger in the old ledger is a moment


@pytest.fixture
def installed(directory: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the program lies that is run: `python -m healthd` finds it first in the current directory."""
    path = directory / "installed"
    path.mkdir()
    (path / "sitecustomize.py").write_text(ALONE)
    monkeypatch.chdir(path)
    return path


def install_old(installed: Path) -> None:
    """Install the same program under another version: the daemon sees other files and another version."""
    install_new(installed)
    (installed / "healthd/__init__.py").write_text(f'"""It says which it is."""\n\n__version__ = "{OLD_VERSION}"\n')


def install_new(installed: Path) -> None:
    _remove(installed)
    for part in SHIPPED:
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(REPOSITORY / part, installed / part, symlinks=True, ignore=ignored)


def _remove(installed: Path) -> None:
    """Each part at one stroke: who runs may write bytecode into it meanwhile."""
    for part in filter(Path.exists, (installed / name for name in SHIPPED)):
        shutil.rmtree(part.rename(installed.parent / "removed"))


def daemon_of(installed: Path, machine: Machine, config: str = CONFIG, mode: str = "observe") -> Healthd:
    machine.now()
    return Healthd(
        *("--root", str(machine.root), "--mode", mode, "--node-name", "n1"),
        directory=machine.root.parent,
        config=config,
        fake_nvml=str(machine.scenario),
        env={"PYTHONPATH": str(installed), **NO_SLURM},
    )


def outcomes(status: dict[str, Any]) -> dict[tuple[str, str], str]:
    return {(found["check"], found["instance"]): found["outcome"] for found in status["results"]}


def replaced_under(daemon: Healthd) -> None:
    """Its worker ends, so that it starts one of the files that are there now; everything is looked at by that one."""
    before = daemon.worker()
    os.kill(before, signal.SIGKILL)
    killed = time.time()
    daemon.until(lambda s: looked_since(s, killed + 0.5), "everything was looked at by a new worker")
    assert daemon.worker() != before


def moved(value: Any, seconds: float) -> Any:
    """The same ledger, written so much later."""
    if isinstance(value, dict):
        return {key: moved(item, seconds) for key, item in value.items()}
    if isinstance(value, list):
        return [moved(item, seconds) for item in value]
    return value + seconds if isinstance(value, float) and value > MOMENT else value


@pytest.mark.parametrize("first", ["old", "new"])
def test_a_daemon_whose_files_are_replaced_under_it_finishes_its_rounds_and_the_next_one_takes_over(
    first: str, installed: Path, directory: Path
) -> None:
    """An upgrade and a rollback."""
    install, install_other = (install_old, install_new) if first == "old" else (install_new, install_old)
    install(installed)
    machine = Machine(directory)
    machine.gpus("gpu.5.remap_pending = true")
    with daemon_of(installed, machine) as daemon:
        running = daemon.until(lambda s: "timed_out" not in outcomes(s).values(), "each check had the time it needs")
        assert (running["version"] == OLD_VERSION) == (first == "old")
        install_other(installed)
        replaced_under(daemon)
        status = daemon.until(lambda s: "timed_out" not in outcomes(s).values(), "each check had the time it needs")
        assert status["version"] == running["version"]
        assert outcomes(status) == outcomes(running)
        assert "failed" not in outcomes(status).values()
        # What tells of its codes is read when the first one comes.
        daemon.kernel_line(xid(79, GPUS[3].removesuffix(".0")), SXID)
        daemon.until(lambda s: condition(s, "gpu_xid/79") and condition(s, "sxid/12028"), "Xid and SXid are judged")
        known = daemon.status()["conditions"]
        assert daemon.stop() == 0

        daemon.start()
        status = daemon.status()
        assert status["version"] != running["version"]
        for before in known:
            now = condition(status, before["code"], before["subject"])
            assert now is not None, before
            assert (now["severity"], now["first_seen"]) == (before["severity"], before["first_seen"])
        daemon.until(lambda s: outcomes(s) == outcomes(running), "it looks at the same itself")
        daemon.kernel_line(xid(31, GPUS[1].removesuffix(".0")))
        daemon.until(lambda s: condition(s, "gpu_xid/31", GPUS[1]), "an Xid after it")


def test_a_daemon_goes_on_from_an_older_ones_ledger(installed: Path, directory: Path) -> None:
    install_new(installed)
    written = json.loads((OLD / "ledger.json").read_text())
    file = directory / "run/ledger.json"
    file.parent.mkdir()
    file.write_text(json.dumps(moved(written, time.time() - written["slurm"]["confirmed_at"])))
    shutil.copy(OLD / "past.json", file.parent)
    machine = Machine(directory)
    machine.gpus("gpu.5.remap_pending = true")
    machine.ethernet(up=False)
    with daemon_of(
        installed, machine, f"{CONFIG}[checks.eth_link]\nexpected_mbps = {{ eth0 = 100000 }}\n", "act"
    ) as daemon:
        status = daemon.status()
        assert {found["code"]: found["state"] for found in status["conditions"]} == {
            "eth_link/down": "acknowledged",
            "gpu_row_remap/pending": "open",
            "gpu_xid/13": "open",
            "gpu_xid/79": "open",
        }
        assert status["pause"]["why"] == "driver upgrade"
        daemon.until(lambda s: "gpu_xid/79" in s["decision"]["would"], "it would drain")
        daemon.kernel_line(xid(31, GPUS[1].removesuffix(".0")))
        daemon.until(lambda s: condition(s, "gpu_xid/31"), "another Xid")
    ledger = json.loads(file.read_text())
    assert [(event["code"], event["sequence"]) for event in ledger["events"]] == [
        ("31", 1),
        ("79", 2),
        ("13", 3),
        ("31", 4),
    ]
    assert [found["code"] for found in ledger["cleared"]] == ["gpu_xid/31"]
    assert ledger["slurm"]["requeued"][0]["job"] == "1"
    assert "unreadable" not in daemon.log.read_text()


def test_a_sites_checks_of_then_are_run_by_the_daemon(installed: Path, directory: Path) -> None:
    install_new(installed)
    shutil.copytree(OLD / "checks.d", directory / "checks.d", ignore=shutil.ignore_patterns("__pycache__"))
    site = (OLD / "site.toml").read_text().replace("CHECKS_DIR", str(directory / "checks.d"))
    site = site.replace("max_errors = 20", "max_errors = 20\ninterval_seconds = 3600.0")
    site += "[checks.leaf.rail2]\ninterval_seconds = 1.0\ntimeout_seconds = 5.0\n"
    machine = Machine(directory)
    machine.write({"/leaf": "up 5\n"})
    with daemon_of(installed, machine, site) as daemon:
        machine.write({"/leaf": "up 50\n"})
        daemon.kernel_line(xid(31, GPUS[1].removesuffix(".0")))
        found = daemon.until(
            lambda s: condition(s, "leaf/errors"), "it looks after an Xid, and knows what it read before"
        )
        assert "45 errors within an hour" in str(condition(found, "leaf/errors"))
        machine.write({"/leaf-hangs": "yes\n"})
        daemon.until(lambda s: condition(s, "leaf/hang", "rail2"), "what it says of a run that hangs")
