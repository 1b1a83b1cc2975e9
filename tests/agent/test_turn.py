"""Tests of one turn of the daemon's loop: the order of its steps."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from healthd.agent.conditions.ledger import Pause
from healthd.agent.scheduler.replies import Received
from tests.agent.test_daemon_guards import daemon_with_check


def test_turn_applies_clock_step_before_reading_inputs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise a run would get the new time and the ledger keep the old one, so the step would cut a confirm time."""
    offsets = [0.0]
    with daemon_with_check(tmp_path, "disk_space", now=lambda: time.time() + offsets[-1]) as daemon:
        first_time = daemon.now()
        daemon.store.change(trusted_since=first_time)
        trusted_times: list[float] = []

        def record_trusted_since() -> Received:
            trusted_times.append(daemon.store.ledger.trusted_since)
            return Received()

        monkeypatch.setattr(daemon, "read_inputs", record_trusted_since)
        monkeypatch.setattr(daemon.replies, "step", record_trusted_since)
        offsets.append(3600.0)
        daemon.turn()
        assert trusted_times == [pytest.approx(first_time + 3600.0, abs=1.0)] * 2
        daemon.turn()
        assert trusted_times[2:] == trusted_times[:2], "applied once"


def test_clock_step_within_turn_ends_no_pause(tmp_path: Path) -> None:
    offsets = [0.0]
    with daemon_with_check(tmp_path, "disk_space", now=lambda: time.time() + offsets[-1]) as daemon:
        pause = Pause(daemon.now() + 60.0, "the clock", "ann", daemon.now())
        daemon.store.change(pause=pause)
        daemon.follow_clock()
        offsets.append(3600.0)
        daemon.pass_time()
        assert daemon.store.ledger.pause == pause
        daemon.follow_clock()
        daemon.pass_time()
        moved_pause = daemon.store.ledger.pause
        assert moved_pause
        assert moved_pause.until == pytest.approx(pause.until + 3600.0, abs=1.0)
