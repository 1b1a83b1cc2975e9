"""The daemon's own use of the GPUs before a GPU reset."""

from __future__ import annotations

from pathlib import Path

import pytest

from healthd.agent.repair.journal import Journal
from healthd.agent.scheduler.gpu_event_process import GpuEventProcess
from healthd.common.model import RepairStep
from healthd.common.repair_plan import Attempt, AttemptStage, Plan, RepairRecord
from tests.agent.test_daemon_guards import daemon_with_check


@pytest.mark.parametrize(("step", "is_kept"), [(RepairStep.GPU_RESET, True), (RepairStep.REBOOT, False)])
def test_gpu_events_are_kept_closed_during_a_reset(tmp_path: Path, step: RepairStep, is_kept: bool) -> None:
    with daemon_with_check(tmp_path, "gpu_xid") as daemon:
        attempt = Attempt("a", step, AttemptStage.STEP, daemon.now(), daemon.boot_id, ("gpu_xid/95",))
        daemon.repair._hold_gpus(attempt)
        assert daemon.gpu_events._is_kept_closed is is_kept
        daemon.repair._hold_gpus(None)
        assert not daemon.gpu_events._is_kept_closed


@pytest.mark.parametrize("may_use", [True, False])
def test_reset_is_requested_after_the_process_for_gpu_events_has_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, may_use: bool
) -> None:
    monkeypatch.setattr(GpuEventProcess, "may_use_gpus", property(lambda _self: may_use))
    with daemon_with_check(tmp_path, "gpu_xid") as daemon:
        requested: list[str] = []
        monkeypatch.setattr(daemon.repair.program, "request", lambda attempt, *_: requested.append(attempt.id))
        daemon.repair.program.journal = Journal()
        attempt = Attempt("a", RepairStep.GPU_RESET, AttemptStage.STEP, daemon.now(), daemon.boot_id, ("gpu_xid/95",))
        plan = Plan(RepairStep.GPU_RESET, RepairStep.REBOOT, ())
        daemon.store.change(repair=RepairRecord(plan, attempt=attempt, ordered_by="ann"))
        daemon.repair._take_step(attempt)
        assert requested == ([] if may_use else ["a"])


def test_process_that_hangs_makes_a_reset_impossible(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(GpuEventProcess, "is_hung", property(lambda _self: True))
    with daemon_with_check(tmp_path, "gpu_xid") as daemon:
        daemon.repair._advance(RepairRecord(), daemon.verdict)
        assert daemon.repair._is_driver_stuck
