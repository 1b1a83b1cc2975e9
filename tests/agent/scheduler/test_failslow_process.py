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
def watching(tmp_path, clock):
    made = FailslowProcess(configured(tmp_path, client=True), clock)
    yield made
    made.close()


def runs(watching: FailslowProcess) -> int:
    """Wait until the process has sent a message, and return its pid."""
    until(
        lambda: (
            watching.step()
            or (watching.pids and not watching.problem and watching._last_message_at > watching._started_at - 1)
        )
    )
    return watching.pids[0]


def listens(tmp_path: Path) -> None:
    until((tmp_path / "run/failslow.sock").exists, "the socket exists")


def stop(pid: int) -> None:
    """Stop a process. Messages that it sent before can still be read."""
    os.kill(pid, signal.SIGSTOP)
    until(lambda: state(pid) == "T", "it is stopped")


def state(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


def has_ended(pid: int) -> bool:
    try:
        return state(pid) == "Z"
    except OSError:
        return True


def test_nothing_runs_where_nothing_is_watched(tmp_path, clock):
    watching = FailslowProcess(configured(tmp_path), clock)
    assert not watching.step()
    assert (watching.pids, watching.deadline, watching.problem, list(watching.waits())) == ((), FOREVER, "", [])
    assert not (tmp_path / "run/failslow.sock").exists()


def test_what_is_off_is_not_even_imported():
    program = """
import sys, healthd.agent.settings.registry, healthd.agent.daemon
healthd.agent.settings.registry.built_in_checks()
print(*sorted(name for name in sys.modules if name.startswith(("healthd.failslow.live", "healthd.failslow",
"healthd.client"))))
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, cwd="/")
    # The check imports only the names of the document.
    assert done.stdout.split() == ["healthd.failslow", "healthd.failslow.live", "healthd.failslow.live.document"], (
        done.stderr
    )


def test_one_that_was_killed_is_started_again_later_each_time(watching, clock, tmp_path):
    waited = []
    for _ in range(12):
        pid = runs(watching)
        os.kill(pid, signal.SIGKILL)
        until(lambda: watching.step() or watching.problem)
        assert watching.pids == ()
        assert "it ended" in watching.problem
        waited.append(watching.deadline - clock.now)
        assert not watching.step()
        assert watching.pids == ()
        clock.now = watching.deadline
    assert waited[:4] == [1.0, 2.0, 4.0, 8.0]
    assert waited[-1] == MAX_RETRY_SECONDS
    runs(watching)


def test_one_that_hangs_is_ended(watching, clock, tmp_path):
    pid = runs(watching)
    listens(tmp_path)
    stop(pid)
    watching.step()  # read the earlier messages
    clock.now += HUNG_SECONDS - 1
    watching.step()
    assert watching.pids == (pid,)
    clock.now += 1
    watching.step()
    assert watching.pids == ()
    assert "no message for" in watching.problem
    until(lambda: has_ended(pid))
    clock.now = watching.deadline
    assert runs(watching) != pid
    assert watching.problem == ""


def test_one_that_takes_too_much_memory_is_ended(tmp_path, clock):
    watching = FailslowProcess(configured(tmp_path, client=True), clock, max_memory_bytes=1 << 20)
    until(lambda: watching.step() or watching.problem)
    assert "MiB of memory" in watching.problem
    watching.close()


def test_one_that_not_even_sigkill_ends_is_left_and_nobody_takes_its_place(watching, clock, tmp_path, monkeypatch):
    pid = runs(watching)
    listens(tmp_path)
    stop(pid)
    watching.step()  # read the earlier messages
    monkeypatch.setattr(watching._process, "kill", lambda: None)  # simulates a hang in the kernel
    clock.now += HUNG_SECONDS
    watching.step()
    assert not has_ended(pid)
    clock.now = watching.deadline
    watching.step()
    assert watching.pids == ()
    assert watching.deadline == clock.now + MAX_RETRY_SECONDS
    os.kill(pid, signal.SIGCONT)  # its channel is closed, so it ends by itself
    until(lambda: has_ended(pid) or watching._unkillable.poll() is not None)
    clock.now = watching.deadline
    assert runs(watching) != pid


def test_a_reload_that_wants_nothing_ends_it_and_takes_the_socket_away(watching, tmp_path):
    pid = runs(watching)
    listens(tmp_path)
    watching.reconfigure(configured(tmp_path))
    until(lambda: has_ended(pid))
    until(lambda: not (tmp_path / "run/failslow.sock").exists())
    assert (watching.deadline, watching.problem) == (FOREVER, "")


def test_a_reload_reaches_the_one_that_runs(watching, tmp_path):
    pid = runs(watching)
    listens(tmp_path)
    watching.reconfigure(configured(tmp_path, client=False, sample=("ib",)))
    until(lambda: not (tmp_path / "run/failslow.sock").exists(), "it no longer listens")
    assert watching.pids == (pid,)
