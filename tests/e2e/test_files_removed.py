"""Tests with a venv that is removed or reinstalled while its daemon runs.

The daemon reports it and continues with the loaded code, and its conditions and decisions remain.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import urllib.request
from pathlib import Path
from typing import Any

import prometheus_client
import psutil
import pytest
from healthd_daemon import REPOSITORY, Healthd, condition, wait_for_rounds, xid_line
from waiting import until

GONE, REPLACED = "healthd's files were removed", "healthd's files were replaced"
CONFIG = 'interval_seconds = 1.0\nprofile = "none"\nbaseline_file = ""\n'
NO_SLURM = {"SLURM_CONF": "/nonexistent/slurm.conf"}


class InstalledDaemon(Healthd):
    """The daemon of its own venv, with this checkout's healthd and the other packages of this test."""

    def __init__(self, directory: Path, **settings: Any) -> None:
        super().__init__(directory=directory, config=CONFIG, env={"PYTHONPATH": "", **NO_SLURM}, **settings)
        self.venv = directory / "venv"

    def argv(self) -> list[str]:
        return [str(self.venv / "bin/python"), *super().argv()[1:]]

    def install(self) -> None:
        if not self.venv.exists():
            subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(self.venv)], check=True, timeout=120)
        (site,) = self.venv.glob("lib/python*/site-packages")
        (site / "others.pth").write_text(f"{Path(psutil.__file__).parents[1]}\n")
        if (site / "healthd").exists():
            remove_atomically(site / "healthd")
        ignore_bytecode = shutil.ignore_patterns("__pycache__")
        shutil.copytree(REPOSITORY / "healthd", site / "healthd", ignore=ignore_bytecode, copy_function=shutil.copy)

    def kill_worker(self) -> None:
        os.kill(self.worker_pid(), signal.SIGKILL)


@pytest.fixture
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)  # otherwise `python -m healthd` would find this checkout in the current directory
    return tmp_path


def remove_atomically(folder: Path) -> None:
    """Remove a folder atomically: a running process may write bytecode into it."""
    shutil.rmtree(folder.rename(folder.with_name(f"{folder.name}.removed")))


def has_problem(status: dict[str, Any], sentence: str) -> bool:
    return any(sentence in problem for problem in status["problems"])


def test_daemon_reports_removed_venv_and_keeps_conditions_and_decision(directory: Path) -> None:
    daemon = InstalledDaemon(directory, wait=False)
    daemon.install()
    with daemon:
        daemon.wait_until(lambda s: s["round"]["number"] > 1, "a round")
        daemon.kernel_line(xid_line(79))
        before = daemon.wait_until(
            lambda s: condition(s, "gpu_xid/79") is not None and s["round"]["number"] > 2, "a fault"
        )
        assert "would drain" in before["decision"]["text"]
        assert daemon.process is not None
        pid = daemon.process.pid

        remove_atomically(daemon.venv)
        daemon.wait_until(lambda s: has_problem(s, GONE), "it is reported")
        assert GONE in daemon.log.read_text()
        daemon.kernel_line(xid_line(48, "0000:1b:00", "DBE"))  # needs a table that was not loaded before
        daemon.wait_until(lambda s: condition(s, "gpu_xid/48") is not None, "kernel lines are evaluated")
        assert (
            "acknowledged for 2 h"
            in daemon.request(command="ack", code="gpu_xid/48", seconds=7200, why="known")["done"]
        )
        refused = daemon.request(command="reload")["error"]
        assert refused.startswith(f"reload: settings not reloaded: {GONE}")

        daemon.kill_worker()
        after = daemon.wait_until(lambda s: len(s["unknown"]) > 10, "no check can run")
        after = wait_for_rounds(daemon, 3)
        assert has_problem(after, GONE)
        assert after["decision"]["text"] == before["decision"]["text"]
        entry = condition(after, "gpu_xid/79")
        assert entry is not None
        assert entry["state"] == "open"
        assert (daemon.process.poll(), daemon.process.pid) == (None, pid)
        assert "Traceback" not in daemon.log.read_text()
        assert daemon.stop() == 0


def test_first_scrape_and_sighup_work_after_files_are_removed(directory: Path) -> None:
    """All packages are in the removed tree, and no page was requested before."""
    daemon = InstalledDaemon(directory, wait=False)
    daemon.install()
    (site,) = daemon.venv.glob("lib/python*/site-packages")
    shutil.copytree(Path(prometheus_client.__file__).parent, site / "prometheus_client")
    # A single round: without pauses between rounds, the worker of a busy machine would do other requests late and
    # import then.
    single_round = CONFIG.replace("interval_seconds = 1.0", "interval_seconds = 3600.0")
    daemon.configure(f'{single_round}[metrics]\nlisten = "127.0.0.1:0"\n')
    with daemon:
        daemon.wait_until(
            lambda s: s["round"]["seconds"] > 0 and not s["stream"]["waiting"], "the worker has written once"
        )
        assert daemon.process is not None
        page_at = re.search(r"metrics on (http://127\.0\.0\.1:[0-9]+/metrics)", daemon.log.read_text())
        assert page_at is not None
        remove_atomically(daemon.venv)
        for accept in ("text/plain", "application/openmetrics-text"):
            page_request = urllib.request.Request(page_at[1], headers={"Accept": accept})
            with urllib.request.urlopen(page_request, timeout=120) as page:
                assert b"healthd_build_info" in page.read()
        daemon.process.send_signal(signal.SIGHUP)
        until(lambda: f"settings not reloaded: {GONE}" in daemon.log.read_text(), "the reload is rejected")
        assert "Traceback" not in daemon.log.read_text()
        assert "ModuleNotFoundError" not in daemon.log.read_text()


def test_daemon_with_replaced_files_continues_and_requests_restart(directory: Path) -> None:
    daemon = InstalledDaemon(directory, wait=False)
    daemon.install()
    with daemon:
        daemon.wait_until(lambda s: s["round"]["number"] > 1, "a round")
        daemon.install()
        daemon.wait_until(lambda s: has_problem(s, REPLACED), "it is reported")
        daemon.configure(CONFIG + 'mode = "drain"\n')
        assert "restart it (systemctl restart healthd)" in daemon.request(command="reload")["error"]
        daemon.kill_worker()
        after = wait_for_rounds(daemon, 2)
        assert has_problem(after, REPLACED)
        assert {result["outcome"] for result in after["results"] if result["check"].startswith("gpu_")} == {"completed"}

        assert daemon.stop() == 0
        daemon.configure(CONFIG)
        daemon.start()
        restarted = daemon.wait_until(lambda s: s["round"]["number"] > 1, "a round")
        assert not has_problem(restarted, "healthd's files")
