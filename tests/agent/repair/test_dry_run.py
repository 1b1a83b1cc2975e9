"""`healthd repair --dry-run`: the requirements that it shows are those of the executor."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
from msgspec.structs import replace
from repair_node import ID, IDLE, REASON, RepairNode
from slurm_text import NOW

from healthd.agent.repair import dry_run, executor, reset_step
from healthd.agent.repair.dry_run import read_requirements
from healthd.agent.repair.executor import Executor
from healthd.agent.repair.journal import Outcome, Request
from healthd.agent.repair.requirements import Process, Requirement
from healthd.agent.repair.step_result import PreparedStep, StepResult
from healthd.agent.reporting.repair import ACT_PROTECTIONS, SKIPPED_BY_ORDER, requirement_rows
from healthd.common.model import RepairStep


@pytest.fixture
def node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RepairNode:
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr(reset_step, "RETRY_SECONDS", 0.0)
    return RepairNode(tmp_path, monkeypatch)


def unmet(node: RepairNode, **changes: object) -> dict[str, Requirement]:
    """Return the requirements that are not met or unknown. The command-line program knows no id, boot or Reason."""
    request = node.request(id="", boot_id="", reason="healthd", causes=(), requested_at=0.0, **changes)
    return {r.name: r for r in read_requirements(request) if not r.met}


def outcome(node: RepairNode, **changes: object) -> Outcome:
    """Return the executor's outcome of the step."""
    request = node.request(**changes)
    Executor(request, str(node.runtime_dir), reset_step.open_smi(str(node.runtime_dir))).work()
    entry = node.journal().find(ID)
    assert entry is not None
    return entry.outcome


def test_all_requirements_are_met_before_a_step_that_succeeds(node: RepairNode) -> None:
    assert unmet(node) == {}
    assert (node.resets, node.services_run, node.read("systemctl.log")) == (0, True, "")
    assert outcome(node) is Outcome.DONE


def test_dry_run_waits_until_the_checks_have_closed_the_gpus(node: RepairNode, monkeypatch: pytest.MonkeyPatch) -> None:
    user = Process(7, 1, "python3", unit="healthd.service", gpu_files=("/dev/nvidia0",))
    closed = dry_run.read_node(str(node.root))
    readings = iter([replace(closed, processes=(user,)), closed])
    monkeypatch.setattr(dry_run, "read_node", lambda root: next(readings))
    monkeypatch.setattr(dry_run.time, "sleep", lambda seconds: None)
    assert unmet(node) == {}


def test_dry_run_shows_a_process_of_the_daemon_that_uses_a_gpu(
    node: RepairNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    user = Process(7, 1, "python3", unit="healthd.service", gpu_files=("/dev/nvidia0",))
    reading = replace(dry_run.read_node(str(node.root)), processes=(user,))
    monkeypatch.setattr(dry_run, "read_node", lambda root: reading)
    monkeypatch.setattr(dry_run, "CHECKS_SECONDS", 0.0)
    assert {name: r.met for name, r in unmet(node).items()} == {"gpu_users": False, "step": None}
    assert unmet(node, step=RepairStep.REBOOT) == {}


def write(name: str, text: str) -> Callable[[RepairNode], None]:
    return lambda node: node.write(name, text)


def schedule_shutdown(node: RepairNode) -> None:
    (node.root / "run/systemd/shutdown").mkdir()
    (node.root / "run/systemd/shutdown/scheduled").write_text("USEC=1\n")


@pytest.mark.parametrize(
    ("name", "met", "disturb"),
    [
        ("stop", False, write("reservations", "ReservationName=healthd-no-repair StartTime=now State=INACTIVE\n")),
        ("stop", None, write("scontrol.away", "")),
        ("claims", False, lambda node: node.set_claims(("n2", NOW - 1))),
        ("claims", None, write("claims.out", "cut off")),
        ("claims", None, write("sinfo.out", "cut off")),
        ("in_service", False, lambda node: node.set_fleet((IDLE, 1), ("down", 3))),
        ("in_service", None, write("fleet.out", "cut off")),
        ("slurm_jobs", False, write("squeue.out", "12\n")),
        ("slurm_jobs", None, write("listpids.err", "slurm_load_something error: Connection refused\n")),
        ("settled", False, schedule_shutdown),
        ("step", False, write("smi.mode", "lost\n")),
        ("step", False, write("slurmd.service", "active\n")),
    ],
)
def test_each_requirement_that_is_shown_as_unmet_prevents_the_step(
    node: RepairNode, name: str, met: bool | None, disturb: Callable[[RepairNode], None]
) -> None:
    node.write("nvidia-persistenced.service.required_by", "slurmd.service\n")
    disturb(node)
    found = unmet(node)
    assert (found[name].met, bool(found[name].problem)) == (met, True)
    assert outcome(node) in (Outcome.REFUSED, Outcome.IMPOSSIBLE)
    assert (node.resets, node.services_run) == (0, True)


@pytest.mark.parametrize("reason", [REASON, REASON.replace(" (repair: gpu_reset)", "")])
def test_claim_of_another_node_counts_also_if_it_is_newer(node: RepairNode, reason: str) -> None:
    node.set_claims(("n2", NOW + 60))
    node.set_node(IDLE, reason)
    assert "n2" in unmet(node)["claims"].problem
    assert "claims" not in unmet(node, settings=replace(node.request().settings, max_concurrent=2))


def test_slurm_is_not_queried_again_after_a_query_that_failed(node: RepairNode) -> None:
    node.write("scontrol.away", "")
    for name in ("sinfo.out", "claims.out", "fleet.out"):
        (node.state / name).unlink()
    found = unmet(node)
    assert {found[name].problem for name in ("stop", "claims", "in_service")} == {found["stop"].problem}
    assert "scontrol" in found["stop"].problem


@pytest.mark.parametrize(
    ("prepared", "met"),
    [
        (PreparedStep(("false",), lambda result: StepResult(None)), True),
        (StepResult(Outcome.IMPOSSIBLE, "Slurm 22.05.8 with ReturnToService = 2 starts jobs"), False),
        (StepResult(Outcome.REFUSED, "scontrol show config: timed out"), None),
    ],
)
@pytest.mark.parametrize("step", [RepairStep.REBOOT, RepairStep.POWER_CYCLE])
def test_preparation_of_a_boot_is_shown(
    node: RepairNode,
    monkeypatch: pytest.MonkeyPatch,
    step: RepairStep,
    prepared: PreparedStep | StepResult,
    met: bool | None,
) -> None:
    requests: list[Request] = []

    def prepare(request: Request) -> PreparedStep | StepResult:
        requests.append(request)
        return prepared

    assert dry_run.BOOTS is executor.BOOTS
    monkeypatch.setattr(dry_run, "BOOTS", {step: prepare})
    found = unmet(node, step=step)
    assert ("step" not in found) is (met is True)
    assert [request.step for request in requests] == [step]
    if isinstance(prepared, StepResult):
        assert (found["step"].met, found["step"].problem) == (met, prepared.problem)


def test_reset_is_not_prepared_while_a_process_hangs_in_the_kernel(node: RepairNode) -> None:
    (node.state / "smi.mode").unlink()
    found = {r.name: r for r in read_requirements(node.request(), stuck_pids=(4711,))}
    assert found["step"].met is False
    assert "4711" in found["step"].problem


def test_user_without_rights_sees_that_the_step_is_unknown(node: RepairNode, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert unmet(node)["step"].met is None
    assert unmet(node, step=RepairStep.POWER_CYCLE)["step"].met is None


# --- the daemon's own requirements


@pytest.mark.parametrize(("mode", "ordered_by"), [("advise", None), ("advise", "ann"), ("act", None), ("act", "ann")])
def test_rows_have_the_obstacles_of_mode_act_if_healthd_takes_the_step(mode: str, ordered_by: str | None) -> None:
    document = {"mode": mode, "ordered_by": ordered_by, "obstacles": []}
    shown = {text for text, _ in requirement_rows(document, ())}
    needed = {o for o in ACT_PROTECTIONS if not (ordered_by and o in SKIPPED_BY_ORDER)}
    expected = needed if mode == "act" or ordered_by else set()
    assert {o for o, text in ACT_PROTECTIONS.items() if text in shown} == expected
