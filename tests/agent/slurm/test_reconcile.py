"""Tests of one reconciliation, with fake answers of Slurm's commands."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace
from slurm_text import ANY_BYTES, ANY_TEXT, NOW, WORDS, XID, columns, listpids, sinfo, squeue

from healthd.agent.slurm import fleet_limit
from healthd.agent.slurm.policy import IN_FLIGHT_SECONDS, UNKNOWN_CONTROLLER, Owner, Policy, describe, needs_no_query
from healthd.agent.slurm.reconcile import ReconcileReport, SaveRecord, reconcile
from healthd.common.model import (
    Clears,
    Condition,
    ConditionState,
    Decision,
    Drain,
    DrainRecord,
    EndedDrain,
    FleetCount,
    FleetHold,
    Health,
    Leave,
    Mode,
    PartitionCount,
    ResumedDrain,
    SentRequeue,
    Severity,
    UnsavedChange,
    Verdict,
)
from healthd.common.slurm import commands
from healthd.common.slurm.commands import (
    CLAIM_COLUMNS,
    FLEET_COLUMNS,
    JOB_COLUMNS,
    NODE_COLUMNS,
    REASON_COLUMNS,
    Command,
    CommandResult,
)
from healthd.common.slurm.output import parse_job, parse_listpids, parse_processes

ACT = Policy(mode=Mode.ACT, requeue_retry_seconds=90, admin_comment=False)
WITH_COMMENT = replace(ACT, admin_comment=True)
OWN_DRAIN = DrainRecord(reason=XID, confirmed_at=NOW - 60, boot_id="b1")
OWN_FIELDS: dict[str, Any] = {"drained_at": NOW, "own_hardware": True}  # recorded for a drain for own hardware
ENDED = EndedDrain(XID, XID, NOW - 60, NOW)
ENDED_HERE = replace(ENDED, controller=f"{NOW - 9e5:.0f} ctl1")
REPAIRED = Verdict(Health.HEALTHY, may_resume=True)


def cause(severity: Severity = Severity.CRITICAL) -> Condition:
    return Condition(
        check="gpu_xid",
        instance="",
        code="gpu_xid/79",
        subject="0000:1b:00.0",
        severity=severity,
        message="fell off the bus",
        clears=Clears.REBOOT,
        state=ConditionState.OPEN,
        first_seen=1.0,
        last_seen=2.0,
        count=1,
        boot_id="b1",
    )


CRITICAL = Verdict(Health.UNHEALTHY, causes=(cause(),), fault_time=NOW - 10)
DEGRADED = Verdict(Health.DEGRADED, causes=(cause(Severity.DEGRADED),))
SHARED = replace(DEGRADED, causes=(replace(cause(Severity.DEGRADED), shared_cause=True),))
DUE = FleetHold(since=NOW - 100, until=NOW - 1)
FREE_NODE, DRAINED_NODE = sinfo("idle"), sinfo("idle+drain", XID)


SUCCESS = CommandResult(0)
TIMED_OUT = CommandResult(None)


def failed(stderr: str) -> CommandResult:
    return CommandResult(1, b"", stderr + "\n")


CONNECT_FAILURE = failed("slurm_update error: Unable to contact slurm controller (connect failure)")
SOCKET_TIMEOUT = failed("slurm_update error: Socket timed out on send/recv operation")
NOT_ALLOWED = failed("slurm_update error: Invalid user id")


CONFIG = "Configuration data as of 2026-11-20T20:48:10\nBOOT_TIME               = {:.0f}\nX = y\n{}"
UP = "\nSlurmctld(primary) at {} is {}\nSlurmctld(backup) at ctl2 is UP\n"


def controller_started(time: float, primary: str = "", state: str = "UP") -> CommandResult:
    """Return `scontrol show config` of a slurmctld. `host` is the primary, which is UP or DOWN."""
    return CommandResult(0, CONFIG.format(time, UP.format(primary, state) if primary else "").encode())


LONG_AGO = NOW - 9e5
PRIMARY = controller_started(LONG_AGO, "ctl1")  # the default controller of a test
COUNTED = FleetCount(NOW, (PartitionCount("gpu", 1000, 0),))
UNSAVED = UnsavedChange(NOW, f"{LONG_AGO:.0f} ctl1")


@dataclass
class Result:
    """The result of one reconciliation. `steps` has the commands' argv and the saved records in order, without the
    queries about the fleet (`fleet_queries`) and without the readings right before a change (`rereads`)."""

    report: ReconcileReport
    steps: list[tuple[str, ...] | DrainRecord] = field(default_factory=list)
    fleet_queries: list[tuple[str, ...]] = field(default_factory=list)
    rereads: int = 0

    def sent(self) -> list[str]:
        return [" ".join(step) for step in self.steps if isinstance(step, tuple)]

    def changes(self) -> list[str]:
        return [line for line in self.sent() if line.startswith(("scontrol update", "scontrol requeue"))]


def run_reconcile(
    verdict: Verdict,
    answers: Sequence[CommandResult],
    record: DrainRecord | None = None,
    policy: Policy = ACT,
    boot_id: str = "b1",
    now: Callable[[], float] = lambda: NOW,
    fleet: Callable[[tuple[str, ...]], CommandResult] | None = None,
    changed_nodes: Sequence[CommandResult] = (),
    refusals: tuple[float, ...] = (),
    exact_reason: str = "fan",
    controller: CommandResult | None = None,
) -> Result:
    """Run a reconciliation and answer each command with the next of `answers`, which must all be used.

    `fleet` answers queries about the fleet; the default is 1000 nodes without a drain by healthd. `changed_nodes` are
    the readings before a change; the default is the unchanged node. `refusals` are the times at which the prolog
    refused jobs.
    """
    record = record or DrainRecord()
    generator = reconcile(verdict, record, policy, "n1", boot_id, now, refusals=lambda: refusals)
    remaining, steps, fleet_queries, later_nodes = list(answers), [], [], list(changed_nodes)
    answer: CommandResult | None = None
    last_node: CommandResult | None = None  # the last reading since the last change
    rereads = controller_queries = 0
    controller = controller or PRIMARY
    while True:
        try:
            step = generator.send(answer)
        except StopIteration as end:
            assert not [*remaining, *later_nodes], f"unused answers: {remaining}, {later_nodes}"
            return Result(end.value, steps, fleet_queries, rereads)
        if isinstance(step, SaveRecord):
            steps.append(step.record)
            answer = None
        else:
            assert isinstance(step, Command)
            assert step.deadline_seconds == policy.command_timeout_seconds
            if "-n" not in step.argv and (step.argv[0] == "sinfo" or step.argv[-1] == "partition"):
                fleet_queries.append(step.argv)
                answer = (fleet or fleet_answer)(step.argv)
                continue
            if step.argv == commands.config() and not (remaining and remaining[0].stdout.startswith(b"Configuration")):
                controller_queries += 1
                answer = controller
                continue
            if step.argv == commands.whole_reason("n1"):
                answer = CommandResult(0, columns(("1", exact_reason), REASON_COLUMNS))
                continue
            is_node = step.argv[0] == "sinfo"
            if is_node and last_node is not None:
                rereads += 1
                answer = last_node = later_nodes.pop(0) if later_nodes else last_node
                continue
            steps.append(step.argv)
            answer = remaining.pop(0)
            last_node = answer if is_node else None if step.changes else last_node


def fleet_answer(argv: tuple[str, ...], node_count: int = 1000, drained_count: int = 0) -> CommandResult:
    """Return Slurm's output for a partition of this size with this number of nodes drained by healthd."""
    if argv[-1] == "partition":
        return CommandResult(
            0, f"PartitionName=gpu Nodes=n[1-{node_count}] TotalNodes={node_count} SelectTypeParameters=NONE\n".encode()
        )
    rows = [("gpu", "idle", "Unknown", "none", f"{node_count - drained_count}")]
    rows += [("gpu", "idle+drain", f"{NOW - 60:.0f}", "healthd:", f"{drained_count}")] * bool(drained_count)
    return CommandResult(0, b"".join(columns(row, FLEET_COLUMNS) for row in rows))


# drain


def test_drain_is_recorded_sent_and_read_back() -> None:
    result = run_reconcile(DEGRADED, [sinfo("idle"), SUCCESS, sinfo("idle+drain", XID)])
    assert result.steps[1] == DrainRecord(
        pending_reason=XID, pending_since=NOW, awaits_count=True, unsaved_change=UNSAVED, **OWN_FIELDS
    )
    assert result.steps[2] == ("scontrol", "update", "NodeName=n1", "State=DRAIN", f"Reason={XID}")
    assert result.report.record == DrainRecord(
        reason=XID,
        confirmed_at=NOW,
        boot_id="b1",
        reason_time=NOW - 60,
        unsaved_change=UNSAVED,
        stored_count=COUNTED,
        **OWN_FIELDS,
    )
    assert result.report.settled
    assert result.report.owner is Owner.HEALTHD
    assert result.report.decision == Drain(XID, False)


@pytest.mark.parametrize(
    ("verdict", "decision", "jobs"),
    [
        (DEGRADED, Leave('drained by root: "fan"'), []),
        (CRITICAL, Drain("fan", True), [listpids()]),
    ],
)
def test_operator_drain_during_fleet_count_prevents_own_drain(
    verdict: Verdict, decision: Decision, jobs: list[CommandResult]
) -> None:
    result = run_reconcile(verdict, [sinfo("idle"), *jobs], changed_nodes=[sinfo("idle+drain", "fan")])
    assert (result.changes(), result.report.decision, result.report.owner) == ([], decision, Owner.OTHER)
    assert (result.report.record, result.report.settled) == (DrainRecord(**OWN_FIELDS), True)


def test_own_drain_that_is_back_after_fleet_count_is_not_sent_again() -> None:
    """slurmctld was restarted without healthd's drain, and then again with it."""
    answers = [sinfo("idle"), controller_started(NOW - 30), controller_started(NOW)]
    result = run_reconcile(DEGRADED, answers, OWN_DRAIN, changed_nodes=[sinfo("idle+drain", XID)])
    assert (result.changes(), result.report.owner, result.report.record.reason) == ([], Owner.HEALTHD, XID)


def test_operator_reason_after_own_drain_is_kept() -> None:
    result = run_reconcile(DEGRADED, [sinfo("idle"), SUCCESS, sinfo("idle+drain", "fan")])
    assert len(result.changes()) == 1
    assert result.report.decision == Leave('drained by root: "fan"')
    assert (result.report.record, result.report.settled) == (DrainRecord(**OWN_FIELDS), True)


def test_node_is_read_again_before_each_change() -> None:
    assert run_reconcile(DEGRADED, [sinfo("idle"), SUCCESS, sinfo("idle+drain", XID)]).rereads == 1
    assert run_reconcile(REPAIRED, [sinfo("idle+drain", XID), SUCCESS, sinfo("idle")], OWN_DRAIN).rereads == 1
    ended_record = DrainRecord(ended_drain=replace(ENDED, ended_at=NOW - 60))
    answers = [sinfo("unknown+drain", XID), controller_started(NOW - 50)]
    assert run_reconcile(REPAIRED, [*answers, SUCCESS, sinfo("idle")], ended_record).rereads == 1
    overridden = run_reconcile(REPAIRED, answers, ended_record, changed_nodes=[sinfo("idle+drain", "fan")])
    assert (overridden.changes(), overridden.report.owner) == ([], Owner.OTHER)


def test_node_that_changes_at_each_reading_is_a_problem() -> None:
    changed_rows = [sinfo("idle+down", "Not responding" + " : reboot issued" * number) for number in range(3)]
    result = run_reconcile(DEGRADED, [sinfo("idle")], changed_nodes=changed_rows)
    assert result.changes() == []
    assert result.report.problem == "another user or tool changed the node each time healthd was about to change it"
    assert not result.report.settled


def test_drain_above_limit_is_left_to_operator_after_takeover() -> None:
    answers = [sinfo("idle"), SUCCESS, sinfo("idle+drain", XID)]
    operator_drain = sinfo("idle+drain", "fan")
    result = run_reconcile(
        SHARED,
        answers,
        DrainRecord(hold=DUE),
        fleet=fleet_with_drained(99, 101),
        changed_nodes=[FREE_NODE, operator_drain],
    )
    assert [line.split()[3] for line in result.changes()] == ["State=DRAIN"]
    assert (result.report.owner, result.report.record.overriding_reason, result.report.record.hold) == (
        Owner.OTHER,
        "fan",
        None,
    )


def test_operator_reason_left_by_resume_is_drained_again() -> None:
    """Since 24.11 a resume keeps the reason. An operator set this one between healthd's reading and its command."""
    answers = [sinfo("idle+drain", XID), SUCCESS, sinfo("idle", "fan", NOW), SUCCESS, sinfo("idle+drain", "fan", NOW)]
    result = run_reconcile(REPAIRED, answers, OWN_DRAIN)
    assert result.changes()[1] == "scontrol update NodeName=n1 State=DRAIN Reason=fan"
    assert (result.report.owner, result.report.decision) == (Owner.OTHER, Leave('drained by root: "fan"'))
    assert result.report.record.reason == ""
    own_reason = run_reconcile(
        REPAIRED, [sinfo("idle+drain", XID), SUCCESS, sinfo("idle", f"{XID} : Not responding")], OWN_DRAIN
    )
    assert len(own_reason.changes()) == 1


@pytest.mark.parametrize(
    "reason",
    [
        "L\u00fcfter tot",
        "\u0417\u0430\u043c\u0435\u043d\u0430 GPU",
        "two\nlines",
        "a  b\x85c",
        "raw \udcff\udc80",
        "x" * 5000,
    ],
)
def test_resume_writes_back_operator_reason_byte_for_byte(reason: str) -> None:
    answers = [sinfo("idle+drain", XID), SUCCESS, sinfo("idle", reason, NOW), SUCCESS, sinfo("idle+drain", reason, NOW)]
    result = run_reconcile(REPAIRED, answers, OWN_DRAIN, exact_reason=reason)
    assert result.changes()[1] == f"scontrol update NodeName=n1 State=DRAIN Reason={reason}"
    assert result.report.owner is Owner.OTHER


def test_operator_drain_right_after_resume_is_foreign() -> None:
    result = run_reconcile(REPAIRED, [sinfo("idle+drain", XID), SUCCESS, sinfo("idle+drain", "fan", NOW)], OWN_DRAIN)
    assert (result.report.owner, result.report.record.overriding_reason, result.report.record.resume_sent_at) == (
        Owner.OTHER,
        "fan",
        0,
    )
    after_resume = run_reconcile(DEGRADED, [sinfo("idle"), PRIMARY], result.report.record)
    assert after_resume.report.acknowledged, "their resume counts, too"


@pytest.mark.parametrize("answer", [SUCCESS, SOCKET_TIMEOUT])
def test_allocation_of_drained_node_is_computed_again_before_it_is_read(answer: CommandResult) -> None:
    answers = [answer, sinfo("idle+drain", XID)]
    result = run_reconcile(DEGRADED, answers, OWN_DRAIN, policy=Policy(Mode.ACT, was_allocated=True))
    assert (result.report.problem, result.report.node.flags) == ("", {"IDLE", "DRAIN"})


def test_existing_drain_is_not_sent_again() -> None:
    result = run_reconcile(DEGRADED, [sinfo("allocated+drain", XID)], OWN_DRAIN)
    assert result.changes() == []
    assert result.report.settled


@pytest.mark.parametrize("state", ["down+drain", "idle+drain+not_responding", "idle+drain+reboot_requested"])
def test_drain_on_unsteady_node_is_not_settled(state: str) -> None:
    assert not run_reconcile(DEGRADED, [sinfo(state, XID)], OWN_DRAIN).report.settled


def test_healthy_node_that_is_down_is_settled() -> None:
    assert run_reconcile(REPAIRED, [sinfo("down+not_responding", "Not responding")]).report.settled


@pytest.mark.parametrize(
    ("answer", "problem"),
    [
        (TIMED_OUT, "scontrol update did not end in time; slurmctld may still execute it"),
        (
            CONNECT_FAILURE,
            "scontrol update: slurm_update error: Unable to contact slurm controller (connect failure)",
        ),
        (SOCKET_TIMEOUT, "scontrol update: slurm_update error: Socket timed out on send/recv operation"),
        (
            NOT_ALLOWED,
            "scontrol update: Invalid user id: only root, SlurmUser or a Slurm administrator may change a node",
        ),
        (CommandResult(1), "scontrol update: ended with status 1"),
        (CommandResult(127, stderr="No such file: scontrol"), "scontrol update: No such file: scontrol"),
    ],
)
def test_failed_drain_is_a_problem_and_stays_own(answer: CommandResult, problem: str) -> None:
    result = run_reconcile(CRITICAL, [sinfo("idle"), answer])
    assert result.report.problem == problem
    assert not result.report.settled
    assert result.report.record == DrainRecord(
        pending_reason=XID, pending_since=NOW, awaits_count=True, unsaved_change=UNSAVED, **OWN_FIELDS
    )
    second = run_reconcile(CRITICAL, [sinfo("idle+drain", XID), listpids()], result.report.record)
    assert second.changes() == []
    assert second.report.owner is Owner.HEALTHD


def test_nothing_is_requeued_if_node_is_not_read_as_drained() -> None:
    result = run_reconcile(CRITICAL, [sinfo("mixed"), SUCCESS, sinfo("mixed")])
    assert result.report.problem.endswith("Slurm does not show the node drained")
    assert result.report.record.pending_reason == XID


@pytest.mark.parametrize(
    ("answer", "problem"),
    [
        (TIMED_OUT, "sinfo did not end in time"),
        (
            failed("slurm_load_partitions: Unable to contact slurm controller (connect failure)"),
            "sinfo: slurm_load_partitions: Unable to contact slurm controller (connect failure)",
        ),
        (CommandResult(0, b""), 'Slurm has no node "n1" in any partition'),
        (CommandResult(0, b"\0garbage 42\n"), 'sinfo printed no readable row for the node: "\0garbage 42"'),
        (CommandResult(127, stderr="No such file: sinfo"), "sinfo: No such file: sinfo"),
    ],
)
def test_unreadable_node_is_left_alone(answer: CommandResult, problem: str) -> None:
    result = run_reconcile(CRITICAL, [answer], OWN_DRAIN)
    assert result.report.problem == problem
    assert result.report.record == OWN_DRAIN
    assert result.report.node is None
    assert isinstance(result.report.decision, Leave)
    assert result.report.decision.why == "the node's state in Slurm is unknown"
    assert result.report.decision.would.startswith('drain with "healthd: '), "the desired action is still reported"
    assert not result.report.settled


def test_mode_observe_and_pause_change_nothing() -> None:
    for policy in (Policy(), Policy(mode=Mode.ACT, paused_until=NOW + 1)):
        assert run_reconcile(CRITICAL, [sinfo("idle")], policy=policy).changes() == []
        assert run_reconcile(REPAIRED, [sinfo("idle+drain", XID)], OWN_DRAIN, policy).changes() == []


# resume


def test_own_drain_is_lifted_and_read_back() -> None:
    result = run_reconcile(REPAIRED, [sinfo("idle+drain", XID), SUCCESS, sinfo("idle+not_responding")], OWN_DRAIN)
    assert result.changes() == ["scontrol update NodeName=n1 State=UNDRAIN"]
    assert result.report.record == DrainRecord(ended_drain=ENDED_HERE, resumed_drains=(ResumedDrain(NOW, NOW, False),))
    assert result.report.settled
    assert result.report.next_read_at == NOW + 60
    assert not result.report.acknowledged


def test_ended_drain_is_read_once_more() -> None:
    ended_record = DrainRecord(ended_drain=replace(ENDED, ended_at=NOW - 60))
    result = run_reconcile(REPAIRED, [sinfo("idle")], ended_record)
    assert result.changes() == []
    assert (result.report.settled, result.report.next_read_at) == (True, 0.0)
    earlier = run_reconcile(REPAIRED, [sinfo("idle")], replace(ended_record, ended_drain=ENDED))
    assert earlier.report.next_read_at == NOW + 60


def test_drain_restored_by_slurmctld_is_lifted_again() -> None:
    ended_record = DrainRecord(ended_drain=replace(ENDED, ended_at=NOW - 60))
    answers = [sinfo("unknown+drain", XID), controller_started(NOW - 50), SUCCESS, sinfo("idle")]
    result = run_reconcile(REPAIRED, answers, ended_record)
    assert result.changes() == ["scontrol update NodeName=n1 State=UNDRAIN"]
    assert result.report.next_read_at == NOW + 60
    still_faulty = run_reconcile(DEGRADED, answers[:2], ended_record)
    assert (still_faulty.changes(), still_faulty.report.owner) == ([], Owner.HEALTHD)


def test_earlier_drain_restored_by_slurmctld_is_lifted_again() -> None:
    first_drain = EndedDrain(XID, XID, NOW - 300, NOW - 200)
    ended_record = DrainRecord(
        ended_drain=replace(ENDED, reason_time=NOW - 60, ended_at=NOW - 40), earlier_drains=(first_drain,)
    )
    restored_node = sinfo("unknown+drain", XID, NOW - 300)
    result = run_reconcile(
        REPAIRED, [restored_node, controller_started(NOW - 30), SUCCESS, sinfo("idle")], ended_record
    )
    assert result.changes() == ["scontrol update NodeName=n1 State=UNDRAIN"]
    assert result.report.adopted is None
    without_controller = run_reconcile(REPAIRED, [restored_node], ended_record, controller=CONNECT_FAILURE)
    assert (without_controller.changes(), without_controller.report.record) == ([], ended_record)
    other_drain = DrainRecord(
        reason=XID.replace("79", "48"), confirmed_at=NOW - 60, boot_id="b1", earlier_drains=(first_drain,)
    )
    own_again = run_reconcile(DEGRADED, [restored_node, controller_started(NOW - 30)], other_drain)
    assert (own_again.changes(), own_again.report.owner, own_again.report.record.reason) == ([], Owner.HEALTHD, XID)


def test_old_reason_without_slurmctld_restart_is_foreign_drain() -> None:
    ended_record = DrainRecord(ended_drain=replace(ENDED, ended_at=NOW - 30))
    result = run_reconcile(REPAIRED, [sinfo("idle+drain+invalid_reg", XID), PRIMARY], ended_record)
    assert result.changes() == []
    assert result.report.owner is Owner.OTHER
    assert result.report.adopted is None
    without_controller = run_reconcile(REPAIRED, [sinfo("idle+drain", XID)], ended_record, controller=CONNECT_FAILURE)
    assert without_controller.report.problem
    assert (without_controller.report.record, without_controller.report.settled) == (ended_record, False), (
        "the controller is queried again"
    )


def test_resume_without_effect_is_a_problem() -> None:
    result = run_reconcile(REPAIRED, [sinfo("idle+drain", XID), SUCCESS, sinfo("idle+drain", XID)], OWN_DRAIN)
    assert "still shows the node drained" in result.report.problem


def test_failed_resume_keeps_own_drain() -> None:
    result = run_reconcile(REPAIRED, [sinfo("idle+drain", XID), SOCKET_TIMEOUT], OWN_DRAIN)
    assert result.report.record.reason == XID
    later_result = run_reconcile(REPAIRED, [sinfo("idle")], result.report.record)
    assert not later_result.report.acknowledged
    assert later_result.report.record.reason == ""


@pytest.mark.parametrize("answer", [NOT_ALLOWED, CONNECT_FAILURE, CommandResult(127, stderr="no scontrol")])
def test_refused_resume_is_not_in_flight(answer: CommandResult) -> None:
    result = run_reconcile(REPAIRED, [sinfo("idle+drain", XID), answer], OWN_DRAIN)
    assert (result.report.record.reason, result.report.record.resume_sent_at) == (XID, 0.0)


def test_operator_resume_soon_after_own_resume_is_acknowledged() -> None:
    resumed_record = run_reconcile(
        REPAIRED, [sinfo("idle+drain", XID), SUCCESS, sinfo("idle")], OWN_DRAIN
    ).report.record
    second_drain = run_reconcile(
        CRITICAL, [sinfo("idle"), SUCCESS, sinfo("idle+drain", XID), listpids()], resumed_record, now=lambda: NOW + 5
    )
    assert second_drain.report.owner is Owner.HEALTHD
    operator_resume = run_reconcile(
        CRITICAL, [sinfo("idle"), PRIMARY], second_drain.report.record, now=lambda: NOW + 30
    )
    assert (operator_resume.report.acknowledged, operator_resume.changes()) == (True, [])


@pytest.mark.parametrize("answer", [TIMED_OUT, SOCKET_TIMEOUT])
def test_late_own_resume_is_own_and_next_is_operator_resume(answer: CommandResult) -> None:
    sent_record = run_reconcile(REPAIRED, [sinfo("idle+drain", XID), answer], OWN_DRAIN).report.record
    late_resume = run_reconcile(
        DEGRADED, [sinfo("idle"), SUCCESS, sinfo("idle+drain", XID)], sent_record, now=lambda: NOW + 5
    )
    assert (late_resume.report.acknowledged, late_resume.report.owner) == (False, Owner.HEALTHD)
    operator_resume = run_reconcile(DEGRADED, [sinfo("idle"), PRIMARY], late_resume.report.record, now=lambda: NOW + 30)
    assert operator_resume.report.acknowledged


@pytest.mark.parametrize("answer", [TIMED_OUT, SOCKET_TIMEOUT, None], ids=["time-out", "no answer", "killed"])
def test_own_resume_with_lost_answer_is_counted(answer: CommandResult | None) -> None:
    """Flapping is limited also if slurmctld answers slowly."""
    drained_record = replace(OWN_DRAIN, drained_at=NOW - 300, own_hardware=True)
    if answer is None:  # killed after the record was saved, when scontrol had the command
        sent_record = replace(drained_record, resume_sent_at=NOW)
    else:
        sent_record = run_reconcile(REPAIRED, [sinfo("idle+drain", XID), answer], drained_record).report.record
        assert sent_record.resumed_drains == ()
    late_result = run_reconcile(REPAIRED, [sinfo("idle")], sent_record, now=lambda: NOW + 20)
    assert late_result.report.record.resumed_drains == (ResumedDrain(NOW - 300, NOW + 20, True),)
    lost_drain = run_reconcile(REPAIRED, [sinfo("idle"), controller_started(NOW - 30)], drained_record)
    assert lost_drain.report.record.resumed_drains == (), "slurmctld lost the drain, so it was not resumed"


@pytest.mark.parametrize("next_node", [sinfo("idle+drain", "fan"), sinfo("idle", "fan")], ids=["drained", "24.11"])
def test_own_resume_is_counted_if_operator_drains_at_once(next_node: CommandResult) -> None:
    drained_record = replace(OWN_DRAIN, drained_at=NOW - 300, own_hardware=True)
    drain_answers = [SUCCESS, sinfo("idle+drain", "fan")] if next_node.stdout == sinfo("idle", "fan").stdout else []
    result = run_reconcile(REPAIRED, [sinfo("idle+drain", XID), SUCCESS, next_node, *drain_answers], drained_record)
    assert result.report.owner is Owner.OTHER
    assert result.report.record.resumed_drains == (ResumedDrain(NOW - 300, NOW, True),)


# drains after a refusal by healthd's prolog


def prolog_error(since: float = NOW - 2) -> CommandResult:
    return sinfo("idle+drain", "Prolog error", since)


NOT_CLEAN = Verdict(Health.UNKNOWN, unknown=("site timed out",))


@pytest.mark.parametrize(
    "record", [DrainRecord(), replace(OWN_DRAIN, reason_time=NOW - 60)], ids=["no drain", "own drain was resumed"]
)
def test_node_drained_by_own_prolog_is_resumed_once_clean(record: DrainRecord) -> None:
    answers = [prolog_error(NOW - 9), *([PRIMARY] if record.reason else [])]
    first = run_reconcile(NOT_CLEAN, answers, record, refusals=(NOW - 10,)).report
    assert first.acknowledged is bool(record.reason)
    waiting = run_reconcile(
        NOT_CLEAN, [prolog_error(NOW - 9)], first.record, now=lambda: NOW + 20, refusals=(NOW - 10,)
    )
    assert (waiting.changes(), waiting.report.owner) == ([], Owner.NONE)
    assert "healthd's prolog refused a job" in describe(waiting.report.decision)
    assert not needs_no_query(REPAIRED, waiting.report.record)
    kept_record = waiting.report.record
    resumed = run_reconcile(
        REPAIRED, [prolog_error(NOW - 9), SUCCESS, sinfo("idle")], kept_record, now=lambda: NOW + 200
    )
    assert resumed.changes() == ["scontrol update NodeName=n1 State=UNDRAIN"], "also without the prolog's file"
    assert needs_no_query(REPAIRED, replace(resumed.report.record, ended_drain=None))


def test_node_drained_by_own_prolog_is_read_until_steady() -> None:
    booting_node = sinfo("idle+drain+not_responding", "Prolog error", NOW - 2)
    assert not run_reconcile(NOT_CLEAN, [booting_node], refusals=(NOW - 3,)).report.settled
    assert run_reconcile(NOT_CLEAN, [prolog_error()], refusals=(NOW - 3,)).report.settled


def test_error_from_other_prolog_after_own_resume_is_left() -> None:
    """healthd's prolog refused a job 50 s ago, and the drain for it was lifted 25 s ago."""
    ended_record = DrainRecord(ended_drain=replace(ENDED, ended_at=NOW - 25, is_saved=True))
    result = run_reconcile(REPAIRED, [prolog_error(NOW)], ended_record, refusals=(NOW - 50,))
    assert (result.changes(), result.report.owner) == ([], Owner.OTHER)


# lost drains


def test_drain_lost_by_restarted_slurmctld_is_set_again() -> None:
    answers = [sinfo("idle"), controller_started(NOW - 30), SUCCESS, sinfo("idle+drain", XID)]
    result = run_reconcile(DEGRADED, answers, OWN_DRAIN)
    assert result.report.owner is Owner.HEALTHD
    assert not result.report.acknowledged


def test_drain_lost_by_reboot_is_set_again_without_query() -> None:
    result = run_reconcile(DEGRADED, [sinfo("idle"), SUCCESS, sinfo("idle+drain", XID)], OWN_DRAIN, boot_id="b2")
    assert result.report.record == DrainRecord(
        reason=XID,
        confirmed_at=NOW,
        boot_id="b2",
        reason_time=NOW - 60,
        unsaved_change=UNSAVED,
        stored_count=COUNTED,
        **OWN_FIELDS,
    )


def test_drain_lifted_by_operator_is_acknowledged() -> None:
    result = run_reconcile(CRITICAL, [sinfo("mixed"), PRIMARY], OWN_DRAIN)
    assert result.changes() == []
    assert result.report.acknowledged
    assert result.report.acknowledged_before == OWN_DRAIN.confirmed_at
    assert result.report.record == DrainRecord(ended_drain=replace(ENDED, reason_time=0.0))
    assert not result.report.settled


@pytest.mark.parametrize("answer", [TIMED_OUT, CONNECT_FAILURE, CommandResult(0, b"nothing")])
def test_unknown_controller_leaves_lost_drain_undecided(answer: CommandResult) -> None:
    result = run_reconcile(CRITICAL, [sinfo("idle")], OWN_DRAIN, controller=answer)
    assert result.report.problem
    assert result.report.record == OWN_DRAIN
    assert result.changes() == []


BACKUP = controller_started(LONG_AGO + 5, "ctl1", "DOWN")  # started days ago and has taken over
DRAINED_NOW = replace(OWN_DRAIN, confirmed_at=NOW - 3, unsaved_change=UnsavedChange(NOW - 3, UNSAVED.controller))


@pytest.mark.parametrize(
    "backup", [BACKUP, controller_started(LONG_AGO, "ctl1", "DOWN")], ids=["another start", "same second"]
)
def test_drain_unknown_to_backup_slurmctld_is_set_again(backup: CommandResult) -> None:
    result = run_reconcile(DEGRADED, [sinfo("idle"), backup, SUCCESS, sinfo("idle+drain", XID)], DRAINED_NOW)
    assert (result.report.owner, result.report.acknowledged) == (Owner.HEALTHD, False)
    assert len(result.changes()) == 1


def test_drain_lost_under_same_slurmctld_was_resumed_by_operator() -> None:
    assert run_reconcile(DEGRADED, [sinfo("idle"), PRIMARY], DRAINED_NOW).report.acknowledged


def test_operator_resume_after_failover_is_acknowledged_once_saved() -> None:
    """The backup took over long after the drain was saved. Then an operator resumed the node."""
    saved_record = run_reconcile(DEGRADED, [sinfo("idle+drain", XID)], DRAINED_NOW, now=lambda: NOW + 20).report.record
    assert saved_record.unsaved_change is None
    assert run_reconcile(DEGRADED, [sinfo("idle"), BACKUP], saved_record, now=lambda: NOW + 300).report.acknowledged


def test_drain_is_read_again_until_saved() -> None:
    first_report = run_reconcile(DEGRADED, [sinfo("idle"), SUCCESS, sinfo("idle+drain", XID)]).report
    assert (first_report.settled, first_report.next_read_at) == (True, NOW + 15)
    early_report = run_reconcile(DEGRADED, [sinfo("idle+drain", XID)], first_report.record, now=lambda: NOW + 5).report
    assert (early_report.settled, early_report.next_read_at, early_report.record.unsaved_change) == (
        True,
        NOW + 15,
        UNSAVED,
    )
    late_report = run_reconcile(DEGRADED, [sinfo("idle+drain", XID)], early_report.record, now=lambda: NOW + 15).report
    assert (late_report.settled, late_report.next_read_at, late_report.record.unsaved_change) == (True, 0.0, None)


def test_unreadable_controller_does_not_delay_drain() -> None:
    result = run_reconcile(DEGRADED, [sinfo("idle"), SUCCESS, sinfo("idle+drain", XID)], controller=TIMED_OUT)
    assert result.report.owner is Owner.HEALTHD
    assert result.report.record.unsaved_change == UnsavedChange(NOW, UNKNOWN_CONTROLLER)


def test_unsaved_drain_from_unknown_controller_is_set_again() -> None:
    drained_record = run_reconcile(DEGRADED, [FREE_NODE, SUCCESS, DRAINED_NODE], controller=TIMED_OUT).report.record
    result = run_reconcile(DEGRADED, [FREE_NODE, BACKUP, SUCCESS, DRAINED_NODE], drained_record, now=lambda: NOW + 3)
    assert (result.report.owner, result.report.acknowledged, len(result.changes())) == (Owner.HEALTHD, False, 1)
    assert result.report.record.unsaved_change == UnsavedChange(NOW + 3, f"{LONG_AGO + 5:.0f} ctl2")


def test_drain_never_read_as_saved_is_set_again() -> None:
    """slurmctld was unreachable for an hour."""
    drained_record = run_reconcile(DEGRADED, [FREE_NODE, SUCCESS, DRAINED_NODE], controller=TIMED_OUT).report.record
    result = run_reconcile(DEGRADED, [FREE_NODE, BACKUP, SUCCESS, DRAINED_NODE], drained_record, now=lambda: NOW + 3600)
    assert (result.report.owner, result.report.acknowledged) == (Owner.HEALTHD, False)


def test_saved_drain_from_unknown_controller_is_operator_resume() -> None:
    drained_record = run_reconcile(DEGRADED, [FREE_NODE, SUCCESS, DRAINED_NODE], controller=TIMED_OUT).report.record
    saved_record = run_reconcile(DEGRADED, [DRAINED_NODE], drained_record, now=lambda: NOW + 15).report.record
    result = run_reconcile(DEGRADED, [FREE_NODE, PRIMARY], saved_record, now=lambda: NOW + 20)
    assert (result.report.acknowledged, result.changes()) == (True, [])


def test_second_operator_resume_after_unknown_controller_is_kept() -> None:
    drained_record = run_reconcile(DEGRADED, [FREE_NODE, SUCCESS, DRAINED_NODE], controller=TIMED_OUT).report.record
    restored_record = run_reconcile(
        DEGRADED, [FREE_NODE, PRIMARY, SUCCESS, DRAINED_NODE], drained_record, now=lambda: NOW + 3
    ).report.record
    assert run_reconcile(DEGRADED, [FREE_NODE, PRIMARY], restored_record, now=lambda: NOW + 6).report.acknowledged


def test_drain_back_after_resume_from_unknown_controller_is_lifted() -> None:
    ended_record = run_reconcile(
        REPAIRED, [DRAINED_NODE, SUCCESS, FREE_NODE], OWN_DRAIN, controller=TIMED_OUT
    ).report.record
    assert ended_record.ended_drain is not None
    assert ended_record.ended_drain.controller == UNKNOWN_CONTROLLER
    result = run_reconcile(REPAIRED, [DRAINED_NODE, BACKUP, SUCCESS, FREE_NODE], ended_record, now=lambda: NOW + 20)
    assert (result.report.resumed, result.report.acknowledged) == (True, False)
    saved_record = run_reconcile(REPAIRED, [FREE_NODE], ended_record, now=lambda: NOW + 61).report.record
    later_result = run_reconcile(REPAIRED, [DRAINED_NODE], saved_record, now=lambda: NOW + 300)
    assert (later_result.changes(), later_result.report.owner) == ([], Owner.OTHER), (
        "a drain by Slurm itself with healthd's reason"
    )


def test_drain_restored_by_backup_slurmctld_is_lifted_again() -> None:
    ended_record = run_reconcile(REPAIRED, [sinfo("idle+drain", XID), SUCCESS, sinfo("idle")], OWN_DRAIN).report.record
    answers = [sinfo("unknown+drain", XID), BACKUP, SUCCESS, sinfo("idle")]
    result = run_reconcile(REPAIRED, answers, ended_record, now=lambda: NOW + 20)
    assert result.changes() == ["scontrol update NodeName=n1 State=UNDRAIN"]
    assert (result.report.resumed, result.report.acknowledged) == (True, False)
    same_controller = run_reconcile(REPAIRED, [sinfo("idle+drain", XID), PRIMARY], ended_record, now=lambda: NOW + 20)
    assert (same_controller.changes(), same_controller.report.owner) == ([], Owner.OTHER), (
        "under the same slurmctld it is a foreign drain"
    )


INVALID_STATE = failed("slurm_update error: Invalid node state specified")


def test_invalid_state_error_from_effective_resume_is_ignored() -> None:
    result = run_reconcile(REPAIRED, [sinfo("unknown+drain", XID), INVALID_STATE, sinfo("idle")], OWN_DRAIN)
    assert (result.report.resumed, result.report.acknowledged, result.report.problem) == (True, False, "")
    refused_result = run_reconcile(
        REPAIRED, [sinfo("unknown+drain", XID), INVALID_STATE, sinfo("unknown+drain", XID)], OWN_DRAIN
    )
    assert (refused_result.report.resumed, refused_result.report.owner) == (False, Owner.HEALTHD)
    assert refused_result.report.problem == "scontrol update: slurm_update error: Invalid node state specified"


def test_unrecorded_drain_in_own_format_is_adopted() -> None:
    result = run_reconcile(DEGRADED, [sinfo("idle+drain", "healthd: mount/missing /data: not mounted")])
    adopted = result.report.adopted
    assert adopted is not None
    assert (adopted.code, adopted.subject) == ("mount/missing", "/data")
    assert result.report.owner is Owner.UNRECORDED_HEALTHD
    assert result.changes() == []


# requeue


DRAINED_WITH_JOBS = sinfo("mixed+drain", XID)


def test_requeue_is_recorded_before_sent() -> None:
    result = run_reconcile(
        CRITICAL,
        [DRAINED_WITH_JOBS, listpids("12"), squeue(), SUCCESS, squeue(state="COMPLETING", restarts=1)],
        OWN_DRAIN,
    )
    intent = result.steps[3]
    assert isinstance(intent, DrainRecord)
    assert intent.sent_requeues == (SentRequeue("12", 0, NOW),)
    assert result.steps[4] == ("scontrol", "requeue", "incomplete", "12")
    assert result.report.requeued == ("12",)
    assert result.report.settled


def test_jobs_on_operator_drained_node_are_requeued() -> None:
    answers = [
        sinfo("mixed+drain", "fan"),
        listpids("12"),
        squeue(),
        SUCCESS,
        squeue(state="PENDING", restarts=1),
    ]
    result = run_reconcile(CRITICAL, answers)
    assert result.changes() == ["scontrol requeue incomplete 12"]
    assert result.report.owner is Owner.OTHER


@pytest.mark.parametrize(
    ("job", "reason"),
    [
        (squeue(batch="0"), "started by srun or salloc: only batch jobs can be requeued"),
        (squeue(requeue="0"), "submitted with --no-requeue"),
        (squeue(start=NOW - 9), "started after the fault"),
    ],
)
def test_ineligible_running_job_is_named(job: CommandResult, reason: str) -> None:
    result = run_reconcile(CRITICAL, [DRAINED_WITH_JOBS, listpids("12"), job], OWN_DRAIN)
    assert result.changes() == []
    assert result.report.not_requeued == (("12", reason),)
    assert result.report.settled


@pytest.mark.parametrize(
    "job",
    [
        squeue(state="COMPLETING"),
        squeue(state="COMPLETED"),
        squeue(state="PENDING"),
        CommandResult(0, b""),
        failed("slurm_load_jobs error: Invalid job id specified"),
    ],
)
def test_job_that_does_not_run_is_not_requeued(job: CommandResult) -> None:
    result = run_reconcile(CRITICAL, [DRAINED_WITH_JOBS, listpids("12"), job], OWN_DRAIN)
    assert result.changes() == []
    assert result.report.not_requeued == ()


@pytest.mark.parametrize("flag", ["1", "2", "5", "65535"])
def test_batch_job_requeued_by_slurm_is_requeued_again(flag: str) -> None:
    """slurmctld increments BatchFlag when it requeues a job that was missing on its node."""
    job, job_after = squeue(batch=flag, restarts=1), squeue(batch=flag, restarts=2, state="PENDING")
    assert run_reconcile(
        CRITICAL, [DRAINED_WITH_JOBS, listpids("12"), job, SUCCESS, job_after], OWN_DRAIN
    ).report.requeued == ("12",)


@pytest.mark.parametrize("flag", ["0", "00", "", "x", "-1", "+1", "1.0", "1 1", "\u0663", "\u00b2", "9" * 20, "1e3"])
def test_invalid_batch_flag_is_no_batch_job(flag: str) -> None:
    job = parse_job(squeue(batch=flag).stdout, "12")
    assert job is not None
    assert job.batch == (flag == "9" * 20)


def test_requeue_names_array_task_and_het_job_leader() -> None:
    other_task = squeue("13", "12_1").stdout
    task = CommandResult(0, other_task + squeue("12", "12_2").stdout)
    result = run_reconcile(
        CRITICAL,
        [DRAINED_WITH_JOBS, listpids("12"), task, SUCCESS, squeue("12", "12_2", "PENDING", restarts=1)],
        OWN_DRAIN,
    )
    assert result.changes() == ["scontrol requeue incomplete 12_2"]
    answers = [
        DRAINED_WITH_JOBS,
        listpids("21"),
        squeue("21", "20+1"),
        SUCCESS,
        squeue("21", "20+1", "PENDING", restarts=1),
    ]
    assert run_reconcile(CRITICAL, answers, OWN_DRAIN).changes() == ["scontrol requeue incomplete 20"]


def test_requeue_in_flight_is_not_sent_again() -> None:
    sent_record = DrainRecord(XID, confirmed_at=NOW - 60, boot_id="b1", sent_requeues=(SentRequeue("12", 0, NOW - 89),))
    result = run_reconcile(CRITICAL, [DRAINED_WITH_JOBS, listpids("12"), squeue()], sent_record)
    assert result.changes() == []
    assert not result.report.settled


def test_ineffective_requeue_is_sent_again_after_retry_time() -> None:
    sent_record = DrainRecord(XID, confirmed_at=NOW - 60, boot_id="b1", sent_requeues=(SentRequeue("12", 0, NOW - 91),))
    result = run_reconcile(CRITICAL, [DRAINED_WITH_JOBS, listpids("12"), squeue(), SUCCESS, squeue()], sent_record)
    assert result.changes() == ["scontrol requeue incomplete 12"]
    assert result.report.record.sent_requeues == (SentRequeue("12", 0, NOW),)
    assert result.report.requeued == ()
    assert not result.report.settled


def test_requeued_job_is_requeued_again_after_later_fault() -> None:
    sent_record = DrainRecord(XID, confirmed_at=NOW - 60, boot_id="b1", sent_requeues=(SentRequeue("12", 0, NOW - 20),))
    answers = [DRAINED_WITH_JOBS, listpids("12"), squeue(restarts=1), SUCCESS, squeue(restarts=2, state="PENDING")]
    assert run_reconcile(CRITICAL, answers, sent_record).report.requeued == ("12",)


@pytest.mark.parametrize(
    ("answer", "is_kept"),
    [
        (TIMED_OUT, True),
        (failed("Socket timed out on send/recv operation for job 12"), True),
        (failed("Unexpected message received for job 12"), True),
        (failed("Unable to contact slurm controller (connect failure) for job 12"), False),
        (failed("scontrol: error: Munge encode failed: Failed to connect\nProtocol authentication error"), False),
        (CommandResult(127, stderr="No such file: scontrol"), False),
    ],
)
def test_failed_requeue_is_forgotten_only_if_never_received(answer: CommandResult, is_kept: bool) -> None:
    result = run_reconcile(CRITICAL, [DRAINED_WITH_JOBS, listpids("12", "13"), squeue(), answer], OWN_DRAIN)
    assert bool(result.report.record.sent_requeues) is is_kept
    assert result.report.problem.startswith("scontrol requeue")
    assert not result.report.settled


@pytest.mark.parametrize(
    ("answers", "problem"),
    [
        ([TIMED_OUT], "scontrol listpids did not end in time"),
        ([failed("JobId=Invalid does not exist on node n1.")], "scontrol listpids: JobId=Invalid does not exist"),
        ([CommandResult(0, b"\n what")], "scontrol listpids printed no table"),
        ([listpids("12"), TIMED_OUT], "squeue did not end in time"),
        ([listpids("12"), failed("slurm_load_jobs error: oh")], "squeue: slurm_load_jobs error: oh"),
        ([listpids("12"), CommandResult(0, b"12 x y")], "squeue printed an incomplete table"),
    ],
)
def test_unreadable_job_list_is_a_problem(answers: list[CommandResult], problem: str) -> None:
    result = run_reconcile(CRITICAL, [DRAINED_WITH_JOBS, *answers], OWN_DRAIN)
    assert result.report.problem.startswith(problem)
    assert result.changes() == []


def test_jobs_are_requeued_beside_dead_slurmstepd() -> None:
    """22.05 prints the jobs that it could read, and fails."""
    listpids_error = CommandResult(1, listpids("12").stdout, "Unable to connect to slurmstepd: Connection refused\n")
    result = run_reconcile(
        CRITICAL, [DRAINED_WITH_JOBS, listpids_error, squeue(), SUCCESS, squeue(restarts=1, state="PENDING")], OWN_DRAIN
    )
    assert result.report.requeued == ("12",)
    assert result.report.problem == "scontrol listpids: Unable to connect to slurmstepd: Connection refused"
    assert not result.report.settled


def test_parse_listpids_drops_truncated_job_id() -> None:
    truncated = listpids("12", "1399").stdout.partition(b"99")[0]
    assert parse_listpids(truncated.decode()) == ["12"]
    assert parse_processes(truncated.decode()) == {100: "12"}
    killed_listpids = CommandResult(None, truncated)
    assert run_reconcile(
        CRITICAL, [DRAINED_WITH_JOBS, killed_listpids, squeue(), SUCCESS, squeue(restarts=1)], OWN_DRAIN
    ).report.requeued == ("12",)


def test_job_with_too_many_restarts_is_held() -> None:
    answers = [DRAINED_WITH_JOBS, listpids("12"), squeue(restarts=5), SUCCESS, squeue(restarts=6, state="PENDING")]
    result = run_reconcile(CRITICAL, answers, OWN_DRAIN)
    assert result.changes() == ["scontrol requeuehold incomplete 12"]
    assert result.report.requeued == result.report.held_jobs == ("12",)
    answers_below_limit = [
        DRAINED_WITH_JOBS,
        listpids("12"),
        squeue(restarts=4),
        SUCCESS,
        squeue(restarts=5, state="PENDING"),
    ]
    assert run_reconcile(CRITICAL, answers_below_limit, OWN_DRAIN).report.held_jobs == ()


def test_refused_requeue_does_not_stop_other_requeues() -> None:
    refused_requeue = failed("Access/permission denied for job 12")
    answers = [
        DRAINED_WITH_JOBS,
        listpids("12", "13"),
        squeue(),
        refused_requeue,
        squeue("13"),
        SUCCESS,
        squeue("13", restarts=1),
    ]
    result = run_reconcile(CRITICAL, answers, OWN_DRAIN)
    assert result.report.requeued == ("13",)
    assert result.report.problem.startswith("scontrol requeue: Access/permission denied")
    assert [r.job for r in result.report.record.sent_requeues] == ["12", "13"], "so 12 is not retried in each round"
    assert not result.report.settled


def test_comment_is_set_on_hit_jobs_only() -> None:
    hit_job = squeue(requeue="0", comment="project x")
    answers = [DRAINED_WITH_JOBS, listpids("12", "13"), hit_job, SUCCESS, squeue("13", start=NOW - 9)]
    result = run_reconcile(CRITICAL, answers, OWN_DRAIN, WITH_COMMENT)
    comment = "healthd: node n1: gpu_xid/79 0000:1b:00.0: fell off the bus at 2026-11-20T20:51:30Z"
    assert result.changes() == [f"scontrol update JobId=12 AdminComment=project x; {comment}"]
    job_with_comment = squeue(requeue="0", comment=f"project x; {comment}")
    assert (
        run_reconcile(
            CRITICAL, [DRAINED_WITH_JOBS, listpids("12"), job_with_comment], OWN_DRAIN, WITH_COMMENT
        ).changes()
        == []
    )


def test_refused_comment_does_not_prevent_requeue() -> None:
    answers = [DRAINED_WITH_JOBS, listpids("12"), squeue(), NOT_ALLOWED, SUCCESS, squeue(state="PENDING", restarts=1)]
    result = run_reconcile(CRITICAL, answers, OWN_DRAIN, WITH_COMMENT)
    assert result.report.requeued == ("12",)
    assert result.report.problem == ""


@pytest.mark.parametrize("comment", ["x" * 2000, "x" * 1000, "\u00e9" * 600, "x" + "\u00e9" * 600, b"caf\xe9"])
def test_truncated_or_non_utf8_comment_is_left_alone(comment: str | bytes) -> None:
    result = run_reconcile(
        CRITICAL, [DRAINED_WITH_JOBS, listpids("12"), squeue(batch="0", comment=comment)], OWN_DRAIN, WITH_COMMENT
    )
    assert result.changes() == []


@pytest.mark.parametrize(
    "comment",
    ["two  blanks", '{"a":\t1}', "caf\u00e9", "two\nlines", "a\x0bb", "\u0417\u0430\u043c\u0435\u043d\u0430\u2028x"],
)
def test_existing_comment_is_kept_byte_for_byte(comment: str) -> None:
    result = run_reconcile(
        CRITICAL,
        [DRAINED_WITH_JOBS, listpids("12"), squeue(batch="0", comment=comment), SUCCESS],
        OWN_DRAIN,
        WITH_COMMENT,
    )
    (change,) = result.changes()
    assert change.startswith(f"scontrol update JobId=12 AdminComment={comment}; healthd: node n1: gpu_xid/79 ")


def test_old_sent_requeues_are_removed() -> None:
    old_record = DrainRecord(
        XID, confirmed_at=NOW - 60, boot_id="b1", sent_requeues=(SentRequeue("1", 0, NOW - 8 * 86400),)
    )
    result = run_reconcile(
        CRITICAL,
        [DRAINED_WITH_JOBS, listpids("12"), squeue(), SUCCESS, squeue(restarts=1, state="PENDING")],
        old_record,
    )
    assert [r.job for r in result.report.record.sent_requeues] == ["12"]


def test_job_started_at_fault_time_is_requeued() -> None:
    job = squeue(start=CRITICAL.fault_time)
    result = run_reconcile(
        CRITICAL, [DRAINED_WITH_JOBS, listpids("12"), job, SUCCESS, squeue(state="PENDING", restarts=1)], OWN_DRAIN
    )
    assert result.report.requeued == ("12",)


def answer_to(argv: tuple[str, ...], draw: Callable[[st.SearchStrategy[Any]], Any]) -> bytes:
    """Return possible output of a Slurm command, with some columns replaced, or any bytes."""

    def table_row(table_columns: tuple[tuple[str, int], ...], *values: str) -> bytes:
        return columns([draw(st.just(value) | st.just(value) | ANY_BYTES) for value in values], table_columns)

    start = f"{NOW - 100:.0f}"
    if argv[:2] == ("scontrol", "listpids"):
        output = f"PID JOBID\n{draw(WORDS)} 12 0\n7 {draw(WORDS)} 0\n".encode(errors="surrogatepass")
    elif argv[0] == "squeue":
        output = table_row(JOB_COLUMNS, argv[6], "12", "RUNNING", "1", start, "0", "1", "(null)")
    elif argv == commands.whole_reason("n1"):
        output = table_row(REASON_COLUMNS, "1", XID)
    elif argv[0] == "sinfo" and "-n" in argv:
        state = draw(st.sampled_from(["idle", "idle+drain"]))
        output = table_row(
            NODE_COLUMNS, "gpu", "1", state, start, "root(0)", XID, draw(st.sampled_from(["(null)", "gpu:8"]))
        )
    elif argv[0] == "sinfo":
        output = table_row(FLEET_COLUMNS, "gpu", "idle", "5", "x", "9")
    else:
        output = f"BOOT_TIME = {draw(st.just(start) | WORDS)}\nTotalNodes={draw(st.just('12') | WORDS)}\n"
        output = output.encode(errors="surrogatepass")
    return draw(st.sampled_from([output] * 6) | ANY_BYTES)


@given(
    st.data(),
    st.sampled_from(
        [CRITICAL, CRITICAL, DEGRADED, REPAIRED, replace(DEGRADED, causes=(replace(cause(), shared_cause=True),))]
    ),
    st.sampled_from(
        [
            DrainRecord(),
            OWN_DRAIN,
            DrainRecord(ended_drain=ENDED, earlier_drains=(replace(ENDED, reason_time=NOW - 100),)),
        ]
    ),
)
def test_reconcile_ends_with_any_slurm_output(data: st.DataObject, verdict: Verdict, record: DrainRecord) -> None:
    steps = reconcile(verdict, record, WITH_COMMENT, "n1", "b1", lambda: NOW)
    answer: CommandResult | None = None
    for _ in range(100):
        try:
            step = steps.send(answer)
        except StopIteration:
            return
        answer = None
        if isinstance(step, Command):
            assert not any("\0" in argument for argument in step.argv)
            assert [argument.encode("utf-8", "surrogateescape") for argument in step.argv]
            status = data.draw(st.sampled_from([0, 0, 0, 0, 1, None, 127]))
            answer = CommandResult(status, answer_to(step.argv, data.draw), data.draw(st.just("") | ANY_TEXT))
    raise AssertionError("the reconciliation does not end")


# fleet limit


def fleet_with_drained(*counts: int) -> Callable[[tuple[str, ...]], CommandResult]:
    """Return answers for 1000 nodes with this number drained by healthd at the first count, the second, and so on."""
    remaining = list(counts)
    return lambda argv: fleet_answer(argv, drained_count=remaining.pop(0) if argv[0] == "sinfo" else 0)


def unreadable_fleet(argv: tuple[str, ...]) -> CommandResult:
    return SOCKET_TIMEOUT


def test_shared_cause_waits_before_first_count() -> None:
    result = run_reconcile(SHARED, [FREE_NODE])
    assert [argv[0] for argv in result.fleet_queries] == ["scontrol"]
    hold = result.report.record.hold
    assert hold is not None
    assert NOW < hold.until <= NOW + 200
    assert (result.report.next_read_at, result.report.settled) == (hold.until, False)
    assert isinstance(result.report.decision, Leave)
    assert result.report.decision.would == f'drain with "{XID}"'
    second = run_reconcile(SHARED, [FREE_NODE], result.report.record)
    assert (second.fleet_queries, second.report.record.hold) == ([], hold), "also after a restart"


def test_shared_cause_drains_after_wait_and_second_count() -> None:
    result = run_reconcile(
        SHARED, [FREE_NODE, SUCCESS, DRAINED_NODE], DrainRecord(hold=DUE), fleet=fleet_with_drained(99, 100)
    )
    assert result.report.decision == Drain(XID, False)
    assert (result.report.record.hold, result.report.record.awaits_count, result.report.settled) == (None, False, True)
    assert [argv[0] for argv in result.fleet_queries] == ["sinfo", "sinfo"]


def test_limit_delays_drain_with_growing_waits() -> None:
    record, now, waits = DrainRecord(hold=DUE), NOW, []
    for attempts in range(1, 6):
        result = run_reconcile(SHARED, [FREE_NODE], record, now=lambda now=now: now, fleet=fleet_with_drained(100))
        record, hold = result.report.record, result.report.record.hold
        assert hold is not None
        assert (hold.times, hold.partition, hold.drained, hold.limit, hold.since) == (
            attempts,
            "gpu",
            100,
            100,
            DUE.since,
        )
        waits.append(hold.until - now)
        now = hold.until + 1
    assert waits[4] > 4 * waits[0]


def test_drain_above_limit_at_second_count_is_lifted() -> None:
    answers = [FREE_NODE, SUCCESS, DRAINED_NODE, SUCCESS, FREE_NODE]
    result = run_reconcile(SHARED, answers, DrainRecord(hold=DUE), fleet=fleet_with_drained(99, 101))
    assert [line.split()[3] for line in result.changes()] == ["State=DRAIN", "State=UNDRAIN"]
    assert (result.report.record.reason, result.report.record.awaits_count) == ("", False)
    assert result.report.record.hold is not None
    assert isinstance(result.report.decision, Leave)


def test_refused_drain_is_read_again_while_in_flight() -> None:
    refused_record = run_reconcile(CRITICAL, [sinfo("idle"), NOT_ALLOWED]).report.record
    early_result = run_reconcile(REPAIRED, [sinfo("idle")], refused_record, now=lambda: NOW + 1)
    assert not early_result.report.settled
    late_result = run_reconcile(
        REPAIRED, [sinfo("idle")], early_result.report.record, now=lambda: NOW + IN_FLIGHT_SECONDS + 1
    )
    assert (late_result.report.settled, late_result.report.next_read_at) == (True, 0.0)


def test_pending_second_count_is_made_after_restart() -> None:
    interrupted = DrainRecord(pending_reason=XID, pending_since=NOW - 5, awaits_count=True)
    kept_drain = run_reconcile(SHARED, [DRAINED_NODE], interrupted, fleet=fleet_with_drained(100))
    assert (kept_drain.report.record.awaits_count, kept_drain.changes()) == (False, [])
    lifted = run_reconcile(SHARED, [DRAINED_NODE, SUCCESS, FREE_NODE], interrupted, fleet=fleet_with_drained(101))
    assert lifted.changes() == ["scontrol update NodeName=n1 State=UNDRAIN"]


def test_counted_drain_is_not_lifted_by_limit() -> None:
    result = run_reconcile(SHARED, [DRAINED_NODE], OWN_DRAIN, fleet=fleet_with_drained(500))
    assert (result.fleet_queries, result.changes(), result.report.settled) == ([], [], True)


def test_lost_drain_is_set_again_without_new_wait() -> None:
    answers = [sinfo("idle"), controller_started(NOW - 30)]
    result = run_reconcile(SHARED, [*answers, SUCCESS, DRAINED_NODE], OWN_DRAIN, fleet=fleet_with_drained(99, 100))
    assert result.report.decision == Drain(XID, False)
    delayed = run_reconcile(SHARED, answers, OWN_DRAIN, fleet=fleet_with_drained(100))
    assert delayed.changes() == []
    assert delayed.report.record.hold is not None


def test_foreign_drain_needs_no_count() -> None:
    result = run_reconcile(SHARED, [sinfo("idle+drain", "mine")])
    assert (result.fleet_queries, result.changes()) == ([], [])


def test_shared_cause_waits_while_count_fails() -> None:
    result = run_reconcile(SHARED, [FREE_NODE], DrainRecord(hold=DUE), fleet=unreadable_fleet)
    assert (result.changes(), result.report.problem) == (
        [],
        "the nodes that healthd keeps drained cannot be counted: "
        "sinfo: slurm_update error: Socket timed out on send/recv operation",
    )
    assert result.report.record.hold == DUE
    assert (result.report.next_read_at, result.report.settled) == (0.0, False), "retried with the driver's backoff"


def test_own_hardware_fault_does_not_wait() -> None:
    for record in (DrainRecord(), DrainRecord(hold=FleetHold(NOW, NOW + 900))):
        result = run_reconcile(DEGRADED, [FREE_NODE, SUCCESS, DRAINED_NODE], record, fleet=fleet_with_drained(100, 101))
        assert (result.report.decision, result.report.settled) == (Drain(XID, False), True)


# the limit of an NVLink domain

IN_DOMAIN = replace(ACT, domain="1a2b3c4d")
DOMAIN_XID = f"{XID} (domain 1a2b3c4d)"


def domain_with_drained(*counts: int, newer: int = 0) -> Callable[[tuple[str, ...]], CommandResult]:
    """Answer counts of an idle partition, and successive counts of the domain. `newer` of its drains are newer than
    this node's drain."""
    remaining = iter(counts)

    def answer(argv: tuple[str, ...]) -> CommandResult:
        if argv != commands.claims():
            return fleet_answer(argv)
        number = next(remaining)
        rows = [
            (f"t{i}", "idle+drain", f"{NOW - 60 + (i < newer):.0f}", "healthd: a/b: c (domain 1a2b3c4d)")
            for i in range(number)
        ]
        rows.append(("other", "idle+drain", f"{NOW - 90:.0f}", "healthd: a/b: c (domain ffffffff)"))
        return CommandResult(0, b"".join(columns(row, CLAIM_COLUMNS) for row in rows))

    return answer


def test_drain_in_nvlink_domain_names_it_and_counts_its_drains() -> None:
    answers = [FREE_NODE, SUCCESS, sinfo("idle+drain", DOMAIN_XID)]
    result = run_reconcile(DEGRADED, answers, policy=IN_DOMAIN, fleet=domain_with_drained(1, 2))
    assert result.report.decision == Drain(DOMAIN_XID, False)
    assert result.fleet_queries == [commands.fleet(), commands.claims()] * 2
    assert result.report.record.stored_count == FleetCount(
        NOW, (PartitionCount("gpu", 1000, 0), PartitionCount("1a2b3c4d", 0, 2, is_domain=True))
    )


@pytest.mark.parametrize("verdict", [CRITICAL, DEGRADED, SHARED])
def test_drain_beyond_the_limit_of_the_domain_is_held(verdict: Verdict) -> None:
    record = DrainRecord(hold=DUE) if verdict is SHARED else DrainRecord()
    result = run_reconcile(verdict, [FREE_NODE], record, IN_DOMAIN, fleet=domain_with_drained(2))
    assert result.changes() == []
    hold = result.report.record.hold
    assert hold is not None
    assert (hold.domain, hold.drained, hold.limit) == ("1a2b3c4d", 2, 2)
    assert isinstance(result.report.decision, Leave)
    assert "NVLink domain 1a2b3c4d" in result.report.decision.why


def test_drain_is_lifted_if_other_nodes_of_the_domain_drained_at_the_same_moment() -> None:
    answers = [FREE_NODE, SUCCESS, sinfo("idle+drain", DOMAIN_XID), SUCCESS, FREE_NODE]
    result = run_reconcile(DEGRADED, answers, policy=IN_DOMAIN, fleet=domain_with_drained(1, 3))
    assert isinstance(result.report.decision, Leave)
    hold = result.report.record.hold
    assert hold is not None
    assert (hold.domain, hold.drained) == ("1a2b3c4d", 2)
    kept = run_reconcile(DEGRADED, answers[:3], policy=IN_DOMAIN, fleet=domain_with_drained(1, 3, newer=1))
    assert kept.report.decision == Drain(DOMAIN_XID, False), "a newer drain does not count"


def test_drain_in_nvlink_domain_waits_if_its_drains_cannot_be_counted() -> None:
    def unreadable(argv: tuple[str, ...]) -> CommandResult:
        return SOCKET_TIMEOUT if argv == commands.claims() else fleet_answer(argv)

    result = run_reconcile(DEGRADED, [FREE_NODE], policy=IN_DOMAIN, fleet=unreadable)
    assert result.changes() == []
    assert result.report.problem.startswith("the nodes that healthd keeps drained cannot be counted: ")
    recent = FleetCount(NOW - 9, (PartitionCount("gpu", 1000, 0), PartitionCount("1a2b3c4d", 0, 2, is_domain=True)))
    held = run_reconcile(DEGRADED, [FREE_NODE], DrainRecord(stored_count=recent), IN_DOMAIN, fleet=unreadable)
    assert held.report.record.hold is not None
    assert held.report.record.hold.domain == "1a2b3c4d"


# failed fleet counts


def is_withheld(verdict: Verdict, record: DrainRecord, now: float = NOW) -> bool:
    return fleet_limit.is_withheld(verdict.causes, record, "n1", FLEET, now)


UNCOUNTED = "the nodes that healthd keeps drained cannot be counted: "
FLEET = ACT.fleet
LATEST = NOW + 2 * FLEET.uncounted_drain_after_seconds + 1


def clock_after(seconds: float) -> Callable[[], float]:
    return lambda: NOW + seconds


def fleet_failing_after(*drained_counts: int) -> Callable[[tuple[str, ...]], CommandResult]:
    counts = iter(drained_counts)

    def answer(argv: tuple[str, ...]) -> CommandResult:
        count = next(counts, None)
        return unreadable_fleet(argv) if count is None else fleet_answer(argv, drained_count=count)

    return answer


@pytest.mark.parametrize("verdict", [CRITICAL, DEGRADED], ids=["critical", "degraded"])
@pytest.mark.parametrize(
    "fleet_reply",
    [unreadable_fleet, lambda _: CommandResult(0, b"garbage\n"), lambda _: TIMED_OUT, lambda _: CommandResult(0)],
)
def test_drain_is_delayed_if_fleet_cannot_be_counted(
    verdict: Verdict, fleet_reply: Callable[[tuple[str, ...]], CommandResult]
) -> None:
    result = run_reconcile(verdict, [FREE_NODE], fleet=fleet_reply)
    assert result.changes() == []
    assert result.report.problem.startswith(UNCOUNTED)
    assert isinstance(result.report.decision, Leave)
    assert result.report.decision.would.startswith("drain with")
    assert (result.report.settled, result.report.record.count_failing_since) == (False, NOW)
    assert is_withheld(verdict, result.report.record), "the prolog admits jobs"


UNREAD_NODE = [TIMED_OUT, CONNECT_FAILURE, SOCKET_TIMEOUT, CommandResult(0, b"garbage\n"), CommandResult(0)]


@pytest.mark.parametrize("verdict", [CRITICAL, DEGRADED], ids=["critical", "degraded"])
@pytest.mark.parametrize("answer", UNREAD_NODE)
def test_prolog_admits_jobs_while_node_cannot_be_read(verdict: Verdict, answer: CommandResult) -> None:
    """A refusal by the prolog drains the node without a limit, so the prolog must not refuse before a count."""
    result = run_reconcile(verdict, [answer])
    assert (result.changes(), result.report.settled, result.report.record.count_failing_since) == ([], False, NOW)
    assert is_withheld(verdict, result.report.record)
    assert isinstance(result.report.decision, Leave)
    assert result.report.decision.would.startswith("drain with")
    recovered = run_reconcile(
        DEGRADED,
        [FREE_NODE, SUCCESS, DRAINED_NODE],
        result.report.record,
        fleet=fleet_with_drained(100, 101),
        now=clock_after(60),
    )
    assert (recovered.report.decision, recovered.report.record.count_failing_since) == (Drain(XID, False), 0.0)


@pytest.mark.parametrize("answer", UNREAD_NODE)
def test_counted_drain_refuses_jobs_while_slurmctld_is_unreachable(answer: CommandResult) -> None:
    refused_record = run_reconcile(DEGRADED, [FREE_NODE, NOT_ALLOWED]).report.record
    unread_record = run_reconcile(DEGRADED, [answer], refused_record, now=clock_after(60)).report.record
    assert not is_withheld(DEGRADED, unread_record)


@pytest.mark.parametrize(
    ("verdict", "record", "policy"),
    [
        (REPAIRED, DrainRecord(), ACT),
        (DEGRADED, OWN_DRAIN, ACT),
        (SHARED, DrainRecord(), ACT),
        (DEGRADED, DrainRecord(), replace(ACT, paused_until=NOW + 60)),
    ],
    ids=["no fault", "drained already", "shared cause", "paused"],
)
def test_count_failing_since_is_unset_if_no_count_is_needed(
    verdict: Verdict, record: DrainRecord, policy: Policy
) -> None:
    assert run_reconcile(verdict, [TIMED_OUT], record, policy).report.record.count_failing_since == 0.0


ONE_ROW_UNREAD = CommandResult(0, FREE_NODE.stdout + columns(("night", "1", "???", "", "", "", ""), NODE_COLUMNS))


def test_node_with_unreadable_row_is_not_drained() -> None:
    """The partition of the unreadable row may be at its limit."""
    result = run_reconcile(CRITICAL, [ONE_ROW_UNREAD])
    assert result.changes() == []
    assert (result.report.node is not None, result.report.record.count_failing_since) == (True, NOW)
    assert result.report.problem.startswith(UNCOUNTED)


def test_unreadable_row_is_reported_and_does_not_prevent_resume() -> None:
    drained_rows = CommandResult(0, DRAINED_NODE.stdout + columns(("night", "1", "???", "", "", "", ""), NODE_COLUMNS))
    result = run_reconcile(REPAIRED, [drained_rows, SUCCESS, ONE_ROW_UNREAD], OWN_DRAIN)
    assert result.report.resumed
    assert (result.report.problem, result.report.settled) == ("1 row from sinfo could not be read", False)


def test_delayed_drain_is_set_once_count_succeeds() -> None:
    delayed_record = run_reconcile(CRITICAL, [FREE_NODE], fleet=unreadable_fleet).report.record
    jobs = [listpids("12"), squeue(), SUCCESS, squeue(restarts=1, state="PENDING")]
    result = run_reconcile(
        CRITICAL,
        [FREE_NODE, SUCCESS, DRAINED_NODE, *jobs],
        delayed_record,
        fleet=fleet_with_drained(100, 101),
        now=clock_after(60),
    )
    assert (result.report.problem, result.report.requeued) == ("", ("12",))
    assert result.report.record.count_failing_since == 0.0


def test_critical_fault_drains_without_count_after_deadline() -> None:
    delayed_record = run_reconcile(CRITICAL, [FREE_NODE], fleet=unreadable_fleet).report.record
    due = fleet_limit.uncounted_drain_at(delayed_record, "n1", FLEET)
    assert NOW + FLEET.uncounted_drain_after_seconds <= due < LATEST
    kept_failing = replace(delayed_record, count_failed_at=due - 300)
    before_deadline = run_reconcile(CRITICAL, [FREE_NODE], kept_failing, fleet=unreadable_fleet, now=lambda: due - 1)
    assert before_deadline.changes() == []
    result = run_reconcile(
        CRITICAL,
        [FREE_NODE, SUCCESS, DRAINED_NODE],
        before_deadline.report.record,
        fleet=unreadable_fleet,
        now=lambda: due,
    )
    assert [line.split()[3] for line in result.changes()] == ["State=DRAIN"]
    assert result.report.decision == Drain(XID, False)
    assert (result.report.record.awaits_count, result.report.settled) == (True, False)
    assert result.report.problem.startswith(UNCOUNTED)
    assert not is_withheld(CRITICAL, result.report.record), "drained: the prolog may refuse"


@pytest.mark.parametrize("gap", [601.0, 3600.0, 3 * 86400.0])
def test_wait_for_uncounted_drain_restarts_after_gap(gap: float) -> None:
    """No count was tried while the node was off or the daemon was stopped."""
    delayed_record = run_reconcile(CRITICAL, [FREE_NODE], fleet=unreadable_fleet).report.record
    result = run_reconcile(CRITICAL, [FREE_NODE], delayed_record, fleet=unreadable_fleet, now=clock_after(gap))
    assert (result.changes(), result.report.record.count_failing_since) == ([], NOW + gap)


def test_uncounted_drain_taken_over_by_operator_requeues_nothing() -> None:
    due = DrainRecord(count_failing_since=NOW - 1e6, count_failed_at=NOW - 60)
    drained_record = run_reconcile(
        CRITICAL, [FREE_NODE, SUCCESS, DRAINED_NODE], due, fleet=unreadable_fleet
    ).report.record
    assert drained_record.awaits_count
    operator_drain = sinfo("idle+drain", "fan broken, bob")
    overridden = run_reconcile(CRITICAL, [operator_drain], drained_record, fleet=unreadable_fleet, now=clock_after(60))
    assert not any("requeue" in line for line in overridden.sent())
    assert overridden.report.record.awaits_count
    jobs = [listpids("12"), squeue(), SUCCESS, squeue(restarts=1, state="PENDING")]
    counted = run_reconcile(
        CRITICAL, [operator_drain, *jobs], overridden.report.record, fleet=fleet_with_drained(7), now=clock_after(120)
    )
    assert (counted.report.requeued, counted.report.record.awaits_count) == (("12",), False)


@pytest.mark.parametrize("hours", [0, 1, 24 * 365])
def test_requeue_never_happens_without_count(hours: int) -> None:
    record = DrainRecord(reason=XID, confirmed_at=NOW, boot_id="b1", reason_time=NOW - 60, awaits_count=True)
    result = run_reconcile(CRITICAL, [DRAINED_NODE], record, fleet=unreadable_fleet, now=clock_after(3600.0 * hours))
    assert (result.changes(), result.report.record.awaits_count) == ([], True)
    jobs = [listpids("12"), squeue(), SUCCESS, squeue(restarts=1, state="PENDING")]
    counted = run_reconcile(
        CRITICAL,
        [DRAINED_NODE, *jobs],
        result.report.record,
        fleet=fleet_with_drained(7),
        now=clock_after(3600.0 * hours),
    )
    assert (counted.report.requeued, counted.report.record.awaits_count) == (("12",), False)


def test_uncounted_drain_above_limit_is_lifted() -> None:
    record = DrainRecord(reason=XID, confirmed_at=NOW, boot_id="b1", reason_time=NOW - 60, awaits_count=True)
    result = run_reconcile(CRITICAL, [DRAINED_NODE, SUCCESS, FREE_NODE], record, fleet=fleet_with_drained(301))
    assert [line.split()[3] for line in result.changes()] == ["State=UNDRAIN"]
    assert result.report.record.hold is not None


@pytest.mark.parametrize("verdict", [DEGRADED, SHARED], ids=["own", "shared"])
def test_only_critical_own_hardware_faults_drain_without_count(verdict: Verdict) -> None:
    record = DrainRecord(count_failing_since=NOW - 1e6, hold=DUE if verdict is SHARED else None)
    result = run_reconcile(verdict, [FREE_NODE], record, fleet=unreadable_fleet)
    assert (result.changes(), result.report.settled) == ([], False)
    assert result.report.problem.startswith(UNCOUNTED)


def test_drain_without_second_count_is_kept_without_requeue() -> None:
    result = run_reconcile(CRITICAL, [FREE_NODE, SUCCESS, DRAINED_NODE], fleet=fleet_failing_after(10))
    assert (result.report.decision, result.report.record.awaits_count) == (Drain(XID, False), True)
    assert result.report.problem.startswith(UNCOUNTED)
    assert not any("requeue" in line for line in result.sent())


def test_stored_count_is_valid_for_ten_minutes() -> None:
    drained_record = run_reconcile(
        DEGRADED, [FREE_NODE, SUCCESS, DRAINED_NODE], fleet=fleet_with_drained(100, 101)
    ).report.record
    assert drained_record.stored_count == FleetCount(NOW, (PartitionCount("gpu", 1000, 101),))
    ended_record = run_reconcile(
        REPAIRED, [DRAINED_NODE, SUCCESS, FREE_NODE], drained_record, now=clock_after(100)
    ).report.record
    within_ten_minutes = run_reconcile(
        CRITICAL, [FREE_NODE, SUCCESS, DRAINED_NODE], ended_record, fleet=unreadable_fleet, now=clock_after(600)
    )
    assert within_ten_minutes.report.decision == Drain(XID, False), "no requeue before a count"
    assert within_ten_minutes.report.problem.startswith(UNCOUNTED)
    assert (
        run_reconcile(CRITICAL, [FREE_NODE], ended_record, fleet=unreadable_fleet, now=clock_after(601)).changes() == []
    )


def test_stored_count_without_room_delays_drain() -> None:
    full_record = run_reconcile(CRITICAL, [FREE_NODE], fleet=fleet_with_drained(300)).report.record
    assert full_record.stored_count == FleetCount(NOW, (PartitionCount("gpu", 1000, 300),))
    result = run_reconcile(
        CRITICAL, [FREE_NODE], replace(full_record, hold=None), fleet=unreadable_fleet, now=clock_after(300)
    )
    assert (result.changes(), result.report.record.hold is not None) == ([], True)


def test_first_count_and_other_partition_are_not_used() -> None:
    """Many nodes may have seen the same free place at the same time."""
    failed_drain = run_reconcile(CRITICAL, [FREE_NODE, CONNECT_FAILURE], fleet=fleet_with_drained(100)).report.record
    assert failed_drain.stored_count is None
    other_partition = DrainRecord(stored_count=FleetCount(NOW - 10, (PartitionCount("other", 1000, 1),)))
    assert run_reconcile(CRITICAL, [FREE_NODE], other_partition, fleet=unreadable_fleet).changes() == []


def test_second_limit_delays_own_hardware_and_requeue() -> None:
    result = run_reconcile(CRITICAL, [FREE_NODE], fleet=fleet_with_drained(300))
    hold = result.report.record.hold
    assert hold is not None
    assert (hold.own_hardware, hold.limit, result.changes()) == (True, 300, [])
    exceeded = run_reconcile(
        CRITICAL, [FREE_NODE, SUCCESS, DRAINED_NODE, SUCCESS, FREE_NODE], fleet=fleet_with_drained(299, 301)
    )
    assert not any("requeue" in line for line in exceeded.sent())


def test_hold_ends_with_cause() -> None:
    result = run_reconcile(REPAIRED, [FREE_NODE], DrainRecord(hold=FleetHold(NOW, NOW + 900, times=3)))
    assert (result.report.record.hold, result.report.settled) == (None, True)
