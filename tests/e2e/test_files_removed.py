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
from healthd_daemon import REPOSITORY, Healthd, condition, rounds, xid
from waiting import until

GONE, REPLACED = "healthd's files were removed", "healthd's files were replaced"
CONFIG = 'interval_seconds = 1.0\nprofile = "none"\nbaseline_file = ""\n'
NO_SLURM = {"SLURM_CONF": "/nonexistent/slurm.conf"}


class Installed(Healthd):
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
            removed(site / "healthd")
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(REPOSITORY / "healthd", site / "healthd", ignore=ignored, copy_function=shutil.copy)

    def kill_worker(self) -> None:
        os.kill(self.worker(), signal.SIGKILL)


@pytest.fixture
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)  # otherwise `python -m healthd` would find this checkout in the current directory
    return tmp_path


def removed(folder: Path) -> None:
    """Remove a folder atomically: a running process may write bytecode into it."""
    shutil.rmtree(folder.rename(folder.with_name(f"{folder.name}.removed")))


def says(status: dict[str, Any], sentence: str) -> bool:
    return any(sentence in problem for problem in status["problems"])


def test_a_daemon_whose_venv_is_removed_says_so_and_what_it_knows_and_decided_stands(directory: Path) -> None:
    daemon = Installed(directory, wait=False)
    daemon.install()
    with daemon:
        daemon.until(lambda s: s["round"]["number"] > 1, "a round")
        daemon.kernel_line(xid(79))
        before = daemon.until(lambda s: condition(s, "gpu_xid/79") is not None and s["round"]["number"] > 2, "a fault")
        assert "would drain" in before["decision"]["text"]
        assert daemon.process is not None
        pid = daemon.process.pid

        removed(daemon.venv)
        daemon.until(lambda s: says(s, GONE), "it is reported")
        assert GONE in daemon.log.read_text()
        daemon.kernel_line(xid(48, "0000:1b:00", "DBE"))  # needs a table that was not loaded before
        daemon.until(lambda s: condition(s, "gpu_xid/48") is not None, "kernel lines are evaluated")
        assert "acknowledged for 2 h" in daemon.ask(command="ack", code="gpu_xid/48", seconds=7200, why="known")["done"]
        refused = daemon.ask(command="reload")["error"]
        assert refused.startswith(f"reload: settings not reloaded: {GONE}")

        daemon.kill_worker()
        after = daemon.until(lambda s: len(s["unknown"]) > 10, "no check can run")
        after = rounds(daemon, 3)
        assert says(after, GONE)
        assert after["decision"]["text"] == before["decision"]["text"]
        found = condition(after, "gpu_xid/79")
        assert found is not None
        assert found["state"] == "open"
        assert (daemon.process.poll(), daemon.process.pid) == (None, pid)
        assert "Traceback" not in daemon.log.read_text()
        assert daemon.stop() == 0


def test_a_first_scrape_and_a_sighup_after_the_files_are_removed(directory: Path) -> None:
    """All packages are in the removed tree, and no page was requested before."""
    daemon = Installed(directory, wait=False)
    daemon.install()
    (site,) = daemon.venv.glob("lib/python*/site-packages")
    shutil.copytree(Path(prometheus_client.__file__).parent, site / "prometheus_client")
    # A single round: without pauses between rounds, the worker of a busy machine would do other requests late and
    # import then.
    once = CONFIG.replace("interval_seconds = 1.0", "interval_seconds = 3600.0")
    daemon.configure(f'{once}[metrics]\nlisten = "127.0.0.1:0"\n')
    with daemon:
        daemon.until(lambda s: s["round"]["seconds"] > 0 and not s["stream"]["waiting"], "the worker has written once")
        assert daemon.process is not None
        page_at = re.search(r"metrics on (http://127\.0\.0\.1:[0-9]+/metrics)", daemon.log.read_text())
        assert page_at is not None
        removed(daemon.venv)
        for accept in ("text/plain", "application/openmetrics-text"):
            asked = urllib.request.Request(page_at[1], headers={"Accept": accept})
            with urllib.request.urlopen(asked, timeout=120) as page:
                assert b"healthd_build_info" in page.read()
        daemon.process.send_signal(signal.SIGHUP)
        until(lambda: f"settings not reloaded: {GONE}" in daemon.log.read_text(), "the reload is rejected")
        assert "Traceback" not in daemon.log.read_text()
        assert "ModuleNotFoundError" not in daemon.log.read_text()


def test_a_daemon_whose_files_are_replaced_looks_on_and_says_that_it_wants_a_restart(directory: Path) -> None:
    daemon = Installed(directory, wait=False)
    daemon.install()
    with daemon:
        daemon.until(lambda s: s["round"]["number"] > 1, "a round")
        daemon.install()
        daemon.until(lambda s: says(s, REPLACED), "it is reported")
        daemon.configure(CONFIG + 'mode = "drain"\n')
        assert "restart it (systemctl restart healthd)" in daemon.ask(command="reload")["error"]
        daemon.kill_worker()
        after = rounds(daemon, 2)
        assert says(after, REPLACED)
        assert {one["outcome"] for one in after["results"] if one["check"].startswith("gpu_")} == {"completed"}

        assert daemon.stop() == 0
        daemon.configure(CONFIG)
        daemon.start()
        again = daemon.until(lambda s: s["round"]["number"] > 1, "a round")
        assert not says(again, "healthd's files")
