"""Tests of the controller: the record after a reconciliation, and commands while one is running."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from healthd.agent.conditions.ledger import Pause
from healthd.agent.conditions.store import ConditionStore
from healthd.agent.settings.config import Settings
from healthd.agent.slurm.controller import SlurmController
from healthd.agent.slurm.flapping import reset_count
from healthd.agent.slurm.policy import SETTLED_SECONDS
from healthd.agent.slurm.reconcile import ReconcileReport, SaveRecord
from healthd.common.model import DrainRecord, FleetHold, Health, Mode, ResumedDrain, Verdict
from tests.agent.slurm.test_policy import NOW, OURS, XID, cause, faulty, node

FLAPPED = (ResumedDrain(100.0, 160.0, True), ResumedDrain(200.0, 260.0, True))
DRAINED = DrainRecord(reason="healthd: gpu_xid/79 : it fell off the bus", resumed_drains=FLAPPED, drained_at=300.0)


@pytest.mark.parametrize("answered", [False, True], ids=["no command", "repaired"])
def test_who_answers_for_the_node_while_it_is_looked_at_in_slurm_has_answered_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, answered: bool
) -> None:
    memory = ConditionStore(str(tmp_path), time.time)
    memory.change(slurm=DRAINED)

    def looks(*_: object) -> Iterator[SaveRecord]:
        if answered:
            memory.change(slurm=reset_count(memory.ledger.slurm))
        yield SaveRecord(DRAINED)  # as it was when the reconciliation began
        return ReconcileReport(DRAINED, settled=True)

    monkeypatch.setattr("healthd.agent.slurm.driver.reconcile", looks)
    hand = SlurmController(Settings(mode=Mode.ACT), memory, "b1", time.time, time.monotonic)
    assert hand.reconcile_if_due(Verdict(Health.HEALTHY), round_ended=True) is not None
    assert memory.ledger.slurm == (reset_count(DRAINED) if answered else DRAINED)


def test_jobs_are_listed_as_requeued_until_healthds_drain_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reports = [
        ReconcileReport(DRAINED, requeued=("12",)),
        ReconcileReport(DRAINED, requeued=("12", "13")),
        ReconcileReport(DRAINED),
        ReconcileReport(DrainRecord()),
    ]

    def looks(*_: object) -> Iterator[SaveRecord]:
        report = reports.pop(0)
        yield SaveRecord(report.record)
        return report

    monkeypatch.setattr("healthd.agent.slurm.driver.reconcile", looks)
    hand = SlurmController(
        Settings(mode=Mode.ACT), ConditionStore(str(tmp_path), time.time), "b1", time.time, time.monotonic
    )
    listed = []
    while reports:
        verdict = Verdict(
            Health.HEALTHY, may_resume=len(reports) % 2 == 0
        )  # changes, so that each reconciliation is due
        assert hand.reconcile_if_due(verdict, round_ended=True) is not None
        listed.append(hand.requeued)
    assert listed == [("12",), ("12", "13"), ("12", "13"), ()]


PAUSE = Pause(until=NOW + 3600, why="maintenance", user="ann")
WITHHELD = DrainRecord(hold=FleetHold(NOW, NOW + 60, own_hardware=True))


@pytest.mark.parametrize(
    ("mode", "verdict", "pause", "slurm", "expected"),
    [
        pytest.param(Mode.ACT, faulty(cause()), None, DrainRecord(), True, id="drain is due"),
        pytest.param(Mode.DRAIN, faulty(cause()), None, DrainRecord(), True, id="drain is due, mode drain"),
        pytest.param(Mode.ACT, Verdict(Health.HEALTHY), None, DrainRecord(), False, id="healthy"),
        pytest.param(Mode.OBSERVE, faulty(cause()), None, DrainRecord(), False, id="mode observe"),
        pytest.param(Mode.ACT, faulty(cause()), PAUSE, DrainRecord(), False, id="paused"),
        pytest.param(Mode.ACT, faulty(cause()), None, WITHHELD, False, id="delayed by the fleet limit"),
    ],
)
def test_hand_keeps_jobs_out_while_it_may_drain_and_no_drain_stands(
    tmp_path: Path, mode: Mode, verdict: Verdict, pause: Pause | None, slurm: DrainRecord, expected: bool
) -> None:
    memory = ConditionStore(str(tmp_path), lambda: NOW)
    memory.change(pause=pause, slurm=slurm)
    hand = SlurmController(Settings(mode=mode), memory, "b1", lambda: NOW, time.monotonic)
    assert hand.must_refuse_jobs(verdict) is expected


@pytest.mark.parametrize(("seconds", "expected"), [(SETTLED_SECONDS - 1, True), (SETTLED_SECONDS + 1, False)])
def test_hand_keeps_jobs_out_until_slurmctld_has_surely_saved_the_drain(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seconds: float, expected: bool
) -> None:
    drained = node("IDLE+DRAIN", XID)

    def looks(*_: object) -> Iterator[SaveRecord]:
        yield SaveRecord(OURS)
        return ReconcileReport(OURS, node=drained)

    monkeypatch.setattr("healthd.agent.slurm.driver.reconcile", looks)
    now = drained.reason_time + seconds
    hand = SlurmController(
        Settings(mode=Mode.ACT), ConditionStore(str(tmp_path), lambda: now), "b1", lambda: now, time.monotonic
    )
    assert hand.reconcile_if_due(faulty(cause()), round_ended=True) is not None
    assert hand.must_refuse_jobs(faulty(cause())) is expected
