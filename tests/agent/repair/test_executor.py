"""The executor: requirements right before the step, the GPU reset, and the record after a kill at any point."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace
from repair_node import (
    BOOT_ID,
    CAUSE,
    DCGM,
    FIRST,
    ID,
    IDLE,
    LATER,
    PERSISTENCED,
    REASON,
    SECOND,
    RepairNode,
    killed_at,
    put_request,
    serve,
)
from slurm_text import NOW

from healthd.agent.evidence.case import Process as StuckProcess
from healthd.agent.repair import executor, journal_file, reset_step, services
from healthd.agent.repair.executor import Executor
from healthd.agent.repair.journal import JOURNAL_FILE, NAME, Entry, Journal, Outcome, Request, Stopped
from healthd.agent.repair.journal_file import read_journal, write_journal
from healthd.agent.repair.requirements import NodeReading, Process, gpu_users
from healthd.agent.repair.step_result import PreparedStep, StepResult
from healthd.agent.slurm import blocking, repair_claim
from healthd.common.model import RepairStep
from healthd.common.slurm import commands
from healthd.common.slurm.commands import Command, CommandResult
from healthd.common.values import encode
from healthd.host.separate_program import request_file


@pytest.fixture
def node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RepairNode:
    monkeypatch.setattr(executor.os, "geteuid", lambda: 0)
    monkeypatch.setattr(reset_step, "RETRY_SECONDS", 0.0)
    return RepairNode(tmp_path, monkeypatch)


def work(node: RepairNode, is_replaced: Callable[[], bool] = lambda: False, **changes: object) -> Entry:
    """Run the executor on a request. Return its entry in the journal, which equals the daemon's copy."""
    request = node.request(**changes)
    run = Executor(request, str(node.runtime_dir), reset_step.open_smi(str(node.runtime_dir)), is_replaced)
    run.work()
    assert node.journal() == node.journal(is_copy=True)
    assert node.read("violations") == ""
    entry = node.journal().find(request.id or ID)
    assert entry is not None
    return entry


def unchanged(node: RepairNode) -> bool:
    return node.resets == 0 and node.services_run and node.read("systemctl.log") == ""


# --- the reset


def test_reset_is_proven_and_recorded(node: RepairNode) -> None:
    entry = work(node)
    assert (entry.outcome, entry.problem, node.journal().stopped) == (Outcome.DONE, "", None)
    assert (entry.step, entry.causes, entry.parts, entry.boot_id) == (
        RepairStep.GPU_RESET,
        (CAUSE,),
        (FIRST,),
        BOOT_ID,
    )
    assert entry.proof
    assert node.read("smi.resets") == "--gpu-reset -i 00000000:1B:00.0\n"
    stopped, started = (
        {line for line in node.read("systemctl.log").splitlines() if line.startswith(verb)}
        for verb in ("stop", "start")
    )
    assert stopped == {f"stop {PERSISTENCED}", f"stop {DCGM}"}
    assert started == {f"start {PERSISTENCED}", f"start {DCGM}"}


@pytest.mark.parametrize(
    ("mode", "outcome", "resets"),
    [
        ("fails", Outcome.FAILED, 1),
        ("no_effect", Outcome.FAILED, 1),
        ("kills", Outcome.FAILED, 1),
        ("in_use", Outcome.IMPOSSIBLE, reset_step.TRIES),
        ("in_use_once", Outcome.DONE, 2),
        ("lost", Outcome.IMPOSSIBLE, 0),
    ],
)
def test_result_of_reset(node: RepairNode, mode: str, outcome: Outcome, resets: int) -> None:
    node.write("smi.mode", f"{mode}\n")
    entry = work(node)
    assert (entry.outcome, node.resets) == (outcome, resets)
    assert bool(entry.problem) is (outcome is not Outcome.DONE)
    assert node.services_run


def test_reset_of_only_some_gpus_has_failed_and_is_not_repeated(node: RepairNode) -> None:
    node.write("smi.mode", "partly\n")
    entry = work(node, parts=(FIRST, SECOND))
    assert (entry.outcome, FIRST in entry.problem) == (Outcome.FAILED, True)
    assert node.read("smi.resets") == "--gpu-reset -i 00000000:1B:00.0,00000000:C1:00.0\n"
    assert node.services_run


def test_reset_that_does_not_end_is_killed(node: RepairNode) -> None:
    node.write("smi.mode", "hangs\n")
    settings = replace(node.request().settings, reset_timeout_seconds=0.3)
    entry = work(node, settings=settings)
    assert entry.outcome is Outcome.FAILED
    assert node.services_run


def test_reset_that_hangs_in_the_kernel_is_named(node: RepairNode, monkeypatch: pytest.MonkeyPatch) -> None:
    found = reset_step.Smi.reset

    def reset(smi: reset_step.Smi, *arguments: Any) -> tuple[int | None, str]:
        found(smi, *arguments)
        smi.stuck = (hung,)
        return None, ""

    monkeypatch.setattr(reset_step.Smi, "reset", reset)
    node.write("smi.persistence", "Enabled\n")
    with running_process() as hung:
        entry = work(node)
        assert entry.outcome is Outcome.FAILED
        assert str(hung.pid) in entry.problem
        assert not node.services_run
        other = work(node, id=LATER, causes=("gpu_xid/119 0000:c1:00.0",))
        assert other.outcome is Outcome.REFUSED
        stopped = node.journal().stopped
        assert stopped is not None
        assert (set(stopped.services), stopped.hung) == ({PERSISTENCED, DCGM}, (hung,))
        assert not node.services_run
    work(node)
    assert node.services_run
    assert node.journal().stopped is None


def test_missing_nvidia_smi_makes_reset_impossible(node: RepairNode, tmp_path: Path) -> None:
    (tmp_path / "bin/nvidia-smi").unlink()
    assert work(node).outcome is Outcome.IMPOSSIBLE
    assert unchanged(node)


def test_service_that_does_not_start_is_kept_for_the_next_run(node: RepairNode) -> None:
    node.write("systemctl.start.fails", "")
    assert work(node).outcome is Outcome.DONE
    require_stopped(node)
    (node.state / "systemctl.start.fails").unlink()
    work(node, id="")
    assert node.journal().stopped is None
    assert node.services_run
    assert node.resets == 1


def test_refusals_do_not_forget_stopped_services(node: RepairNode, monkeypatch: pytest.MonkeyPatch) -> None:
    node.write("systemctl.start.fails", "")
    monkeypatch.setattr(reset_step, "wait_for_release", lambda *arguments: "a GPU is still open")
    for id in (ID, LATER):
        assert work(node, id=id).outcome is Outcome.REFUSED
        require_stopped(node)
    (node.state / "systemctl.start.fails").unlink()
    work(node, id=LATER)
    assert node.journal().stopped is None
    assert node.services_run


def require_stopped(node: RepairNode) -> None:
    stopped = node.journal().stopped
    assert stopped is not None
    assert (stopped.boot_id, set(stopped.services), stopped.hung) == (BOOT_ID, {PERSISTENCED, DCGM}, ())


@contextmanager
def running_process() -> Iterator[StuckProcess]:
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        start = int(Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()[19])
        yield StuckProcess(process.pid, start)
    finally:
        process.kill()
        process.communicate()


def test_service_that_does_not_stop_prevents_reset(node: RepairNode) -> None:
    node.write("systemctl.stop.fails", "")
    assert work(node).outcome is Outcome.REFUSED
    assert node.resets == 0
    assert node.journal().entries == ()


def test_unit_that_systemd_would_also_stop_makes_reset_impossible(node: RepairNode) -> None:
    node.write(f"{PERSISTENCED}.required_by", "slurmd.service\n")
    node.write("slurmd.service", "active\n")
    assert work(node).outcome is Outcome.IMPOSSIBLE
    assert unchanged(node)


@pytest.mark.parametrize(
    ("state", "kind", "left"), [("failed", "simple", 1), ("inactive", "simple", 1), ("inactive", "oneshot", 0)]
)
def test_service_that_stops_right_after_its_start_is_kept_for_the_next_run(
    node: RepairNode, state: str, kind: str, left: int
) -> None:
    node.write(f"{DCGM}.after_start", f"{state}\n")
    node.write(f"{DCGM}.type", f"{kind}\n")
    entry = work(node)
    stopped = node.journal().stopped
    assert entry.outcome is Outcome.DONE
    assert (stopped.services if stopped is not None else ()) == (DCGM,) * left


@pytest.mark.parametrize("kind", services._STOPPED_TOO)
def test_each_kind_of_dependency_that_stops_a_unit_makes_reset_impossible(node: RepairNode, kind: str) -> None:
    node.write(f"{PERSISTENCED}.{kind}", "slurmd.service\n")
    node.write("slurmd.service", "active\n")
    assert work(node).outcome is Outcome.IMPOSSIBLE
    assert unchanged(node)


def test_stopped_unit_that_requires_a_service_prevents_nothing(node: RepairNode) -> None:
    node.write(f"{PERSISTENCED}.required_by", f"slurmd.service {DCGM}\n")
    assert work(node).outcome is Outcome.DONE


@pytest.mark.parametrize("mode", ["ok", "fails"])
def test_persistence_mode_without_its_daemon_is_switched_off_meanwhile(node: RepairNode, mode: str) -> None:
    node.write(PERSISTENCED, "inactive\n")
    node.write("smi.persistence", "Enabled\n")
    node.write("smi.mode", f"{mode}\n")
    assert work(node).outcome is (Outcome.DONE if mode == "ok" else Outcome.FAILED)
    assert (node.read("smi.persistence"), node.read(PERSISTENCED)) == ("Enabled\n", "inactive\n")


def test_only_running_services_are_stopped_and_started(node: RepairNode) -> None:
    node.write(DCGM, "inactive\n")
    assert work(node).outcome is Outcome.DONE
    assert node.read(DCGM) == "inactive\n"


def test_gpu_user_after_stop_of_services_prevents_reset(node: RepairNode, monkeypatch: pytest.MonkeyPatch) -> None:
    user = Process(7, 1, "python3", gpu_files=("/dev/nvidia0",))
    reading = replace(reset_step.read_node(str(node.root)), processes=(user,))
    assert list(gpu_users(reading.processes or (), (), ())) == [user]
    monkeypatch.setattr(reset_step, "read_node", lambda root: reading)
    monkeypatch.setattr(reset_step, "RELEASE_SECONDS", 0.0)
    assert work(node).outcome is Outcome.REFUSED
    assert node.resets == 0
    assert node.services_run


def test_process_of_the_daemon_that_uses_a_gpu_prevents_reset(
    node: RepairNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It hangs in the driver. The services keep running."""
    user = Process(7, 1, "python3", unit="healthd.service", gpu_files=("/dev/nvidia0",))
    reading = replace(executor.read_node(str(node.root)), processes=(user,))
    monkeypatch.setattr(executor, "read_node", lambda root: reading)
    assert work(node).outcome is Outcome.REFUSED
    assert unchanged(node)


# --- requirements


@pytest.mark.parametrize(
    ("state", "reason"),
    [
        ("idle", REASON),
        ("drained+allocated", REASON),
        ("mixed+drain", REASON),
        ("idle+drain+completing", REASON),
        ("idle+drain+maint", REASON),
        ("idle+drain+reboot_requested", REASON),
        ("idle+drain+powering_down", REASON),
        ("idle+drain+not_responding", REASON),
        ("down+drain", REASON),
        (IDLE, "operator: broken fan"),
        (IDLE, REASON.replace(" (repair: gpu_reset)", "")),
        (IDLE, "none"),
    ],
)
def test_state_in_slurm_prevents_step(node: RepairNode, state: str, reason: str) -> None:
    node.set_node(state, reason)
    assert work(node).outcome is Outcome.REFUSED
    assert unchanged(node)


def test_suffix_of_slurm_is_not_part_of_reason(node: RepairNode) -> None:
    node.set_node(IDLE, f"{REASON} : Not responding")
    assert work(node).outcome is Outcome.DONE


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("reservations", "ReservationName=healthd-no-repair StartTime=2026-11-29T06:07:14 State=INACTIVE\n"),
        ("reservations", "unknown\n"),
        ("scontrol.away", ""),
        ("squeue.out", "12\n"),
        ("squeue.out", "error\n"),
        ("listpids.err", "slurm_load_something error: Connection refused\n"),
        ("sinfo.out", "cut off"),
    ],
)
def test_answer_of_slurm_prevents_step(node: RepairNode, name: str, text: str) -> None:
    node.write(name, text)
    assert work(node).outcome is Outcome.REFUSED
    assert unchanged(node)


def test_reason_must_claim_the_step(node: RepairNode) -> None:
    assert work(node, step=RepairStep.REBOOT).outcome is Outcome.REFUSED
    assert unchanged(node)


@pytest.mark.parametrize(
    ("max_concurrent", "others", "outcome"),
    [
        (1, {"n2": -1.0}, Outcome.REFUSED),
        (1, {"n2": 60.0}, Outcome.REFUSED),  # it may be an older claim that was written again
        (2, {"n2": -1.0}, Outcome.DONE),
        (2, {"n2": -1.0, "n3": -2.0}, Outcome.REFUSED),
        ("50%", {"n2": -1.0}, Outcome.DONE),
        ("25%", {"n2": -1.0}, Outcome.REFUSED),
    ],
)
def test_claims_of_other_nodes_are_counted_again(
    node: RepairNode, max_concurrent: int | str, others: dict[str, float], outcome: Outcome
) -> None:
    node.set_claims(*((name, NOW + since) for name, since in others.items()))
    settings = replace(node.request().settings, max_concurrent=max_concurrent)
    assert work(node, settings=settings).outcome is outcome
    assert unchanged(node) is (outcome is Outcome.REFUSED)


@pytest.mark.parametrize(
    ("since", "outcome"), [(-30.0, Outcome.REFUSED), (-1.0 - repair_claim.HIDDEN_SECONDS, Outcome.DONE)]
)
def test_claim_that_slurm_may_have_hidden_prevents_step(node: RepairNode, since: float, outcome: Outcome) -> None:
    node.set_claims(("n2", NOW + since), reason="gres/gpu count reported lower than configured (7 < 8)")
    assert work(node).outcome is outcome
    assert unchanged(node) is (outcome is Outcome.REFUSED)


@pytest.mark.parametrize("name", ["claims.out", "fleet.out"])
def test_unreadable_count_prevents_step(node: RepairNode, name: str) -> None:
    node.write(name, "cut off")
    assert work(node).outcome is Outcome.REFUSED
    assert unchanged(node)


def test_last_nodes_in_service_are_not_repaired(node: RepairNode) -> None:
    node.set_fleet((IDLE, 1), ("down", 3))
    assert work(node).outcome is Outcome.REFUSED
    assert unchanged(node)


def test_process_of_job_prevents_step(node: RepairNode) -> None:
    node.write("listpids.err", "")
    node.write("listpids.out", "PID      JOBID    STEPID   LOCALID GLOBALID\n100    12        batch    0       0\n")
    assert work(node).outcome is Outcome.REFUSED
    assert unchanged(node)


def test_requirement_on_the_node_prevents_step(node: RepairNode) -> None:
    (node.root / "run/systemd/shutdown").mkdir()
    (node.root / "run/systemd/shutdown/scheduled").write_text("USEC=1\n")
    assert work(node).outcome is Outcome.REFUSED
    assert unchanged(node)


def test_process_that_hangs_in_the_kernel_prevents_reset(node: RepairNode) -> None:
    with running_process() as process:
        assert work(node, stuck=(process,)).outcome is Outcome.REFUSED
    assert unchanged(node)
    assert work(node, id=ID + "_b", stuck=(process,)).outcome is Outcome.DONE


@pytest.mark.parametrize(
    "changes",
    [
        {"boot_id": "an-earlier-boot"},
        {"requested_at": time.time() - 86400.0},
        {"requested_at": time.time() + 86400.0},
    ],
)
def test_request_of_another_time_is_refused(node: RepairNode, changes: dict[str, object]) -> None:
    assert work(node, **changes).outcome is Outcome.REFUSED
    assert unchanged(node)


def test_withdrawn_request_is_refused(node: RepairNode) -> None:
    assert work(node, is_replaced=lambda: True).outcome is Outcome.REFUSED
    assert unchanged(node)


def test_state_directory_must_have_survived_a_reboot(node: RepairNode) -> None:
    write_journal(node.made_journal(BOOT_ID), str(node.state_dir))
    assert work(node).outcome is Outcome.REFUSED
    assert unchanged(node)


def test_step_is_taken_once_per_cause_and_day_unless_ordered(node: RepairNode) -> None:
    assert work(node).outcome is Outcome.DONE
    again = ID.replace("06", "07")
    assert work(node, id=again).outcome is Outcome.REFUSED
    assert node.resets == 1
    assert work(node, id=again.replace("07", "08"), is_ordered=True).outcome is Outcome.DONE
    assert node.resets == 2


def test_state_is_read_again_after_the_services_stopped(node: RepairNode, monkeypatch: pytest.MonkeyPatch) -> None:
    def stop(units: tuple[str, ...]) -> str:
        node.set_node(IDLE, "operator: keep your hands off")
        return ""

    monkeypatch.setattr(services, "stop", stop)
    assert work(node).outcome is Outcome.REFUSED
    assert node.resets == 0
    assert node.services_run


def test_executor_without_root_takes_no_step(node: RepairNode, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(executor.os, "geteuid", lambda: 1000)
    monkeypatch.setattr("healthd.common.atomic_files._is_current", lambda *arguments: False)
    assert work(node).outcome is Outcome.REFUSED
    assert unchanged(node)


def test_step_without_program_is_impossible(node: RepairNode) -> None:
    reason = REASON.replace("repair: gpu_reset", "repair failed: a person must act")
    node.set_node(IDLE, reason)
    entry = work(node, step=RepairStep.PERSON, reason=reason, id="20261129T060000Z-person")
    assert entry.outcome is Outcome.IMPOSSIBLE


@pytest.mark.parametrize("outcome", [None, Outcome.REFUSED, Outcome.FAILED])
def test_boot_stays_taking_until_the_daemon_sees_it(
    node: RepairNode, monkeypatch: pytest.MonkeyPatch, outcome: Outcome | None
) -> None:
    taken: list[Entry | None] = []

    def result(command: CommandResult) -> StepResult:
        found = read_journal(str(node.state_dir))
        taken.append(found.find(ID) if found else None)
        return StepResult(outcome, "problem" if outcome else "")

    for _ in range(2):
        entry = reboot(node, monkeypatch, PreparedStep(("true",), result))
        assert entry.outcome is (outcome or Outcome.TAKING)
    assert [entry.outcome for entry in taken if entry is not None] == [Outcome.TAKING]
    assert unchanged(node)


def reboot(
    node: RepairNode,
    monkeypatch: pytest.MonkeyPatch,
    prepared: PreparedStep | StepResult,
    prepare: Callable[[], object] = lambda: None,
    is_replaced: Callable[[], bool] = lambda: False,
    **changes: object,
) -> Entry:
    """Work on the request of a reboot whose preparation calls `prepare` and returns `prepared`."""

    def prepare_boot(request: Request) -> PreparedStep | StepResult:
        prepare()
        return prepared

    monkeypatch.setattr(executor, "BOOTS", {RepairStep.REBOOT: prepare_boot})
    reason = REASON.replace("gpu_reset", "reboot")
    node.set_node(IDLE, reason)
    return work(node, is_replaced, step=RepairStep.REBOOT, reason=reason, **changes)


def touch(node: RepairNode, name: str = "rebooted") -> PreparedStep:
    return PreparedStep(("touch", str(node.state / name)), lambda result: StepResult(None))


@pytest.mark.parametrize("outcome", [Outcome.IMPOSSIBLE, Outcome.REFUSED])
def test_reboot_that_cannot_be_prepared_is_not_recorded_as_taken(
    node: RepairNode, monkeypatch: pytest.MonkeyPatch, outcome: Outcome
) -> None:
    written: list[Journal] = []
    write = executor.write_journal
    monkeypatch.setattr(
        executor, "write_journal", lambda journal, path: (written.append(journal), write(journal, path))
    )
    assert reboot(node, monkeypatch, StepResult(outcome, "problem")).outcome is outcome
    assert [journal.find(ID).outcome for journal in written] == [outcome]  # type: ignore[union-attr]


@pytest.mark.parametrize("what", ["state", "reservation", "claim", "job", "node", "request"])
def test_change_during_the_preparation_prevents_reboot(
    node: RepairNode, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    def change() -> None:
        if what == "state":
            node.set_node(IDLE, "operator: keep your hands off")
        elif what == "reservation":
            node.write("reservations", "ReservationName=healthd-no-repair State=INACTIVE\n")
        elif what == "claim":
            node.set_claims(("n2", NOW - 1.0))
        elif what == "job":
            node.write("squeue.out", "12\n")
        elif what == "node":
            (node.root / "run/systemd/shutdown").mkdir()
            (node.root / "run/systemd/shutdown/scheduled").write_text("USEC=1\n")
        else:
            replaced.append(True)

    replaced: list[bool] = []
    entry = reboot(node, monkeypatch, touch(node), change, lambda: bool(replaced))
    assert entry.outcome is Outcome.REFUSED
    assert not (node.state / "rebooted").exists()


def test_state_and_request_are_the_last_that_is_read_before_a_reboot(
    node: RepairNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    order: list[str] = []

    def is_replaced() -> bool:
        order.append("request")
        return False

    def run(command: Command) -> CommandResult:
        order.append("state" if command.argv == commands.node("n1") else command.argv[0])
        return blocking.run(command)

    def command(command: Command) -> CommandResult:
        order.append("command")
        return CommandResult(0)

    monkeypatch.setattr(executor, "run_command", command)
    monkeypatch.setattr(executor, "BOOTS", {RepairStep.REBOOT: lambda request: touch(node)})
    reason = REASON.replace("gpu_reset", "reboot")
    node.set_node(IDLE, reason)
    request = node.request(step=RepairStep.REBOOT, reason=reason)
    Executor(request, str(node.runtime_dir), reset_step.open_smi(str(node.runtime_dir)), is_replaced, run).work()
    assert order[-3:] == ["state", "request", "command"]


# --- the journal


def test_empty_id_only_creates_the_journal(node: RepairNode) -> None:
    (node.state_dir / JOURNAL_FILE).unlink()
    request = Request("", str(node.state_dir), node="n1", root=str(node.root))
    Executor(request, str(node.runtime_dir), reset_step.open_smi(str(node.runtime_dir))).work()
    assert node.journal() == node.journal(is_copy=True) == node.made_journal(BOOT_ID)


@pytest.mark.parametrize("id", ["", ID])
def test_unreadable_journal_is_kept_and_nothing_is_done(node: RepairNode, id: str) -> None:
    (node.state_dir / JOURNAL_FILE).write_text("{damaged")
    request = node.request(id=id)
    Executor(request, str(node.runtime_dir), reset_step.open_smi(str(node.runtime_dir))).work()
    assert (node.state_dir / JOURNAL_FILE).read_text() == "{damaged"
    copy = node.journal(is_copy=True)
    assert (copy.first_boot, copy.entries) == ("", ())
    assert copy.refused is None if not id else copy.find(id) == copy.refused
    assert unchanged(node)


def test_step_that_cannot_be_recorded_is_not_taken(node: RepairNode, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(executor, "write_journal", refuse)
    request = node.request()
    Executor(request, str(node.runtime_dir), reset_step.open_smi(str(node.runtime_dir))).work()
    found = node.journal(is_copy=True).find(ID)
    assert found is not None
    assert found.outcome is Outcome.REFUSED
    assert node.journal(is_copy=True).first_boot == node.journal().first_boot
    assert unchanged(node)


def test_outcome_is_published_if_the_disk_is_full_after_the_step(
    node: RepairNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    def write(journal: Journal, state_dir: str) -> None:
        if node.resets:
            raise OSError(28, "No space left on device")
        write_journal(journal, state_dir)

    monkeypatch.setattr(executor, "write_journal", write)
    request = node.request()
    Executor(request, str(node.runtime_dir), reset_step.open_smi(str(node.runtime_dir))).work()
    found, kept = node.journal(is_copy=True).find(ID), node.journal().find(ID)
    assert found is not None
    assert kept is not None
    assert (found.outcome, kept.outcome) == (Outcome.DONE, Outcome.TAKING)
    monkeypatch.setattr(executor, "write_journal", write_journal)
    assert work(node).outcome is Outcome.DONE, "the daemon's copy has the outcome"
    assert node.resets == 1


def test_journal_and_its_folder_are_synced(node: RepairNode, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[str] = []
    fsync = os.fsync

    def record(descriptor: int) -> None:
        synced.append(os.readlink(f"/proc/self/fd/{descriptor}"))
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", record)
    journal_file.write_journal(Journal(first_boot="x"), str(node.state_dir))
    assert synced[-1] == str(node.state_dir)
    assert len(synced) == 2


def test_boot_during_reset_ends_its_record(node: RepairNode) -> None:
    taking = Entry(ID, RepairStep.GPU_RESET, time.time(), "an-earlier-boot", Outcome.TAKING)
    stopped = Stopped("an-earlier-boot", (PERSISTENCED,), ("00000000:1B:00.0",))
    write_journal(node.made_journal("an-earlier-boot", taking, stopped=stopped), str(node.state_dir))
    entry = work(node)
    assert (entry.outcome, node.journal().stopped) == (Outcome.UNKNOWN, None)
    assert unchanged(node)


# --- kill -9


def require_invariants(node: RepairNode) -> Entry:
    """Nothing is done twice, the services run, and the record is complete."""
    assert node.resets <= 1
    assert node.services_run
    assert node.read("violations") == ""
    assert node.journal() == node.journal(is_copy=True)
    assert not os.path.exists(request_file(str(node.runtime_dir), NAME))
    entry = node.journal().find(ID)
    assert entry is not None
    assert entry.outcome in (Outcome.DONE, Outcome.UNKNOWN)
    assert node.journal().stopped is None
    assert entry.outcome is Outcome.UNKNOWN or node.resets == 1
    return entry


def test_kill_at_each_point_takes_no_step_twice_and_starts_services(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(executor.os, "geteuid", lambda: 0)
    outcomes = []
    for point in range(1, 100):
        folder = tmp_path / str(point)
        folder.mkdir()
        with monkeypatch.context() as patch:
            node = RepairNode(folder, patch)
            put_request(node)
            was_killed = killed_at(node, point)
            serve(node)
            outcomes.append(require_invariants(node).outcome)
            serve(node)  # without a request
            require_invariants(node)
        if not was_killed:
            break
    else:
        pytest.fail("the executor never ended")
    assert len(outcomes) > 15
    assert outcomes[-1] is Outcome.DONE
    assert Outcome.UNKNOWN in outcomes


@pytest.mark.parametrize("second", range(1, 12))
def test_kill_of_both_runs_takes_no_step_twice(node: RepairNode, second: int) -> None:
    put_request(node)
    assert killed_at(node, 12)
    killed_at(node, second)
    serve(node)
    require_invariants(node)


def test_kill_during_reset_is_not_repeated(node: RepairNode) -> None:
    node.write("smi.mode", "kills_parent\n")
    put_request(node)
    killed_at(node, 0)
    serve(node)
    assert require_invariants(node).outcome is Outcome.UNKNOWN
    assert node.resets == 1


def test_slurm_commands_are_found_as_by_the_daemon(node: RepairNode, monkeypatch: pytest.MonkeyPatch) -> None:
    environment = {"PATH": os.environ["PATH"], "SLURM_CONF": "/opt/slurm/slurm.conf"}
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    monkeypatch.setenv("SLURM_CONF", "")
    request = node.request(environment=environment)
    Path(request_file(str(node.runtime_dir), NAME)).write_bytes(encode(request))
    serve(node)
    require_invariants(node)
    assert os.environ["SLURM_CONF"] == environment["SLURM_CONF"]


def test_unreadable_request_is_dropped(node: RepairNode) -> None:
    Path(request_file(str(node.runtime_dir), NAME)).write_text('{"id": "../x"}')
    serve(node)
    assert not os.path.exists(request_file(str(node.runtime_dir), NAME))
    assert unchanged(node)


def test_boot_does_not_wait_for_a_program_of_healthd_that_hangs(
    node: RepairNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    def read(root: str) -> NodeReading:
        return replace(reset_step.read_node(root), processes=(hung,))

    monkeypatch.setattr(executor, "read_node", read)
    for unit, outcome in (("healthd-evidence.service", Outcome.TAKING), ("other.service", Outcome.REFUSED)):
        hung = Process(7, 1, "nvidia-smi", unit=unit, gpu_files=("/dev/nvidia0",))
        write_journal(node.made_journal("an-earlier-boot"), str(node.state_dir))
        assert reboot(node, monkeypatch, touch(node)).outcome is outcome
    hung = Process(7, 1, "nvidia-smi", unit="healthd-evidence.service", gpu_files=("/dev/nvidia0",))
    node.set_node(IDLE, REASON)
    assert work(node).outcome is Outcome.REFUSED
    assert unchanged(node)


# --- what is known after a failure


def test_recorded_step_is_never_refused_afterwards(node: RepairNode) -> None:
    """A program was killed during the step, and then the journal cannot be read."""
    taking = Entry(ID, RepairStep.GPU_RESET, time.time(), BOOT_ID, Outcome.TAKING)
    stopped = Stopped(BOOT_ID, (PERSISTENCED,), ("00000000:1B:00.0",))
    node.write(PERSISTENCED, "inactive\n")
    node.write("smi.persistence", "Disabled\n")
    journal_file.publish(node.made_journal("an-earlier-boot", taking, stopped=stopped), str(node.runtime_dir))
    (node.state_dir / JOURNAL_FILE).write_text("{damaged")
    run_once(node)
    copy = node.journal(is_copy=True)
    assert [entry.outcome for entry in copy.entries] == [Outcome.UNKNOWN]
    assert (copy.refused, copy.stopped) == (None, None)
    assert copy.problem
    assert (node.read("smi.persistence"), node.services_run, node.resets) == ("Enabled\n", True, 0)


@pytest.mark.parametrize(
    ("step", "outcome"), [(RepairStep.GPU_RESET, Outcome.UNKNOWN), (RepairStep.REBOOT, Outcome.TAKING)]
)
@pytest.mark.parametrize("is_readable", [True, False])
def test_step_stays_recorded_if_the_disk_fails(
    node: RepairNode, monkeypatch: pytest.MonkeyPatch, step: RepairStep, outcome: Outcome, is_readable: bool
) -> None:
    journal = node.made_journal("an-earlier-boot", Entry(ID, step, time.time(), BOOT_ID, Outcome.TAKING))
    write_journal(journal, str(node.state_dir))
    journal_file.publish(journal, str(node.runtime_dir))
    monkeypatch.setattr(executor, "write_journal", fail)
    if not is_readable:
        monkeypatch.setattr(executor, "read_journal", fail)
    run_once(node, step=step)
    copy = node.journal(is_copy=True)
    assert [entry.outcome for entry in copy.entries] == [outcome]
    assert copy.refused is None
    assert unchanged(node)


def fail(*arguments: object, **names: object) -> None:
    raise OSError(28, "No space left on device")


def run_once(node: RepairNode, **changes: object) -> None:
    request = node.request(**changes)
    Executor(request, str(node.runtime_dir), reset_step.open_smi(str(node.runtime_dir))).work()


def test_refusal_that_could_not_be_recorded_is_recorded_later(
    node: RepairNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise a reboot that was refused would count as taken after the next boot."""

    def prepare(request: Request) -> PreparedStep:
        return PreparedStep(("false",), end)

    def end(result: object) -> StepResult:
        monkeypatch.setattr(executor, "write_journal", fail)
        return StepResult(Outcome.REFUSED, "problem")

    monkeypatch.setattr(executor, "BOOTS", {RepairStep.REBOOT: prepare})
    reason = REASON.replace("gpu_reset", "reboot")
    node.set_node(IDLE, reason)
    run_once(node, step=RepairStep.REBOOT, reason=reason)
    assert [entry.outcome for entry in node.journal().entries] == [Outcome.TAKING]
    copy = node.journal(is_copy=True)
    assert (copy.entries, copy.refused is not None and copy.refused.id) == ((), ID)
    assert copy.problem
    monkeypatch.setattr(executor, "write_journal", write_journal)
    run_once(node, id="")
    assert node.journal() == node.journal(is_copy=True)
    assert node.journal().entries == ()
    assert node.journal().refused == copy.refused


def test_removed_journal_does_not_forget_the_steps_of_this_boot(node: RepairNode) -> None:
    assert work(node).outcome is Outcome.DONE
    (node.state_dir / JOURNAL_FILE).unlink()
    assert work(node).outcome is Outcome.DONE
    assert node.journal().first_boot == BOOT_ID
    assert node.resets == 1


@pytest.mark.parametrize("field", ["node", "machine"])
def test_journal_of_another_node_is_kept_and_no_step_is_taken(node: RepairNode, field: str) -> None:
    other = node.made_journal(**{field: "other"})
    write_journal(other, str(node.state_dir))
    run_once(node)
    assert node.journal() == other
    copy = node.journal(is_copy=True)
    assert (copy.first_boot, copy.entries, copy.refused is not None and copy.refused.id) == ("", (), ID)
    assert copy.problem
    assert unchanged(node)


@pytest.mark.parametrize("has_journal", [True, False])
def test_machine_without_identity_takes_no_step(node: RepairNode, has_journal: bool) -> None:
    (node.root / "etc/machine-id").unlink()
    if not has_journal:
        (node.state_dir / JOURNAL_FILE).unlink()
    run_once(node)
    assert node.journal(is_copy=True).problem
    assert (node.state_dir / JOURNAL_FILE).exists() is has_journal
    assert unchanged(node)


def test_machine_is_identified_by_its_product_uuid(node: RepairNode) -> None:
    path = node.root / "sys/class/dmi/id/product_uuid"
    path.parent.mkdir(parents=True)
    path.write_text("00000000-0000-0000-0000-000000000000\n")
    without = journal_file.machine_identity(str(node.root))
    path.write_text("4C4C4544-0042-3010-8054-B9C04F4B3232\n")
    found = journal_file.machine_identity(str(node.root))
    assert without.startswith("machine-id ")
    assert found == "dmi 4c4c4544-0042-3010-8054-b9c04f4b3232"


# --- persistence mode


def test_persistence_mode_is_not_touched_if_the_state_has_changed(node: RepairNode) -> None:
    node.write(PERSISTENCED, "inactive\n")
    node.write("smi.persistence", "Enabled\n")
    asked = 0

    def is_replaced() -> bool:
        nonlocal asked
        asked += 1
        return asked > 1

    assert work(node, is_replaced).outcome is Outcome.REFUSED
    assert "-pm 0" not in node.read("smi.log")
    assert node.resets == 0


def test_persistence_mode_is_switched_on_after_a_kill(node: RepairNode) -> None:
    node.write(PERSISTENCED, "inactive\n")
    node.write("smi.persistence", "Enabled\n")
    node.write("smi.mode", "kills_parent\n")
    put_request(node)
    killed_at(node, 0)
    assert node.read("smi.persistence") == "Disabled\n"
    serve(node)
    assert node.read("smi.persistence") == "Enabled\n"
    assert node.journal().stopped is None


@pytest.mark.parametrize(("call", "outcome"), [("set_persistence", Outcome.REFUSED), ("_run", Outcome.FAILED)])
def test_error_of_nvidia_smi_is_recorded_with_its_text(
    node: RepairNode, monkeypatch: pytest.MonkeyPatch, call: str, outcome: Outcome
) -> None:
    take = reset_step.take_reset

    def take_with_full_disk(*arguments: Any) -> StepResult:
        with monkeypatch.context() as patch:
            patch.setattr(reset_step.Smi, call, fail)
            return take(*arguments)

    monkeypatch.setattr(reset_step, "take_reset", take_with_full_disk)
    node.write(DCGM, "inactive\n")
    if call == "set_persistence":
        node.write(PERSISTENCED, "inactive\n")
        node.write("smi.persistence", "Enabled\n")
    entry = work(node)
    assert entry.outcome is outcome
    assert "No space left" in entry.problem
    assert node.journal().stopped is None
