"""Tests of the order of saves: changes at once and before their command, with the past they depend on; in an unchanged
round the past and repeated findings once."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from healthd.agent.conditions import store
from healthd.agent.conditions.durable_file import read_whole
from healthd.agent.conditions.store import FILE, PAST_FILE
from healthd.agent.daemon import Daemon
from healthd.agent.settings import registry
from healthd.agent.settings.effective import resolve_settings
from healthd.common.model import DrainRecord
from healthd.common.slurm.commands import Command
from tests.agent.test_daemon_guards import run_until as worker_answers

# Reports the text of its file. The second check can be held, so that the daemon does other things meanwhile.
CHECK = """\
import time
from dataclasses import dataclass
from healthd.api import CheckConfig
from healthd.common.model import Finding, Observation, ObservationKind, Severity

OBSERVATIONS = {{}}
EXPLAIN = {{}}

@dataclass(frozen=True, slots=True)
class Config(CheckConfig):
    pass

def run(host, config, past):
    while host.read("{held_by}"):
        time.sleep(0.01)
    yield Observation("{name}_total", 1, ObservationKind.COUNTER)
    if text := host.read("{file}"):
        yield Finding(Severity.CRITICAL, "{name}/bad", "part", text)
"""

Writes = list[tuple[str, bool]]


@pytest.fixture
def writes(monkeypatch: pytest.MonkeyPatch) -> Writes:
    """Return the recorded writes: the file name, and whether a round was running."""
    return []


@pytest.fixture
def daemon(tmp_path: Path, writes: Writes, monkeypatch: pytest.MonkeyPatch) -> Iterator[Daemon]:
    checks_dir = tmp_path / "checks_dir"
    checks_dir.mkdir()
    for name, hold_file in (("first", "nothing"), ("second", "held")):
        check = CHECK.format(name=name, held_by=tmp_path / hold_file, file=tmp_path / name)
        (checks_dir / f"{name}.py").write_text(check)

    def settings(_running: str | None) -> Any:
        checks = registry.find_checks(str(checks_dir))
        table = {
            **{name: str(tmp_path / name) for name in ("runtime_dir", "state_dir", "checks_dir")},
            "profile": "none",
            "baseline_file": "",
            "interval_seconds": 0.5,
            "nvml": {"fake": "dgx-h100"},
            "metrics": {"listen": "off"},
            "kernel_log": {"source": "off"},
            "evidence": {"enabled": False},  # its result would be saved at any moment
            "checks": {name: {"enabled": False} for name, check in checks.items() if name not in ("first", "second")},
        }
        table["checks"] = {name: off for name, off in table["checks"].items() if not checks[name].per}
        return resolve_settings(table, "test", {}, checks), checks

    new_daemon = Daemon(settings)
    new_daemon.start()
    real_rewrite = store.rewrite_file

    def record_write(path: str, text: Any) -> None:
        real_rewrite(path, text)
        writes.append((Path(path).name, new_daemon.scheduler.queue.is_running))

    monkeypatch.setattr(store, "rewrite_file", record_write)
    yield new_daemon
    (tmp_path / "held").unlink(missing_ok=True)
    new_daemon.shut_down()


def run_until(daemon: Daemon, is_done: Callable[[], bool], seconds: float = 240.0) -> None:
    """Run the daemon's loop until `is_done` returns True."""
    end = time.monotonic() + seconds
    while not is_done():
        assert time.monotonic() < end, "timed out"
        daemon.turn()


def run_rounds(daemon: Daemon, number: int) -> None:
    """Run `number` more rounds to their end."""
    last = daemon.scheduler.queue.status.number + number
    run_until(daemon, lambda: daemon.scheduler.queue.status.number >= last and not daemon.scheduler.queue.is_running)


def settle(daemon: Daemon, writes: Writes) -> None:
    """Run until the events of the start are written, then forget the writes so far."""
    run_rounds(daemon, 3)
    run_until(daemon, lambda: not daemon.store.ledger.outbox.lines)
    run_rounds(daemon, 1)
    writes.clear()


def saved(daemon: Daemon, name: str) -> str:
    return read_whole(f"{daemon.settings.runtime_dir}/{name}")


def test_unchanged_round_saves_only_past(daemon: Daemon, writes: Writes) -> None:
    settle(daemon, writes)
    run_rounds(daemon, 3)
    assert writes == [(PAST_FILE, False)] * 3


def test_repeated_finding_saves_ledger_once_a_round(daemon: Daemon, writes: Writes, tmp_path: Path) -> None:
    for name in ("first", "second"):
        (tmp_path / name).write_text("broken")
    settle(daemon, writes)
    run_rounds(daemon, 3)
    assert writes == [(FILE, False), (PAST_FILE, False)] * 3
    assert [c["count"] for c in json.loads(saved(daemon, FILE))["conditions"]] == [
        c.count for c in daemon.store.ledger.conditions
    ]


def test_new_condition_is_saved_before_next_check_ends(daemon: Daemon, writes: Writes, tmp_path: Path) -> None:
    settle(daemon, writes)
    (tmp_path / "held").write_text("the second check")
    (tmp_path / "first").write_text("broken")
    run_until(daemon, lambda: bool(daemon.store.ledger.conditions))
    assert daemon.scheduler.queue.is_running
    assert writes[-2:] == [(FILE, True), (PAST_FILE, True)]
    assert json.loads(saved(daemon, PAST_FILE))["first"] == daemon.store.past["first"]
    assert [c["code"] for c in json.loads(saved(daemon, FILE))["conditions"]] == ["first/bad"]


def test_changed_or_cleared_condition_is_saved_at_once(daemon: Daemon, writes: Writes, tmp_path: Path) -> None:
    (tmp_path / "first").write_text("broken")
    settle(daemon, writes)
    (tmp_path / "held").write_text("the second check")
    (tmp_path / "first").write_text("broken worse")
    run_until(daemon, lambda: daemon.store.ledger.conditions[0].message == "broken worse")
    assert writes[-2:] == [(FILE, True), (PAST_FILE, True)]
    (tmp_path / "held").unlink()
    run_rounds(daemon, 0)
    writes.clear()
    (tmp_path / "held").write_text("the second check")
    (tmp_path / "first").unlink()
    run_until(daemon, lambda: not daemon.store.ledger.conditions)
    assert writes[-2:] == [(FILE, True), (PAST_FILE, True)]
    assert [c["code"] for c in json.loads(saved(daemon, FILE))["cleared"]] == ["first/bad"]


def test_record_is_saved_with_condition_before_slurm_command(daemon: Daemon, writes: Writes, tmp_path: Path) -> None:
    settle(daemon, writes)
    (tmp_path / "first").write_text("broken")
    worker_answers(daemon, lambda: bool(daemon.store.ledger.conditions))
    assert "first/bad" not in saved(daemon, FILE)
    daemon.controller._save_record(DrainRecord(reason="healthd: first"))
    ledger = json.loads(saved(daemon, FILE))
    assert (ledger["slurm"]["reason"], [c["code"] for c in ledger["conditions"]]) == ("healthd: first", ["first/bad"])
    seq = daemon.store.ledger.outbox.next_seq
    daemon.controller._log_command(
        Command(("scontrol", "update", "NodeName=n1", "State=DRAIN"), 20.0, changes=True), None
    )
    assert f'\\"seq\\":{seq}' in saved(daemon, FILE)


def test_command_saves_ledger_and_past_at_once(daemon: Daemon, writes: Writes, tmp_path: Path) -> None:
    (tmp_path / "first").write_text("broken")
    settle(daemon, writes)
    (tmp_path / "held").write_text("the second check")
    run_until(daemon, lambda: daemon.scheduler.queue.is_running)
    writes.clear()
    daemon.run_command("repaired", {"code": "first/bad", "subject": "part"}, "root")
    assert writes[-2:] == [(FILE, True), (PAST_FILE, True)]


def test_shut_down_saves_unsaved_past(daemon: Daemon, writes: Writes) -> None:
    settle(daemon, writes)
    daemon.store.set_past("first", daemon.store.past["first"].replace("1", "7", 1))
    daemon.store.save()
    assert writes == []
    daemon.shut_down()
    assert (PAST_FILE, False) in writes
