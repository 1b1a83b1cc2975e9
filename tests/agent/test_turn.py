"""Tests of one turn of the daemon's loop: the order of its steps."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from healthd.agent.conditions.ledger import Pause
from healthd.agent.scheduler.replies import Received
from tests.agent.test_daemon_guards import alone


def test_a_clock_that_was_set_while_the_daemon_slept_is_taken_in_before_anything_is_heard_or_looked_at(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise a run would get the new time and the ledger keep the old one, so the step would cut a confirm time."""
    ahead = [0.0]
    with alone(tmp_path, "disk_space", now=lambda: time.time() + ahead[-1]) as daemon:
        before = daemon.now()
        daemon.store.change(trusted_since=before)
        seen: list[float] = []

        def look() -> Received:
            seen.append(daemon.store.ledger.trusted_since)
            return Received()

        monkeypatch.setattr(daemon, "read_inputs", look)
        monkeypatch.setattr(daemon.replies, "step", look)
        ahead.append(3600.0)
        daemon.turn()
        assert seen == [pytest.approx(before + 3600.0, abs=1.0)] * 2
        daemon.turn()
        assert seen[2:] == seen[:2], "applied once"


def test_a_clock_that_is_set_in_the_midst_of_a_turn_ends_no_pause_in_it(tmp_path: Path) -> None:
    ahead = [0.0]
    with alone(tmp_path, "disk_space", now=lambda: time.time() + ahead[-1]) as daemon:
        pause = Pause(daemon.now() + 60.0, "the clock", "ann", daemon.now())
        daemon.store.change(pause=pause)
        daemon.follow_clock()
        ahead.append(3600.0)
        daemon.pass_time()
        assert daemon.store.ledger.pause == pause
        daemon.follow_clock()
        daemon.pass_time()
        moved = daemon.store.ledger.pause
        assert moved
        assert moved.until == pytest.approx(pause.until + 3600.0, abs=1.0)
