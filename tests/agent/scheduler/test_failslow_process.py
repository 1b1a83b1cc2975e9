"""Tests of the daemon's control of the live process, with real processes and a clock set by the test."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from waiting import until

from healthd.agent.scheduler.failslow_process import HUNG_SECONDS, MAX_RETRY_SECONDS, FailslowProcess
from healthd.agent.settings import registry
from healthd.agent.settings.config import Loaded, Settings
from healthd.agent.settings.configured import Configured
from healthd.common.codec import dump
from healthd.common.model import RunName
from healthd.host.wakeup import FOREVER

CHECKS = registry.built_in_checks()
RUN = RunName("failslow")


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def configured(tmp_path: Path, **settings: object) -> Configured:
    config = CHECKS["failslow"].config(**settings)
    runtime_dir = tmp_path / "run"
    runtime_dir.mkdir(exist_ok=True)
    loaded = Loaded(Settings(runtime_dir=str(runtime_dir)), {RUN: config}, {RUN: {**dump(config), "name": ""}}, {})
    return Configured(loaded, CHECKS)


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def failslow_process(tmp_path, clock):
    new_process = FailslowProcess(configured(tmp_path, client=True), clock)
    yield new_process
    new_process.close()


def wait_until_running(failslow_process: FailslowProcess) -> int:
    """Wait until the process has sent a message, and return its pid."""
    until(
        lambda: (
            failslow_process.step()
            or (
                failslow_process.pids
                and not failslow_process.problem
                and failslow_process._last_message_at > failslow_process._started_at - 1
            )
        )
    )
    return failslow_process.pids[0]


def wait_for_socket(tmp_path: Path) -> None:
    until((tmp_path / "run/failslow.sock").exists, "the socket exists")


def suspend(pid: int) -> None:
    """Stop a process. Messages that it sent before can still be read."""
    os.kill(pid, signal.SIGSTOP)
    until(lambda: process_state(pid) == "T", "it is stopped")


def process_state(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


def has_ended(pid: int) -> bool:
    try:
        return process_state(pid) == "Z"
    except OSError:
        return True


def test_step_without_live_features_starts_nothing(tmp_path, clock):
    failslow_process = FailslowProcess(configured(tmp_path), clock)
    assert not failslow_process.step()
    assert (
        failslow_process.pids,
        failslow_process.deadline,
        failslow_process.problem,
        list(failslow_process.waits()),
    ) == ((), FOREVER, "", [])
    assert not (tmp_path / "run/failslow.sock").exists()


def test_disabled_live_process_is_not_imported():
    program = """
import sys, healthd.agent.settings.registry, healthd.agent.daemon
healthd.agent.settings.registry.built_in_checks()
print(*sorted(name for name in sys.modules if name.startswith(("healthd.failslow.live", "healthd.failslow",
"healthd.client"))))
"""
    completed = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, cwd="/")
    # The check imports only the names of the document.
    assert completed.stdout.split() == [
        "healthd.failslow",
        "healthd.failslow.live",
        "healthd.failslow.live.document",
    ], completed.stderr


def test_killed_process_is_restarted_with_backoff(failslow_process, clock, tmp_path):
    delays = []
    for _ in range(12):
        pid = wait_until_running(failslow_process)
        os.kill(pid, signal.SIGKILL)
        until(lambda: failslow_process.step() or failslow_process.problem)
        assert failslow_process.pids == ()
        assert "it ended" in failslow_process.problem
        delays.append(failslow_process.deadline - clock.now)
        assert not failslow_process.step()
        assert failslow_process.pids == ()
        clock.now = failslow_process.deadline
    assert delays[:4] == [1.0, 2.0, 4.0, 8.0]
    assert delays[-1] == MAX_RETRY_SECONDS
    wait_until_running(failslow_process)


def test_hung_process_is_killed_and_restarted(failslow_process, clock, tmp_path):
    pid = wait_until_running(failslow_process)
    wait_for_socket(tmp_path)
    suspend(pid)
    failslow_process.step()  # read the earlier messages
    clock.now += HUNG_SECONDS - 1
    failslow_process.step()
    assert failslow_process.pids == (pid,)
    clock.now += 1
    failslow_process.step()
    assert failslow_process.pids == ()
    assert "no message for" in failslow_process.problem
    until(lambda: has_ended(pid))
    clock.now = failslow_process.deadline
    assert wait_until_running(failslow_process) != pid
    assert failslow_process.problem == ""


def test_process_above_memory_limit_is_killed(tmp_path, clock):
    failslow_process = FailslowProcess(configured(tmp_path, client=True), clock, max_memory_bytes=1 << 20)
    until(lambda: failslow_process.step() or failslow_process.problem)
    assert "MiB of memory" in failslow_process.problem
    failslow_process.close()


def test_unkillable_process_is_not_replaced_until_ended(failslow_process, clock, tmp_path, monkeypatch):
    pid = wait_until_running(failslow_process)
    wait_for_socket(tmp_path)
    suspend(pid)
    failslow_process.step()  # read the earlier messages
    monkeypatch.setattr(failslow_process._process, "kill", lambda: None)  # simulates a hang in the kernel
    clock.now += HUNG_SECONDS
    failslow_process.step()
    assert not has_ended(pid)
    clock.now = failslow_process.deadline
    failslow_process.step()
    assert failslow_process.pids == ()
    assert failslow_process.deadline == clock.now + MAX_RETRY_SECONDS
    os.kill(pid, signal.SIGCONT)  # its channel is closed, so it ends by itself
    until(lambda: has_ended(pid) or failslow_process._unkillable.poll() is not None)
    clock.now = failslow_process.deadline
    assert wait_until_running(failslow_process) != pid


def test_reconfigure_without_live_features_stops_process(failslow_process, tmp_path):
    pid = wait_until_running(failslow_process)
    wait_for_socket(tmp_path)
    failslow_process.reconfigure(configured(tmp_path))
    until(lambda: has_ended(pid))
    until(lambda: not (tmp_path / "run/failslow.sock").exists())
    assert (failslow_process.deadline, failslow_process.problem) == (FOREVER, "")


def test_reconfigure_reaches_running_process(failslow_process, tmp_path):
    pid = wait_until_running(failslow_process)
    wait_for_socket(tmp_path)
    failslow_process.reconfigure(configured(tmp_path, client=False, sample=("ib",)))
    until(lambda: not (tmp_path / "run/failslow.sock").exists(), "it no longer listens")
    assert failslow_process.pids == (pid,)
