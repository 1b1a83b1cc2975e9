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


def made(folder: Path) -> Daemon:
    return Daemon(lambda _running: settings(folder))


def descriptors() -> dict[str, str]:
    """Return the open descriptors of this process and their targets."""
    found = {}
    for name in os.listdir("/proc/self/fd"):
        try:
            found[name] = os.readlink(f"/proc/self/fd/{name}")
        except FileNotFoundError:  # the descriptor of the listing itself
            continue
    return found


@pytest.fixture(autouse=True)
def _signals() -> Iterator[None]:
    """Restore the signal handlers, so that stopping a daemon does not stop the tests."""
    numbers = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
    before = [signal.getsignal(number) for number in numbers]
    yield
    for number, handler in zip(numbers, before, strict=True):
        signal.signal(number, handler)


def test_a_daemon_that_is_only_built_has_opened_and_written_nothing(tmp_path: Path) -> None:
    before, handlers = descriptors(), signal.getsignal(signal.SIGTERM)
    made(tmp_path)
    assert descriptors() == before
    assert list(tmp_path.iterdir()) == []
    assert signal.getsignal(signal.SIGTERM) is handlers


def test_a_daemon_that_ends_has_closed_all_that_it_opened(tmp_path: Path) -> None:
    before, daemon = descriptors(), made(tmp_path)
    daemon.start()
    assert descriptors() != before
    daemon.shut_down()
    assert descriptors() == before


def test_a_start_that_fails_halfway_closes_what_it_had_opened(tmp_path: Path) -> None:
    deep = tmp_path / ("x" * 120)  # longer than the path of a socket can be
    before, daemon = descriptors(), made(deep)
    with pytest.raises(OSError, match="AF_UNIX path too long"):
        daemon.start()
    daemon.shut_down()
    assert descriptors() == before


def test_a_second_daemon_in_a_runtime_directory_is_refused_and_changes_nothing_there(tmp_path: Path) -> None:
    first, second = made(tmp_path), made(tmp_path)
    first.start()
    first.kernel_events.take_events([xid(79)])
    runtime_dir = tmp_path / "runtime_dir"
    before = {path.name: path.stat().st_mtime_ns for path in runtime_dir.iterdir()}
    with pytest.raises(OSError, match="another healthd is running there"):
        second.start()
    second.shut_down()
    assert {path.name: path.stat().st_mtime_ns for path in runtime_dir.iterdir()} == before
    first.shut_down()


def test_what_was_not_recalled_is_never_saved(tmp_path: Path) -> None:
    memory = ConditionStore(str(tmp_path), lambda: 0.0)
    memory.change(trusted_since=1.0)
    memory.save(round_ended=True)
    assert list(tmp_path.iterdir()) == []


def test_a_daemon_that_is_stopped_before_the_copy_is_read_puts_no_empty_ledger_in_front_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = made(tmp_path)
    first.start()
    first.kernel_events.take_events([xid(79)])
    first.shut_down()
    for path in (tmp_path / "runtime_dir").glob("*.json"):
        path.unlink()  # as after a reboot: only the disk copy is left
    second = made(tmp_path)

    def hangs(_request: Request) -> None:
        os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(second.client, "send", hangs)
    with pytest.raises(SystemExit) as ended:
        second.start()
    second.shut_down()
    assert ended.value.code == 0
    assert not (tmp_path / "runtime_dir" / FILE).exists()
    third = made(tmp_path)
    third.start()
    assert "gpu_xid/79" in codes(third)
    third.shut_down()
