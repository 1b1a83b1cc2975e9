"""Tests of the start of a daemon: building it has no effect, and after any start it closes all that it opened."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from healthd.agent.conditions.store import FILE, ConditionStore
from healthd.agent.daemon import Daemon
from healthd.agent.worker.client import Request
from tests.agent.test_daemon_guards import codes, settings, xid


def new_daemon(folder: Path) -> Daemon:
    return Daemon(lambda _running: settings(folder))


def open_descriptors() -> dict[str, str]:
    """Return the open descriptors of this process and their targets."""
    descriptors_by_name = {}
    for name in os.listdir("/proc/self/fd"):
        try:
            descriptors_by_name[name] = os.readlink(f"/proc/self/fd/{name}")
        except FileNotFoundError:  # the descriptor of the listing itself
            continue
    return descriptors_by_name


@pytest.fixture(autouse=True)
def _signals() -> Iterator[None]:
    """Restore the signal handlers, so that stopping a daemon does not stop the tests."""
    numbers = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
    handlers = [signal.getsignal(number) for number in numbers]
    yield
    for number, handler in zip(numbers, handlers, strict=True):
        signal.signal(number, handler)


def test_daemon_init_opens_and_writes_nothing(tmp_path: Path) -> None:
    open_before, handlers = open_descriptors(), signal.getsignal(signal.SIGTERM)
    new_daemon(tmp_path)
    assert open_descriptors() == open_before
    assert list(tmp_path.iterdir()) == []
    assert signal.getsignal(signal.SIGTERM) is handlers


def test_shut_down_closes_everything(tmp_path: Path) -> None:
    open_before, daemon = open_descriptors(), new_daemon(tmp_path)
    daemon.start()
    assert open_descriptors() != open_before
    daemon.shut_down()
    assert open_descriptors() == open_before


def test_failed_start_closes_everything(tmp_path: Path) -> None:
    long_path = tmp_path / ("x" * 120)  # longer than the path of a socket can be
    open_before, daemon = open_descriptors(), new_daemon(long_path)
    with pytest.raises(OSError, match="AF_UNIX path too long"):
        daemon.start()
    daemon.shut_down()
    assert open_descriptors() == open_before


def test_second_daemon_is_refused_and_changes_nothing(tmp_path: Path) -> None:
    first, second = new_daemon(tmp_path), new_daemon(tmp_path)
    first.start()
    first.kernel_events.take_events([xid(79)])
    runtime_dir = tmp_path / "runtime_dir"
    mtimes = {path.name: path.stat().st_mtime_ns for path in runtime_dir.iterdir()}
    with pytest.raises(OSError, match="another healthd is running there"):
        second.start()
    second.shut_down()
    assert {path.name: path.stat().st_mtime_ns for path in runtime_dir.iterdir()} == mtimes
    first.shut_down()


def test_save_without_load_writes_nothing(tmp_path: Path) -> None:
    condition_store = ConditionStore(str(tmp_path), lambda: 0.0)
    condition_store.change(trusted_since=1.0)
    condition_store.save(round_ended=True)
    assert list(tmp_path.iterdir()) == []


def test_stop_before_load_keeps_disk_copy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = new_daemon(tmp_path)
    first.start()
    first.kernel_events.take_events([xid(79)])
    first.shut_down()
    for path in (tmp_path / "runtime_dir").glob("*.json"):
        path.unlink()  # as after a reboot: only the disk copy is left
    second = new_daemon(tmp_path)

    def stop_process(_request: Request) -> None:
        os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(second.client, "send", stop_process)
    with pytest.raises(SystemExit) as raised:
        second.start()
    second.shut_down()
    assert raised.value.code == 0
    assert not (tmp_path / "runtime_dir" / FILE).exists()
    third = new_daemon(tmp_path)
    third.start()
    assert "gpu_xid/79" in codes(third)
    third.shut_down()
