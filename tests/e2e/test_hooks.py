"""Hooks with a real Slurm and a real systemd: each event runs its hook once, outside the daemon."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from event_lines import line
from healthd_daemon import REPOSITORY, Healthd, xid_line
from slurm_cluster import SlurmCluster
from systemd_container import SystemdContainer
from waiting import until

PCI = "0000:61:00.0"
FUTURE = 4_000_000_000.0  # epoch seconds of an event that is newer than any start of the daemon


@pytest.fixture(scope="module")
def cluster() -> Iterator[SlurmCluster]:
    with SlurmCluster(nodes=2, gpus=0) as running:
        yield running


def write_program(folder: Path, name: str, body: str) -> str:
    path = folder / name
    path.write_text(f"#!/bin/sh\nD={shlex.quote(str(folder))}\n{body}\n")
    path.chmod(0o755)
    return str(path)


def daemon_on(cluster: SlurmCluster, node: str, folder: Path, hooks: str) -> Healthd:
    flags = ("--mode", "act", "--node-name", node, "--interval", "1")
    return Healthd(*flags, directory=folder, env=cluster.env, config=f"[hooks]\n{hooks}\n")


def repair(daemon: Healthd) -> None:
    assert "done" in daemon.request(command="repaired", code="gpu_xid/79", part=PCI)


def runs(folder: Path) -> list[dict[str, Any]]:
    path = folder / "runs"
    return [json.loads(text) for text in path.read_text().splitlines()] if path.exists() else []


def runner_pids(daemon: Healthd) -> list[int]:
    """Return the processes `healthd hooks run` of this daemon."""
    found = []
    for entry in Path("/proc").iterdir():
        try:
            words = (entry / "cmdline").read_bytes().split(b"\0")
        except OSError:
            continue
        is_runner = words[1:5] == [b"-m", b"healthd", b"hooks", b"run"]
        if is_runner and str(daemon.run_dir).encode() in words:
            found.append(int(entry.name))
    return found


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_drain_and_resume_run_hooks_once_despite_kills(cluster: SlurmCluster, tmp_path: Path) -> None:
    body = (
        'cat > "$D/event.$$"\n[ -e "$D/go" ] || { echo $$ > "$D/started"; sleep 600; }\ncat "$D/event.$$" >> "$D/runs"'
    )
    program = write_program(tmp_path, "hook", body)
    hooks = f'on_drain = ["{program}"]\non_resume = ["{program}"]\ntimeout_seconds = 600'
    with daemon_on(cluster, "n1", tmp_path, hooks) as daemon:
        daemon.kernel_line(xid_line(79))
        cluster.wait_state("n1", "DRAIN", reason="healthd: gpu_xid/79 ")
        started = tmp_path / "started"
        until(lambda: started.exists() and started.read_text(), "the hook runs")
        (runner,) = runner_pids(daemon)
        daemon.kill()
        os.kill(runner, signal.SIGKILL)
        os.killpg(int(started.read_text()), signal.SIGKILL)
        assert runs(tmp_path) == []
        (tmp_path / "go").touch()
        daemon.start()
        until(lambda: runs(tmp_path), "the hook runs again")
        daemon.kill()
        daemon.start()
        repair(daemon)
        cluster.wait_state("n1", "IDLE")
        until(lambda: len(runs(tmp_path)) > 1, "the hook for the resume runs")
        until(lambda: not runner_pids(daemon), "the program has ended")
    drain, resume = runs(tmp_path)
    assert (drain["hook"], drain["event"], drain["node"]) == ("on_drain", "drain", "n1")
    assert drain["reason"].startswith(f"healthd: gpu_xid/79 {PCI}: ")
    assert drain["conditions"][0]["code"] == "gpu_xid/79"
    assert drain["conditions"][0]["subject"] == PCI
    assert (resume["hook"], resume["drained_at"]) == ("on_resume", drain["drained_at"])
    assert resume["conditions"][0]["code"] == "gpu_xid/79"
    assert "who" not in resume


def test_hanging_hook_is_killed_retried_and_reported(cluster: SlurmCluster, tmp_path: Path) -> None:
    hangs = write_program(tmp_path, "hangs", 'sleep 600 & echo $! >> "$D/children"\nwait')
    works = write_program(tmp_path, "works", 'cat >> "$D/runs"')
    hooks = f'on_drain = ["{hangs}"]\non_resume = ["{works}"]\ntimeout_seconds = 2\nretries = 1'
    with daemon_on(cluster, "n2", tmp_path, hooks) as daemon:
        daemon.kernel_line(xid_line(79))
        cluster.wait_state("n2", "DRAIN", reason="healthd: gpu_xid/79 ")
        repair(daemon)  # the next event waits for the retries
        command = "healthd hooks test on_drain"
        daemon.wait_until(lambda s: command in s["problem_commands"], "the failure is shown")
        children = [int(text) for text in (tmp_path / "children").read_text().split()]
        assert len(children) == 2, "the run and its retry"
        until(lambda: not any(map(is_alive, children)), "the children have been killed")
        until(lambda: [run["hook"] for run in runs(tmp_path)] == ["on_resume"], "the next event follows")

        write_program(tmp_path, "hangs", "exit 0")
        argv = [sys.executable, "-m", "healthd", "hooks", "test", "on_drain", "--config", str(daemon.config)]
        argv += ["--runtime-dir", str(daemon.run_dir), "--state-dir", str(tmp_path / "state")]
        until(lambda: not runner_pids(daemon), "the program has ended")
        result = subprocess.run(argv, capture_output=True, text=True, timeout=240, cwd=REPOSITORY)
        assert result.returncode == 0, result.stdout + result.stderr
        daemon.wait_until(lambda s: command not in s["problem_commands"], "the failure has ended")


CONFIG = """
[hooks]
on_drain = ["/etc/healthd/hooks/hook"]
[nvml]
fake = "dgx-h100"
[kernel_log]
source = "off"
[metrics]
listen = "off"
"""
HOOK = '#!/bin/sh\nD=/etc/healthd/hooks/out\ncat /proc/self/cgroup > "$D.cgroup"\ncat > "$D.new" && mv "$D.new" "$D"\n'


def test_path_unit_runs_hook_outside_the_daemons_unit() -> None:
    """The daemon requests a run when it starts; the stream has an event whose time is later than the start."""
    with SystemdContainer() as box:
        box.install_healthd(CONFIG)
        box.write("/etc/healthd/hooks/hook", HOOK, 0o755)
        event = line(1, "drain", at=FUTURE, stage="confirmed", reason="healthd: gpu_xid/79")
        box.write("/var/lib/healthd/events.jsonl", event.decode() + "\n", 0o600)
        broken = "/etc/systemd/system/healthd-hooks.service.d/broken.conf"
        box.write(broken, "[Service]\nExecStart=\nExecStart=/bin/false\nRestartSec=100ms\n")
        box.systemctl("daemon-reload")
        box.systemctl("start", "healthd")
        # A service that fails at each start ends, and the daemon reports this.
        box.wait_for_property("healthd-hooks.path", "ActiveState", "failed")
        assert not box.path("/etc/healthd/hooks/out").exists()

        box.path(broken).unlink()
        box.systemctl("daemon-reload")
        box.systemctl("reset-failed", "healthd-hooks")
        box.systemctl("restart", "healthd-hooks.path")
        out = box.path("/etc/healthd/hooks/out")
        until(out.exists, "the hook has run")
        assert json.loads(out.read_text())["reason"] == "healthd: gpu_xid/79"
        assert "healthd-hooks.service" in box.path("/etc/healthd/hooks/out.cgroup").read_text()
        until(lambda: not box.path("/run/healthd/hooks.request").exists(), "the request is served")
        assert box.show("healthd-hooks.path", "ActiveState") == "active"
        box.wait_for_property("healthd-hooks.service", "ActiveState", "inactive")
        assert box.show("healthd-hooks.service", "Result") == "success"

        # The next event needs no further command: a restart of healthd requests a run.
        out.unlink()
        second = line(2, "drain", at=FUTURE + 1, stage="confirmed", reason="healthd: gpu_xid/95")
        with open(box.path("/var/lib/healthd/events.jsonl"), "ab") as file:
            file.write(second + b"\n")
        box.systemctl("restart", "healthd")
        until(out.exists, "the hook has run")
        assert json.loads(out.read_text())["previous_reason"] == "healthd: gpu_xid/79"
        assert not any("hook" in problem for problem in box.status()["problems"])
