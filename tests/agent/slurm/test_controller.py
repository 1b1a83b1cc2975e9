"""Tests of the controller: the record after a reconciliation, and commands while one is running."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from msgspec.structs import replace

from healthd.agent.conditions.ledger import Pause
from healthd.agent.conditions.store import ConditionStore
from healthd.agent.settings.config import Settings
from healthd.agent.slurm.controller import SlurmController
from healthd.agent.slurm.flapping import reset_count
from healthd.agent.slurm.policy import SETTLED_SECONDS
from healthd.agent.slurm.reconcile import ReconcileReport, SaveRecord
from healthd.common.model import DrainRecord, FleetHold, Health, Mode, ResumedDrain, Verdict
from tests.agent.slurm.test_policy import NOW, OWN_DRAIN, XID, cause, faulty, node

TWO_RESUMED_DRAINS = (ResumedDrain(100.0, 160.0, True), ResumedDrain(200.0, 260.0, True))
DRAINED = DrainRecord(
    reason="healthd: gpu_xid/79 : it fell off the bus", resumed_drains=TWO_RESUMED_DRAINS, drained_at=300.0
)


@pytest.mark.parametrize("is_repaired", [False, True], ids=["no command", "repaired"])
def test_repaired_during_reconciliation_resets_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_repaired: bool
) -> None:
    condition_store = ConditionStore(str(tmp_path), time.time)
    condition_store.change(slurm=DRAINED)

    def fake_reconcile(*_: object) -> Iterator[SaveRecord]:
        if is_repaired:
            condition_store.change(slurm=reset_count(condition_store.ledger.slurm))
        yield SaveRecord(DRAINED)  # as it was when the reconciliation began
        return ReconcileReport(DRAINED, settled=True)

    monkeypatch.setattr("healthd.agent.slurm.driver.reconcile", fake_reconcile)
    controller = SlurmController(Settings(mode=Mode.ACT), condition_store, "b1", time.time, time.monotonic)
    assert controller.reconcile_if_due(Verdict(Health.HEALTHY), round_ended=True) is not None
    assert condition_store.ledger.slurm == (reset_count(DRAINED) if is_repaired else DRAINED)


def test_requeued_lists_jobs_until_drain_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reports = [
        ReconcileReport(DRAINED, requeued=("12",)),
        ReconcileReport(DRAINED, requeued=("12", "13")),
        ReconcileReport(DRAINED),
        ReconcileReport(DrainRecord()),
    ]

    def fake_reconcile(*_: object) -> Iterator[SaveRecord]:
        report = reports.pop(0)
        yield SaveRecord(report.record)
        return report

    monkeypatch.setattr("healthd.agent.slurm.driver.reconcile", fake_reconcile)
    controller = SlurmController(
        Settings(mode=Mode.ACT), ConditionStore(str(tmp_path), time.time), "b1", time.time, time.monotonic
    )
    listed = []
    while reports:
        verdict = Verdict(
            Health.HEALTHY, may_resume=len(reports) % 2 == 0
        )  # changes, so that each reconciliation is due
        assert controller.reconcile_if_due(verdict, round_ended=True) is not None
        listed.append(controller.requeued)
    assert listed == [("12",), ("12", "13"), ("12", "13"), ()]


def test_reconciliation_is_due_when_shared_cause_becomes_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fake_reconcile(*_: object) -> Iterator[SaveRecord]:
        yield SaveRecord(DRAINED)
        return ReconcileReport(DRAINED, settled=True)

    monkeypatch.setattr("healthd.agent.slurm.driver.reconcile", fake_reconcile)
    condition_store = ConditionStore(str(tmp_path), time.time)
    controller = SlurmController(Settings(mode=Mode.ACT), condition_store, "b1", time.time, time.monotonic)
    shared = faulty(replace(cause(), shared_cause=True))
    assert controller.reconcile_if_due(shared, round_ended=True) is not None
    assert controller.reconcile_if_due(shared, round_ended=False) is None
    assert controller.reconcile_if_due(faulty(cause()), round_ended=False) is not None


PAUSE = Pause(until=NOW + 3600, why="maintenance", user="ann")
DELAYED = DrainRecord(hold=FleetHold(NOW, NOW + 60, own_hardware=True))


@pytest.mark.parametrize(
    ("mode", "verdict", "pause", "slurm", "expected"),
    [
        pytest.param(Mode.ACT, faulty(cause()), None, DrainRecord(), True, id="drain is due"),
        pytest.param(Mode.DRAIN, faulty(cause()), None, DrainRecord(), True, id="drain is due, mode drain"),
        pytest.param(Mode.ACT, Verdict(Health.HEALTHY), None, DrainRecord(), False, id="healthy"),
        pytest.param(Mode.OBSERVE, faulty(cause()), None, DrainRecord(), False, id="mode observe"),
        pytest.param(Mode.ACT, faulty(cause()), PAUSE, DrainRecord(), False, id="paused"),
        pytest.param(Mode.ACT, faulty(cause()), None, DELAYED, False, id="delayed by the fleet limit"),
    ],
)
def test_must_refuse_jobs_while_drain_is_allowed_and_missing(
    tmp_path: Path, mode: Mode, verdict: Verdict, pause: Pause | None, slurm: DrainRecord, expected: bool
) -> None:
    condition_store = ConditionStore(str(tmp_path), lambda: NOW)
    condition_store.change(pause=pause, slurm=slurm)
    controller = SlurmController(Settings(mode=mode), condition_store, "b1", lambda: NOW, time.monotonic)
    assert controller.must_refuse_jobs(verdict) is expected


@pytest.mark.parametrize(("seconds", "expected"), [(SETTLED_SECONDS - 1, True), (SETTLED_SECONDS + 1, False)])
def test_must_refuse_jobs_until_slurmctld_has_saved_drain(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seconds: float, expected: bool
) -> None:
    drained = node("IDLE+DRAIN", XID)

    def fake_reconcile(*_: object) -> Iterator[SaveRecord]:
        yield SaveRecord(OWN_DRAIN)
        return ReconcileReport(OWN_DRAIN, node=drained)

    monkeypatch.setattr("healthd.agent.slurm.driver.reconcile", fake_reconcile)
    now = drained.reason_time + seconds
    controller = SlurmController(
        Settings(mode=Mode.ACT), ConditionStore(str(tmp_path), lambda: now), "b1", lambda: now, time.monotonic
    )
    assert controller.reconcile_if_due(faulty(cause()), round_ended=True) is not None
    assert controller.must_refuse_jobs(faulty(cause())) is expected
