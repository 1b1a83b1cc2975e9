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
    FLEET_COLUMNS,
    JOB_COLUMNS,
    NODE_COLUMNS,
    REASON_COLUMNS,
    Command,
    CommandResult,
)
from healthd.common.slurm.output import parse_job, parse_listpids, parse_processes

ACT = Policy(mode=Mode.ACT, requeue_retry_seconds=90, admin_comment=False)
TELL = replace(ACT, admin_comment=True)
OURS = DrainRecord(reason=XID, confirmed_at=NOW - 60, boot_id="b1")
OWN: dict[str, Any] = {"drained_at": NOW, "own_hardware": True}  # recorded for a drain for own hardware
OVER = EndedDrain(XID, XID, NOW - 60, NOW)
OVER_HERE = replace(OVER, controller=f"{NOW - 9e5:.0f} ctl1")
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
FREE, TAKEN = sinfo("idle"), sinfo("idle+drain", XID)


DONE = CommandResult(0)
LATE = CommandResult(None)


def failed(stderr: str) -> CommandResult:
    return CommandResult(1, b"", stderr + "\n")


CONNECT_FAILURE = failed("slurm_update error: Unable to contact slurm controller (connect failure)")
SOCKET_TIMEOUT = failed("slurm_update error: Socket timed out on send/recv operation")
NOT_ALLOWED = failed("slurm_update error: Invalid user id")


CONFIG = "Configuration data as of 2026-11-20T20:48:10\nBOOT_TIME               = {:.0f}\nX = y\n{}"
UP = "\nSlurmctld(primary) at {} is {}\nSlurmctld(backup) at ctl2 is UP\n"


def started(at: float, host: str = "", state: str = "UP") -> CommandResult:
    """Return `scontrol show config` of a slurmctld. `host` is the primary, which is UP or DOWN."""
    return CommandResult(0, CONFIG.format(at, UP.format(host, state) if host else "").encode())


LONG_AGO = NOW - 9e5
PRIMARY = started(LONG_AGO, "ctl1")  # the default controller of a test
COUNTED = FleetCount(NOW, (PartitionCount("gpu", 1000, 0),))
UNSAVED = UnsavedChange(NOW, f"{LONG_AGO:.0f} ctl1")


@dataclass
class Look:
    """The result of one reconciliation. `steps` has the commands' argv and the saved records in order, without the
    queries about the fleet (`fleet_queries`) and without the readings right before a change (`rereads`)."""

    report: ReconcileReport
    steps: list[tuple[str, ...] | DrainRecord] = field(default_factory=list)
    asked_of_fleet: list[tuple[str, ...]] = field(default_factory=list)
    read_again: int = 0

    def sent(self) -> list[str]:
        return [" ".join(step) for step in self.steps if isinstance(step, tuple)]

    def changes(self) -> list[str]:
        return [line for line in self.sent() if line.startswith(("scontrol update", "scontrol requeue"))]


def look(
    verdict: Verdict,
    answers: Sequence[CommandResult],
    memory: DrainRecord | None = None,
    policy: Policy = ACT,
    boot_id: str = "b1",
    now: Callable[[], float] = lambda: NOW,
    fleet: Callable[[tuple[str, ...]], CommandResult] | None = None,
    meanwhile: Sequence[CommandResult] = (),
    refusals: tuple[float, ...] = (),
    exact_reason: str = "fan",
    controller: CommandResult | None = None,
) -> Look:
    """Run a reconciliation and answer each command with the next of `answers`, which must all be used.

    `fleet` answers queries about the fleet; the default is 1000 nodes without a drain by healthd. `changed_nodes` are
    the readings before a change; the default is the unchanged node. `refusals` are the times at which the prolog
    refused jobs.
    """
    memory = memory or DrainRecord()
    generator = reconcile(verdict, memory, policy, "n1", boot_id, now, refusals=lambda: refusals)
    left, steps, asked, others = list(answers), [], [], list(meanwhile)
    answer: CommandResult | None = None
    node: CommandResult | None = None  # the last reading since the last change
    again = controllers = 0
    controller = controller or PRIMARY
    while True:
        try:
            step = generator.send(answer)
        except StopIteration as end:
            assert not [*left, *others], f"unused answers: {left}, {others}"
            return Look(end.value, steps, asked, again)
        if isinstance(step, SaveRecord):
            steps.append(step.record)
            answer = None
        else:
            assert isinstance(step, Command)
            assert step.deadline_seconds == policy.command_timeout_seconds
            if "-n" not in step.argv and (step.argv[0] == "sinfo" or step.argv[-1] == "partition"):
                asked.append(step.argv)
                answer = (fleet or nodes)(step.argv)
                continue
            if step.argv == commands.config() and not (left and left[0].stdout.startswith(b"Configuration")):
                controllers += 1
                answer = controller
                continue
            if step.argv == commands.whole_reason("n1"):
                answer = CommandResult(0, columns(("1", exact_reason), REASON_COLUMNS))
                continue
            is_node = step.argv[0] == "sinfo"
            if is_node and node is not None:
                again += 1
                answer = node = others.pop(0) if others else node
                continue
            steps.append(step.argv)
            answer = left.pop(0)
            node = answer if is_node else None if step.changes else node


def nodes(argv: tuple[str, ...], total: int = 1000, held: int = 0) -> CommandResult:
    """Return Slurm's output for a partition of this size with this number of nodes drained by healthd."""
    if argv[-1] == "partition":
        return CommandResult(
            0, f"PartitionName=gpu Nodes=n[1-{total}] TotalNodes={total} SelectTypeParameters=NONE\n".encode()
        )
    rows = [("gpu", "idle", "Unknown", "none", f"{total - held}")]
    rows += [("gpu", "idle+drain", f"{NOW - 60:.0f}", "healthd:", f"{held}")] * bool(held)
    return CommandResult(0, b"".join(columns(row, FLEET_COLUMNS) for row in rows))


# drain


def test_a_drain_is_written_down_sent_and_read_back() -> None:
    done = look(DEGRADED, [sinfo("idle"), DONE, sinfo("idle+drain", XID)])
    assert done.steps[1] == DrainRecord(
        pending_reason=XID, pending_since=NOW, awaits_count=True, unsaved_change=UNSAVED, **OWN
    )
    assert done.steps[2] == ("scontrol", "update", "NodeName=n1", "State=DRAIN", f"Reason={XID}")
    assert done.report.record == DrainRecord(
        reason=XID,
        confirmed_at=NOW,
        boot_id="b1",
        reason_time=NOW - 60,
        unsaved_change=UNSAVED,
        stored_count=COUNTED,
        **OWN,
    )
    assert done.report.settled
    assert done.report.owner is Owner.HEALTHD
    assert done.report.decision == Drain(XID, False)


@pytest.mark.parametrize(
    ("verdict", "decision", "jobs"),
    [
        (DEGRADED, Leave('drained by root: "fan"'), []),
        (CRITICAL, Drain("fan", True), [listpids()]),
    ],
)
def test_an_operators_drain_while_the_fleet_is_counted_is_seen_before_ours_is_sent(
    verdict: Verdict, decision: Decision, jobs: list[CommandResult]
) -> None:
    done = look(verdict, [sinfo("idle"), *jobs], meanwhile=[sinfo("idle+drain", "fan")])
    assert (done.changes(), done.report.decision, done.report.owner) == ([], decision, Owner.OTHER)
    assert (done.report.record, done.report.settled) == (DrainRecord(**OWN), True)


def test_a_drain_of_ours_that_stands_again_when_the_fleet_was_counted_is_not_sent_again() -> None:
    """slurmctld was restarted without healthd's drain, and then again with it."""
    answers = [sinfo("idle"), started(NOW - 30), started(NOW)]
    done = look(DEGRADED, answers, OURS, meanwhile=[sinfo("idle+drain", XID)])
    assert (done.changes(), done.report.owner, done.report.record.reason) == ([], Owner.HEALTHD, XID)


def test_an_operators_words_between_our_drain_and_our_reading_of_it_stand_and_ours_is_withdrawn() -> None:
    done = look(DEGRADED, [sinfo("idle"), DONE, sinfo("idle+drain", "fan")])
    assert len(done.changes()) == 1
    assert done.report.decision == Leave('drained by root: "fan"')
    assert (done.report.record, done.report.settled) == (DrainRecord(**OWN), True)


def test_a_node_is_read_again_right_before_each_change() -> None:
    assert look(DEGRADED, [sinfo("idle"), DONE, sinfo("idle+drain", XID)]).read_again == 1
    assert look(REPAIRED, [sinfo("idle+drain", XID), DONE, sinfo("idle")], OURS).read_again == 1
    over = DrainRecord(ended_drain=replace(OVER, ended_at=NOW - 60))
    back = [sinfo("unknown+drain", XID), started(NOW - 50)]
    assert look(REPAIRED, [*back, DONE, sinfo("idle")], over).read_again == 1
    taken = look(REPAIRED, back, over, meanwhile=[sinfo("idle+drain", "fan")])
    assert (taken.changes(), taken.report.owner) == ([], Owner.OTHER)


def test_who_changes_the_node_each_time_is_trouble_and_nothing_is_sent() -> None:
    changing = [sinfo("idle+down", "Not responding" + " : reboot issued" * number) for number in range(3)]
    done = look(DEGRADED, [sinfo("idle")], meanwhile=changing)
    assert done.changes() == []
    assert done.report.problem == "another user or tool changed the node each time healthd was about to change it"
    assert not done.report.settled


def test_a_drain_that_the_limit_takes_back_is_left_to_an_operator_who_took_it_over_meanwhile() -> None:
    answers = [sinfo("idle"), DONE, sinfo("idle+drain", XID)]
    theirs = sinfo("idle+drain", "fan")
    done = look(SHARED, answers, DrainRecord(hold=DUE), fleet=held_by_healthd(99, 101), meanwhile=[FREE, theirs])
    assert [line.split()[3] for line in done.changes()] == ["State=DRAIN"]
    assert (done.report.owner, done.report.record.overriding_reason, done.report.record.hold) == (
        Owner.OTHER,
        "fan",
        None,
    )


def test_words_that_a_resume_of_ours_left_on_the_node_and_that_are_an_operators_are_drained_for_again() -> None:
    """Since 24.11 a resume keeps the reason. An operator set this one between healthd's reading and its command."""
    answers = [sinfo("idle+drain", XID), DONE, sinfo("idle", "fan", NOW), DONE, sinfo("idle+drain", "fan", NOW)]
    done = look(REPAIRED, answers, OURS)
    assert done.changes()[1] == "scontrol update NodeName=n1 State=DRAIN Reason=fan"
    assert (done.report.owner, done.report.decision) == (Owner.OTHER, Leave('drained by root: "fan"'))
    assert done.report.record.reason == ""
    ours = look(REPAIRED, [sinfo("idle+drain", XID), DONE, sinfo("idle", f"{XID} : Not responding")], OURS)
    assert len(ours.changes()) == 1


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
def test_resume_writes_back_an_operators_reason_byte_for_byte(reason: str) -> None:
    answers = [sinfo("idle+drain", XID), DONE, sinfo("idle", reason, NOW), DONE, sinfo("idle+drain", reason, NOW)]
    done = look(REPAIRED, answers, OURS, exact_reason=reason)
    assert done.changes()[1] == f"scontrol update NodeName=n1 State=DRAIN Reason={reason}"
    assert done.report.owner is Owner.OTHER


def test_an_operators_drain_right_after_our_resume_is_theirs() -> None:
    done = look(REPAIRED, [sinfo("idle+drain", XID), DONE, sinfo("idle+drain", "fan", NOW)], OURS)
    assert (done.report.owner, done.report.record.overriding_reason, done.report.record.resume_sent_at) == (
        Owner.OTHER,
        "fan",
        0,
    )
    gone = look(DEGRADED, [sinfo("idle"), PRIMARY], done.report.record)
    assert gone.report.acknowledged, "their resume counts, too"


def test_a_drain_that_stands_is_not_sent_again() -> None:
    done = look(DEGRADED, [sinfo("allocated+drain", XID)], OURS)
    assert done.changes() == []
    assert done.report.settled


@pytest.mark.parametrize("state", ["down+drain", "idle+drain+not_responding", "idle+drain+reboot_requested"])
def test_a_drain_on_a_node_that_may_come_back_without_it_is_looked_at_again(state: str) -> None:
    assert not look(DEGRADED, [sinfo(state, XID)], OURS).report.settled


def test_a_healthy_node_that_is_down_is_none_of_our_business() -> None:
    assert look(REPAIRED, [sinfo("down+not_responding", "Not responding")]).report.settled


@pytest.mark.parametrize(
    ("answer", "problem"),
    [
        (LATE, "scontrol update did not end in time; slurmctld may still execute it"),
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
def test_a_drain_that_failed_is_trouble_and_still_known_as_ours(answer: CommandResult, problem: str) -> None:
    done = look(CRITICAL, [sinfo("idle"), answer])
    assert done.report.problem == problem
    assert not done.report.settled
    assert done.report.record == DrainRecord(
        pending_reason=XID, pending_since=NOW, awaits_count=True, unsaved_change=UNSAVED, **OWN
    )
    again = look(CRITICAL, [sinfo("idle+drain", XID), listpids()], done.report.record)
    assert again.changes() == []
    assert again.report.owner is Owner.HEALTHD


def test_nothing_is_requeued_on_a_node_that_is_not_read_as_drained() -> None:
    done = look(CRITICAL, [sinfo("mixed"), DONE, sinfo("mixed")])
    assert done.report.problem.endswith("Slurm does not show the node drained")
    assert done.report.record.pending_reason == XID


@pytest.mark.parametrize(
    ("answer", "problem"),
    [
        (LATE, "sinfo did not end in time"),
        (
            failed("slurm_load_partitions: Unable to contact slurm controller (connect failure)"),
            "sinfo: slurm_load_partitions: Unable to contact slurm controller (connect failure)",
        ),
        (CommandResult(0, b""), 'Slurm has no node "n1" in any partition'),
        (CommandResult(0, b"\0garbage 42\n"), 'sinfo printed no readable row for the node: "\0garbage 42"'),
        (CommandResult(127, stderr="No such file: sinfo"), "sinfo: No such file: sinfo"),
    ],
)
def test_a_node_that_cannot_be_read_is_left_alone(answer: CommandResult, problem: str) -> None:
    done = look(CRITICAL, [answer], OURS)
    assert done.report.problem == problem
    assert done.report.record == OURS
    assert done.report.node is None
    assert isinstance(done.report.decision, Leave)
    assert done.report.decision.why == "the node's state in Slurm is unknown"
    assert done.report.decision.would.startswith('drain with "healthd: '), "the desired action is still reported"
    assert not done.report.settled


def test_observing_it_reads_and_never_changes() -> None:
    for policy in (Policy(), Policy(mode=Mode.ACT, paused_until=NOW + 1)):
        assert look(CRITICAL, [sinfo("idle")], policy=policy).changes() == []
        assert look(REPAIRED, [sinfo("idle+drain", XID)], OURS, policy).changes() == []


# resume


def test_our_drain_is_lifted_with_undrain_and_read_back() -> None:
    done = look(REPAIRED, [sinfo("idle+drain", XID), DONE, sinfo("idle+not_responding")], OURS)
    assert done.changes() == ["scontrol update NodeName=n1 State=UNDRAIN"]
    assert done.report.record == DrainRecord(ended_drain=OVER_HERE, resumed_drains=(ResumedDrain(NOW, NOW, False),))
    assert done.report.settled
    assert done.report.next_read_at == NOW + 60
    assert not done.report.acknowledged


def test_a_drain_that_is_over_is_looked_at_once_more_and_then_no_more() -> None:
    over = DrainRecord(ended_drain=replace(OVER, ended_at=NOW - 60))
    done = look(REPAIRED, [sinfo("idle")], over)
    assert done.changes() == []
    assert (done.report.settled, done.report.next_read_at) == (True, 0.0)
    early = look(REPAIRED, [sinfo("idle")], replace(over, ended_drain=OVER))
    assert early.report.next_read_at == NOW + 60


def test_a_drain_that_a_restarted_slurmctld_brings_back_is_lifted_again() -> None:
    over = DrainRecord(ended_drain=replace(OVER, ended_at=NOW - 60))
    answers = [sinfo("unknown+drain", XID), started(NOW - 50), DONE, sinfo("idle")]
    done = look(REPAIRED, answers, over)
    assert done.changes() == ["scontrol update NodeName=n1 State=UNDRAIN"]
    assert done.report.next_read_at == NOW + 60
    stands = look(DEGRADED, answers[:2], over)
    assert (stands.changes(), stands.report.owner) == ([], Owner.HEALTHD)


def test_a_drain_before_the_last_one_that_a_restarted_slurmctld_brings_back_is_lifted_again() -> None:
    first = EndedDrain(XID, XID, NOW - 300, NOW - 200)
    over = DrainRecord(ended_drain=replace(OVER, reason_time=NOW - 60, ended_at=NOW - 40), earlier_drains=(first,))
    back = sinfo("unknown+drain", XID, NOW - 300)
    done = look(REPAIRED, [back, started(NOW - 30), DONE, sinfo("idle")], over)
    assert done.changes() == ["scontrol update NodeName=n1 State=UNDRAIN"]
    assert done.report.adopted is None
    unread = look(REPAIRED, [back], over, controller=CONNECT_FAILURE)
    assert (unread.changes(), unread.report.record) == ([], over)
    holding = DrainRecord(reason=XID.replace("79", "48"), confirmed_at=NOW - 60, boot_id="b1", earlier_drains=(first,))
    ours = look(DEGRADED, [back, started(NOW - 30)], holding)
    assert (ours.changes(), ours.report.owner, ours.report.record.reason) == ([], Owner.HEALTHD, XID)


def test_a_drain_under_our_left_over_words_is_slurms_where_slurmctld_was_not_restarted() -> None:
    over = DrainRecord(ended_drain=replace(OVER, ended_at=NOW - 30))
    done = look(REPAIRED, [sinfo("idle+drain+invalid_reg", XID), PRIMARY], over)
    assert done.changes() == []
    assert done.report.owner is Owner.OTHER
    assert done.report.adopted is None
    unread = look(REPAIRED, [sinfo("idle+drain", XID)], over, controller=CONNECT_FAILURE)
    assert unread.report.problem
    assert (unread.report.record, unread.report.settled) == (over, False), "the controller is queried again"


def test_a_resume_that_did_nothing_is_trouble() -> None:
    done = look(REPAIRED, [sinfo("idle+drain", XID), DONE, sinfo("idle+drain", XID)], OURS)
    assert "still shows the node drained" in done.report.problem


def test_a_resume_that_failed_keeps_the_drain_as_ours() -> None:
    done = look(REPAIRED, [sinfo("idle+drain", XID), SOCKET_TIMEOUT], OURS)
    assert done.report.record.reason == XID
    late = look(REPAIRED, [sinfo("idle")], done.report.record)
    assert not late.report.acknowledged
    assert late.report.record.reason == ""


@pytest.mark.parametrize("answer", [NOT_ALLOWED, CONNECT_FAILURE, CommandResult(127, stderr="no scontrol")])
def test_a_resume_that_was_surely_refused_is_not_under_way(answer: CommandResult) -> None:
    done = look(REPAIRED, [sinfo("idle+drain", XID), answer], OURS)
    assert (done.report.record.reason, done.report.record.resume_sent_at) == (XID, 0.0)


def test_an_operators_resume_soon_after_our_own_is_theirs() -> None:
    resumed = look(REPAIRED, [sinfo("idle+drain", XID), DONE, sinfo("idle")], OURS).report.record
    broken = look(CRITICAL, [sinfo("idle"), DONE, sinfo("idle+drain", XID), listpids()], resumed, now=lambda: NOW + 5)
    assert broken.report.owner is Owner.HEALTHD
    theirs = look(CRITICAL, [sinfo("idle"), PRIMARY], broken.report.record, now=lambda: NOW + 30)
    assert (theirs.report.acknowledged, theirs.changes()) == (True, [])


@pytest.mark.parametrize("unknown", [LATE, SOCKET_TIMEOUT])
def test_a_resume_of_ours_that_may_come_late_is_ours_and_the_next_one_an_operators(unknown: CommandResult) -> None:
    sent = look(REPAIRED, [sinfo("idle+drain", XID), unknown], OURS).report.record
    late = look(DEGRADED, [sinfo("idle"), DONE, sinfo("idle+drain", XID)], sent, now=lambda: NOW + 5)
    assert (late.report.acknowledged, late.report.owner) == (False, Owner.HEALTHD)
    theirs = look(DEGRADED, [sinfo("idle"), PRIMARY], late.report.record, now=lambda: NOW + 30)
    assert theirs.report.acknowledged


@pytest.mark.parametrize("unknown", [LATE, SOCKET_TIMEOUT, None], ids=["time-out", "no answer", "killed"])
def test_a_resume_of_ours_whose_answer_was_lost_counts_as_one_that_was_heard(unknown: CommandResult | None) -> None:
    """Flapping is limited also if slurmctld answers slowly."""
    held = replace(OURS, drained_at=NOW - 300, own_hardware=True)
    if unknown is None:  # killed after the record was saved, when scontrol had the command
        known = replace(held, resume_sent_at=NOW)
    else:
        known = look(REPAIRED, [sinfo("idle+drain", XID), unknown], held).report.record
        assert known.resumed_drains == ()
    late = look(REPAIRED, [sinfo("idle")], known, now=lambda: NOW + 20)
    assert late.report.record.resumed_drains == (ResumedDrain(NOW - 300, NOW + 20, True),)
    lost = look(REPAIRED, [sinfo("idle"), started(NOW - 30)], held)
    assert lost.report.record.resumed_drains == (), "slurmctld lost the drain, so it was not resumed"


@pytest.mark.parametrize("after", [sinfo("idle+drain", "fan"), sinfo("idle", "fan")], ids=["drained", "24.11"])
def test_a_resume_of_ours_counts_also_where_a_person_drained_the_node_right_after_it(after: CommandResult) -> None:
    held = replace(OURS, drained_at=NOW - 300, own_hardware=True)
    again = [DONE, sinfo("idle+drain", "fan")] if after.stdout == sinfo("idle", "fan").stdout else []
    done = look(REPAIRED, [sinfo("idle+drain", XID), DONE, after, *again], held)
    assert done.report.owner is Owner.OTHER
    assert done.report.record.resumed_drains == (ResumedDrain(NOW - 300, NOW, True),)


# drains after a refusal by healthd's prolog


def prolog_error(since: float = NOW - 2) -> CommandResult:
    return sinfo("idle+drain", "Prolog error", since)


NOT_CLEAN = Verdict(Health.UNKNOWN, unknown=("site timed out",))


@pytest.mark.parametrize(
    "memory", [DrainRecord(), replace(OURS, reason_time=NOW - 60)], ids=["no drain", "own drain was resumed"]
)
def test_a_node_that_our_prolog_drained_is_resumed_though_a_check_was_not_clean_at_first(memory: DrainRecord) -> None:
    answers = [prolog_error(NOW - 9), *([PRIMARY] if memory.reason else [])]
    first = look(NOT_CLEAN, answers, memory, refusals=(NOW - 10,)).report
    assert first.acknowledged is bool(memory.reason)
    waits = look(NOT_CLEAN, [prolog_error(NOW - 9)], first.record, now=lambda: NOW + 20, refusals=(NOW - 10,))
    assert (waits.changes(), waits.report.owner) == ([], Owner.NONE)
    assert "healthd's prolog refused a job" in describe(waits.report.decision)
    assert not needs_no_query(REPAIRED, waits.report.record)
    kept = waits.report.record
    later = look(REPAIRED, [prolog_error(NOW - 9), DONE, sinfo("idle")], kept, now=lambda: NOW + 200)
    assert later.changes() == ["scontrol update NodeName=n1 State=UNDRAIN"], "also without the prolog's file"
    assert needs_no_query(REPAIRED, replace(later.report.record, ended_drain=None))


def test_a_node_that_our_prolog_drained_is_looked_at_until_it_is_steady() -> None:
    booting = sinfo("idle+drain+not_responding", "Prolog error", NOW - 2)
    assert not look(NOT_CLEAN, [booting], refusals=(NOW - 3,)).report.settled
    assert look(NOT_CLEAN, [prolog_error()], refusals=(NOW - 3,)).report.settled


def test_a_prolog_error_of_another_prolog_right_after_our_drain_was_lifted_is_left() -> None:
    """healthd's prolog refused a job 50 s ago, and the drain for it was lifted 25 s ago."""
    over = DrainRecord(ended_drain=replace(OVER, ended_at=NOW - 25, is_saved=True))
    done = look(REPAIRED, [prolog_error(NOW)], over, refusals=(NOW - 50,))
    assert (done.changes(), done.report.owner) == ([], Owner.OTHER)


# lost drains


def test_a_drain_that_a_restarted_slurmctld_forgot_is_put_back() -> None:
    answers = [sinfo("idle"), started(NOW - 30), DONE, sinfo("idle+drain", XID)]
    done = look(DEGRADED, answers, OURS)
    assert done.report.owner is Owner.HEALTHD
    assert not done.report.acknowledged


def test_a_drain_that_went_with_a_reboot_is_put_back_without_asking_slurmctld() -> None:
    done = look(DEGRADED, [sinfo("idle"), DONE, sinfo("idle+drain", XID)], OURS, boot_id="b2")
    assert done.report.record == DrainRecord(
        reason=XID,
        confirmed_at=NOW,
        boot_id="b2",
        reason_time=NOW - 60,
        unsaved_change=UNSAVED,
        stored_count=COUNTED,
        **OWN,
    )


def test_a_drain_that_an_operator_lifted_is_acknowledged_and_not_put_back() -> None:
    done = look(CRITICAL, [sinfo("mixed"), PRIMARY], OURS)
    assert done.changes() == []
    assert done.report.acknowledged
    assert done.report.acknowledged_before == OURS.confirmed_at
    assert done.report.record == DrainRecord(ended_drain=replace(OVER, reason_time=0.0))
    assert not done.report.settled


@pytest.mark.parametrize("answer", [LATE, CONNECT_FAILURE, CommandResult(0, b"nothing")])
def test_whether_it_was_lost_is_asked_again_when_slurmctld_does_not_say(answer: CommandResult) -> None:
    done = look(CRITICAL, [sinfo("idle")], OURS, controller=answer)
    assert done.report.problem
    assert done.report.record == OURS
    assert done.changes() == []


BACKUP = started(LONG_AGO + 5, "ctl1", "DOWN")  # started days ago and has taken over
DRAINED_NOW = replace(OURS, confirmed_at=NOW - 3, unsaved_change=UnsavedChange(NOW - 3, UNSAVED.controller))


@pytest.mark.parametrize("other", [BACKUP, started(LONG_AGO, "ctl1", "DOWN")], ids=["another start", "same second"])
def test_a_drain_that_a_backup_slurmctld_does_not_know_is_put_back(other: CommandResult) -> None:
    done = look(DEGRADED, [sinfo("idle"), other, DONE, sinfo("idle+drain", XID)], DRAINED_NOW)
    assert (done.report.owner, done.report.acknowledged) == (Owner.HEALTHD, False)
    assert len(done.changes()) == 1


def test_a_drain_that_vanishes_under_the_same_slurmctld_was_resumed_by_an_operator() -> None:
    assert look(DEGRADED, [sinfo("idle"), PRIMARY], DRAINED_NOW).report.acknowledged


def test_an_operators_resume_after_a_failover_is_theirs_once_the_drain_is_saved() -> None:
    """The backup took over long after the drain was saved. Then an operator resumed the node."""
    stands = look(DEGRADED, [sinfo("idle+drain", XID)], DRAINED_NOW, now=lambda: NOW + 20).report.record
    assert stands.unsaved_change is None
    assert look(DEGRADED, [sinfo("idle"), BACKUP], stands, now=lambda: NOW + 300).report.acknowledged


def test_a_drain_is_read_again_until_it_is_surely_saved() -> None:
    first = look(DEGRADED, [sinfo("idle"), DONE, sinfo("idle+drain", XID)]).report
    assert (first.settled, first.next_read_at) == (True, NOW + 15)
    early = look(DEGRADED, [sinfo("idle+drain", XID)], first.record, now=lambda: NOW + 5).report
    assert (early.settled, early.next_read_at, early.record.unsaved_change) == (True, NOW + 15, UNSAVED)
    late = look(DEGRADED, [sinfo("idle+drain", XID)], early.record, now=lambda: NOW + 15).report
    assert (late.settled, late.next_read_at, late.record.unsaved_change) == (True, 0.0, None)


def test_a_drain_is_not_kept_back_by_a_controller_that_cannot_be_read() -> None:
    done = look(DEGRADED, [sinfo("idle"), DONE, sinfo("idle+drain", XID)], controller=LATE)
    assert done.report.owner is Owner.HEALTHD
    assert done.report.record.unsaved_change == UnsavedChange(NOW, UNKNOWN_CONTROLLER)


def test_a_drain_that_vanishes_before_it_is_saved_is_put_back_if_its_controller_could_not_be_read() -> None:
    drained = look(DEGRADED, [FREE, DONE, TAKEN], controller=LATE).report.record
    done = look(DEGRADED, [FREE, BACKUP, DONE, TAKEN], drained, now=lambda: NOW + 3)
    assert (done.report.owner, done.report.acknowledged, len(done.changes())) == (Owner.HEALTHD, False, 1)
    assert done.report.record.unsaved_change == UnsavedChange(NOW + 3, f"{LONG_AGO + 5:.0f} ctl2")


def test_a_drain_whose_controller_could_not_be_read_is_put_back_if_it_was_never_read_as_saved() -> None:
    """slurmctld was unreachable for an hour."""
    drained = look(DEGRADED, [FREE, DONE, TAKEN], controller=LATE).report.record
    done = look(DEGRADED, [FREE, BACKUP, DONE, TAKEN], drained, now=lambda: NOW + 3600)
    assert (done.report.owner, done.report.acknowledged) == (Owner.HEALTHD, False)


def test_a_drain_whose_controller_could_not_be_read_is_an_operators_to_resume_once_it_is_saved() -> None:
    drained = look(DEGRADED, [FREE, DONE, TAKEN], controller=LATE).report.record
    saved = look(DEGRADED, [TAKEN], drained, now=lambda: NOW + 15).report.record
    done = look(DEGRADED, [FREE, PRIMARY], saved, now=lambda: NOW + 20)
    assert (done.report.acknowledged, done.changes()) == (True, [])


def test_an_operators_second_resume_stands_after_a_controller_that_could_not_be_read() -> None:
    drained = look(DEGRADED, [FREE, DONE, TAKEN], controller=LATE).report.record
    again = look(DEGRADED, [FREE, PRIMARY, DONE, TAKEN], drained, now=lambda: NOW + 3).report.record
    assert look(DEGRADED, [FREE, PRIMARY], again, now=lambda: NOW + 6).report.acknowledged


def test_a_drain_that_is_back_soon_after_a_resume_whose_controller_could_not_be_read_is_lifted_again() -> None:
    over = look(REPAIRED, [TAKEN, DONE, FREE], OURS, controller=LATE).report.record
    assert over.ended_drain is not None
    assert over.ended_drain.controller == UNKNOWN_CONTROLLER
    done = look(REPAIRED, [TAKEN, BACKUP, DONE, FREE], over, now=lambda: NOW + 20)
    assert (done.report.resumed, done.report.acknowledged) == (True, False)
    saved = look(REPAIRED, [FREE], over, now=lambda: NOW + 61).report.record
    later = look(REPAIRED, [TAKEN], saved, now=lambda: NOW + 300)
    assert (later.changes(), later.report.owner) == ([], Owner.OTHER), "a drain by Slurm itself with healthd's reason"


def test_a_drain_of_ours_that_a_backup_slurmctld_brings_back_after_our_resume_is_lifted_again() -> None:
    over = look(REPAIRED, [sinfo("idle+drain", XID), DONE, sinfo("idle")], OURS).report.record
    back = [sinfo("unknown+drain", XID), BACKUP, DONE, sinfo("idle")]
    done = look(REPAIRED, back, over, now=lambda: NOW + 20)
    assert done.changes() == ["scontrol update NodeName=n1 State=UNDRAIN"]
    assert (done.report.resumed, done.report.acknowledged) == (True, False)
    kept = look(REPAIRED, [sinfo("idle+drain", XID), PRIMARY], over, now=lambda: NOW + 20)
    assert (kept.changes(), kept.report.owner) == ([], Owner.OTHER), "under the same slurmctld it is a foreign drain"


INVALID_STATE = failed("slurm_update error: Invalid node state specified")


def test_a_resume_that_slurmctld_calls_invalid_and_does_is_healthds_own() -> None:
    done = look(REPAIRED, [sinfo("unknown+drain", XID), INVALID_STATE, sinfo("idle")], OURS)
    assert (done.report.resumed, done.report.acknowledged, done.report.problem) == (True, False, "")
    refused = look(REPAIRED, [sinfo("unknown+drain", XID), INVALID_STATE, sinfo("unknown+drain", XID)], OURS)
    assert (refused.report.resumed, refused.report.owner) == (False, Owner.HEALTHD)
    assert refused.report.problem == "scontrol update: slurm_update error: Invalid node state specified"


def test_a_drain_in_our_words_that_is_not_known_is_adopted() -> None:
    done = look(DEGRADED, [sinfo("idle+drain", "healthd: mount/missing /data: not mounted")])
    adopted = done.report.adopted
    assert adopted is not None
    assert (adopted.code, adopted.subject) == ("mount/missing", "/data")
    assert done.report.owner is Owner.UNRECORDED_HEALTHD
    assert done.changes() == []


# requeue


DRAINED = sinfo("mixed+drain", XID)


def test_a_victim_is_written_down_before_it_is_requeued() -> None:
    done = look(CRITICAL, [DRAINED, listpids("12"), squeue(), DONE, squeue(state="COMPLETING", restarts=1)], OURS)
    intent = done.steps[3]
    assert isinstance(intent, DrainRecord)
    assert intent.sent_requeues == (SentRequeue("12", 0, NOW),)
    assert done.steps[4] == ("scontrol", "requeue", "incomplete", "12")
    assert done.report.requeued == ("12",)
    assert done.report.settled


def test_the_jobs_of_an_operators_drained_node_are_requeued_and_its_reason_stays() -> None:
    answers = [
        sinfo("mixed+drain", "fan"),
        listpids("12"),
        squeue(),
        DONE,
        squeue(state="PENDING", restarts=1),
    ]
    done = look(CRITICAL, answers)
    assert done.changes() == ["scontrol requeue incomplete 12"]
    assert done.report.owner is Owner.OTHER


@pytest.mark.parametrize(
    ("job", "why"),
    [
        (squeue(batch="0"), "started by srun or salloc: only batch jobs can be requeued"),
        (squeue(requeue="0"), "submitted with --no-requeue"),
        (squeue(start=NOW - 9), "started after the fault"),
    ],
)
def test_a_running_job_that_is_no_victim_is_spared_and_named(job: CommandResult, why: str) -> None:
    done = look(CRITICAL, [DRAINED, listpids("12"), job], OURS)
    assert done.changes() == []
    assert done.report.not_requeued == (("12", why),)
    assert done.report.settled


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
def test_a_job_that_no_longer_runs_is_nothing_to_requeue(job: CommandResult) -> None:
    done = look(CRITICAL, [DRAINED, listpids("12"), job], OURS)
    assert done.changes() == []
    assert done.report.not_requeued == ()


@pytest.mark.parametrize("flag", ["1", "2", "5", "65535"])
def test_a_batch_job_that_slurm_itself_requeued_before_is_one_still(flag: str) -> None:
    """slurmctld increments BatchFlag when it requeues a job that was missing on its node."""
    job, after = squeue(batch=flag, restarts=1), squeue(batch=flag, restarts=2, state="PENDING")
    assert look(CRITICAL, [DRAINED, listpids("12"), job, DONE, after], OURS).report.requeued == ("12",)


@pytest.mark.parametrize("flag", ["0", "00", "", "x", "-1", "+1", "1.0", "1 1", "\u0663", "\u00b2", "9" * 20, "1e3"])
def test_a_batch_flag_that_is_none_is_no_batch_job(flag: str) -> None:
    job = parse_job(squeue(batch=flag).stdout, "12")
    assert job is not None
    assert job.batch == (flag == "9" * 20)


def test_one_task_of_an_array_and_the_leader_of_a_heterogeneous_job_are_named_so() -> None:
    other = squeue("13", "12_1").stdout
    task = CommandResult(0, other + squeue("12", "12_2").stdout)
    done = look(CRITICAL, [DRAINED, listpids("12"), task, DONE, squeue("12", "12_2", "PENDING", restarts=1)], OURS)
    assert done.changes() == ["scontrol requeue incomplete 12_2"]
    part = [DRAINED, listpids("21"), squeue("21", "20+1"), DONE, squeue("21", "20+1", "PENDING", restarts=1)]
    assert look(CRITICAL, part, OURS).changes() == ["scontrol requeue incomplete 20"]


def test_a_requeue_that_may_be_under_way_is_not_sent_again() -> None:
    sent = DrainRecord(XID, confirmed_at=NOW - 60, boot_id="b1", sent_requeues=(SentRequeue("12", 0, NOW - 89),))
    done = look(CRITICAL, [DRAINED, listpids("12"), squeue()], sent)
    assert done.changes() == []
    assert not done.report.settled


def test_a_requeue_that_did_nothing_is_sent_again_when_it_can_no_longer_be_under_way() -> None:
    sent = DrainRecord(XID, confirmed_at=NOW - 60, boot_id="b1", sent_requeues=(SentRequeue("12", 0, NOW - 91),))
    done = look(CRITICAL, [DRAINED, listpids("12"), squeue(), DONE, squeue()], sent)
    assert done.changes() == ["scontrol requeue incomplete 12"]
    assert done.report.record.sent_requeues == (SentRequeue("12", 0, NOW),)
    assert done.report.requeued == ()
    assert not done.report.settled


def test_a_job_that_came_back_here_and_ran_before_a_later_fault_is_requeued_again() -> None:
    sent = DrainRecord(XID, confirmed_at=NOW - 60, boot_id="b1", sent_requeues=(SentRequeue("12", 0, NOW - 20),))
    answers = [DRAINED, listpids("12"), squeue(restarts=1), DONE, squeue(restarts=2, state="PENDING")]
    assert look(CRITICAL, answers, sent).report.requeued == ("12",)


@pytest.mark.parametrize(
    ("answer", "kept"),
    [
        (LATE, True),
        (failed("Socket timed out on send/recv operation for job 12"), True),
        (failed("Unexpected message received for job 12"), True),
        (failed("Unable to contact slurm controller (connect failure) for job 12"), False),
        (failed("scontrol: error: Munge encode failed: Failed to connect\nProtocol authentication error"), False),
        (CommandResult(127, stderr="No such file: scontrol"), False),
    ],
)
def test_a_failed_requeue_is_forgotten_only_if_slurmctld_surely_never_got_it(answer: CommandResult, kept: bool) -> None:
    done = look(CRITICAL, [DRAINED, listpids("12", "13"), squeue(), answer], OURS)
    assert bool(done.report.record.sent_requeues) is kept
    assert done.report.problem.startswith("scontrol requeue")
    assert not done.report.settled


@pytest.mark.parametrize(
    ("answers", "problem"),
    [
        ([LATE], "scontrol listpids did not end in time"),
        ([failed("JobId=Invalid does not exist on node n1.")], "scontrol listpids: JobId=Invalid does not exist"),
        ([CommandResult(0, b"\n what")], "scontrol listpids printed no table"),
        ([listpids("12"), LATE], "squeue did not end in time"),
        ([listpids("12"), failed("slurm_load_jobs error: oh")], "squeue: slurm_load_jobs error: oh"),
        ([listpids("12"), CommandResult(0, b"12 x y")], "squeue printed an incomplete table"),
    ],
)
def test_jobs_that_cannot_be_listed_are_trouble(answers: list[CommandResult], problem: str) -> None:
    done = look(CRITICAL, [DRAINED, *answers], OURS)
    assert done.report.problem.startswith(problem)
    assert done.changes() == []


def test_the_jobs_of_living_slurmstepds_are_requeued_beside_a_dead_one() -> None:
    """22.05 prints the jobs that it could read, and fails."""
    dead = CommandResult(1, listpids("12").stdout, "Unable to connect to slurmstepd: Connection refused\n")
    done = look(CRITICAL, [DRAINED, dead, squeue(), DONE, squeue(restarts=1, state="PENDING")], OURS)
    assert done.report.requeued == ("12",)
    assert done.report.problem == "scontrol listpids: Unable to connect to slurmstepd: Connection refused"
    assert not done.report.settled


def test_a_job_id_that_was_cut_off_is_not_taken_for_another_jobs() -> None:
    cut = listpids("12", "1399").stdout.partition(b"99")[0]
    assert parse_listpids(cut.decode()) == ["12"]
    assert parse_processes(cut.decode()) == {100: "12"}
    killed = CommandResult(None, cut)
    assert look(CRITICAL, [DRAINED, killed, squeue(), DONE, squeue(restarts=1)], OURS).report.requeued == ("12",)


def test_a_job_that_was_restarted_too_often_is_held() -> None:
    answers = [DRAINED, listpids("12"), squeue(restarts=5), DONE, squeue(restarts=6, state="PENDING")]
    done = look(CRITICAL, answers, OURS)
    assert done.changes() == ["scontrol requeuehold incomplete 12"]
    assert done.report.requeued == done.report.held_jobs == ("12",)
    fewer = [DRAINED, listpids("12"), squeue(restarts=4), DONE, squeue(restarts=5, state="PENDING")]
    assert look(CRITICAL, fewer, OURS).report.held_jobs == ()


def test_a_job_that_slurmctld_refuses_to_requeue_does_not_keep_the_others() -> None:
    refused = failed("Access/permission denied for job 12")
    answers = [DRAINED, listpids("12", "13"), squeue(), refused, squeue("13"), DONE, squeue("13", restarts=1)]
    done = look(CRITICAL, answers, OURS)
    assert done.report.requeued == ("13",)
    assert done.report.problem.startswith("scontrol requeue: Access/permission denied")
    assert [r.job for r in done.report.record.sent_requeues] == ["12", "13"], "so 12 is not retried in each round"
    assert not done.report.settled


def test_the_jobs_that_were_hit_are_told_and_those_that_came_later_are_not() -> None:
    hit = squeue(requeue="0", comment="project x")
    answers = [DRAINED, listpids("12", "13"), hit, DONE, squeue("13", start=NOW - 9)]
    done = look(CRITICAL, answers, OURS, TELL)
    words = "healthd: node n1: gpu_xid/79 0000:1b:00.0: fell off the bus at 2026-11-20T20:51:30Z"
    assert done.changes() == [f"scontrol update JobId=12 AdminComment=project x; {words}"]
    told = squeue(requeue="0", comment=f"project x; {words}")
    assert look(CRITICAL, [DRAINED, listpids("12"), told], OURS, TELL).changes() == []


def test_a_comment_that_is_refused_does_not_keep_a_job_from_its_requeue() -> None:
    answers = [DRAINED, listpids("12"), squeue(), NOT_ALLOWED, DONE, squeue(state="PENDING", restarts=1)]
    done = look(CRITICAL, answers, OURS, TELL)
    assert done.report.requeued == ("12",)
    assert done.report.problem == ""


@pytest.mark.parametrize("comment", ["x" * 2000, "x" * 1000, "\u00e9" * 600, "x" + "\u00e9" * 600, b"caf\xe9"])
def test_a_comment_that_is_cut_or_no_utf_8_is_left_alone(comment: str | bytes) -> None:
    done = look(CRITICAL, [DRAINED, listpids("12"), squeue(batch="0", comment=comment)], OURS, TELL)
    assert done.changes() == []


@pytest.mark.parametrize(
    "comment",
    ["two  blanks", '{"a":\t1}', "caf\u00e9", "two\nlines", "a\x0bb", "\u0417\u0430\u043c\u0435\u043d\u0430\u2028x"],
)
def test_a_comment_of_others_is_kept_to_the_byte(comment: str) -> None:
    done = look(CRITICAL, [DRAINED, listpids("12"), squeue(batch="0", comment=comment), DONE], OURS, TELL)
    (change,) = done.changes()
    assert change.startswith(f"scontrol update JobId=12 AdminComment={comment}; healthd: node n1: gpu_xid/79 ")


def test_old_requeues_are_forgotten() -> None:
    old = DrainRecord(XID, confirmed_at=NOW - 60, boot_id="b1", sent_requeues=(SentRequeue("1", 0, NOW - 8 * 86400),))
    done = look(CRITICAL, [DRAINED, listpids("12"), squeue(), DONE, squeue(restarts=1, state="PENDING")], old)
    assert [r.job for r in done.report.record.sent_requeues] == ["12"]


def test_a_job_at_the_second_of_the_fault_is_a_victim() -> None:
    at_once = squeue(start=CRITICAL.fault_time)
    done = look(CRITICAL, [DRAINED, listpids("12"), at_once, DONE, squeue(state="PENDING", restarts=1)], OURS)
    assert done.report.requeued == ("12",)


def answer_to(argv: tuple[str, ...], draw: Callable[[st.SearchStrategy[Any]], Any]) -> bytes:
    """Return possible output of a Slurm command, with some columns replaced, or any bytes."""

    def row(of: tuple[tuple[str, int], ...], *values: str) -> bytes:
        return columns([draw(st.just(value) | st.just(value) | ANY_BYTES) for value in values], of)

    start = f"{NOW - 100:.0f}"
    if argv[:2] == ("scontrol", "listpids"):
        found = f"PID JOBID\n{draw(WORDS)} 12 0\n7 {draw(WORDS)} 0\n".encode(errors="surrogatepass")
    elif argv[0] == "squeue":
        found = row(JOB_COLUMNS, argv[6], "12", "RUNNING", "1", start, "0", "1", "(null)")
    elif argv == commands.whole_reason("n1"):
        found = row(REASON_COLUMNS, "1", XID)
    elif argv[0] == "sinfo" and "-n" in argv:
        state = draw(st.sampled_from(["idle", "idle+drain"]))
        found = row(NODE_COLUMNS, "gpu", "1", state, start, "root(0)", XID, draw(st.sampled_from(["(null)", "gpu:8"])))
    elif argv[0] == "sinfo":
        found = row(FLEET_COLUMNS, "gpu", "idle", "5", "x", "9")
    else:
        found = f"BOOT_TIME = {draw(st.just(start) | WORDS)}\nTotalNodes={draw(st.just('12') | WORDS)}\n"
        found = found.encode(errors="surrogatepass")
    return draw(st.sampled_from([found] * 6) | ANY_BYTES)


@given(
    st.data(),
    st.sampled_from(
        [CRITICAL, CRITICAL, DEGRADED, REPAIRED, replace(DEGRADED, causes=(replace(cause(), shared_cause=True),))]
    ),
    st.sampled_from(
        [DrainRecord(), OURS, DrainRecord(ended_drain=OVER, earlier_drains=(replace(OVER, reason_time=NOW - 100),))]
    ),
)
def test_whatever_slurm_prints_a_look_ends_and_its_commands_can_be_run(
    data: st.DataObject, verdict: Verdict, memory: DrainRecord
) -> None:
    steps = reconcile(verdict, memory, TELL, "n1", "b1", lambda: NOW)
    answer: CommandResult | None = None
    for _ in range(100):
        try:
            step = steps.send(answer)
        except StopIteration:
            return
        answer = None
        if isinstance(step, Command):
            assert not any("\0" in word for word in step.argv)
            assert [word.encode("utf-8", "surrogateescape") for word in step.argv]
            status = data.draw(st.sampled_from([0, 0, 0, 0, 1, None, 127]))
            answer = CommandResult(status, answer_to(step.argv, data.draw), data.draw(st.just("") | ANY_TEXT))
    raise AssertionError("the reconciliation does not end")


# fleet limit


def held_by_healthd(*counts: int) -> Callable[[tuple[str, ...]], CommandResult]:
    """Return answers for 1000 nodes with this number drained by healthd at the first count, the second, and so on."""
    left = list(counts)
    return lambda argv: nodes(argv, held=left.pop(0) if argv[0] == "sinfo" else 0)


def unreadable(argv: tuple[str, ...]) -> CommandResult:
    return SOCKET_TIMEOUT


def test_a_shared_cause_waits_before_it_counts_and_reads_no_table_for_that() -> None:
    done = look(SHARED, [FREE])
    assert [argv[0] for argv in done.asked_of_fleet] == ["scontrol"]
    hold = done.report.record.hold
    assert hold is not None
    assert NOW < hold.until <= NOW + 200
    assert (done.report.next_read_at, done.report.settled) == (hold.until, False)
    assert isinstance(done.report.decision, Leave)
    assert done.report.decision.would == f'drain with "{XID}"'
    again = look(SHARED, [FREE], done.report.record)
    assert (again.asked_of_fleet, again.report.record.hold) == ([], hold), "also after a restart"


def test_after_its_wait_a_shared_cause_drains_and_is_counted_again() -> None:
    done = look(SHARED, [FREE, DONE, TAKEN], DrainRecord(hold=DUE), fleet=held_by_healthd(99, 100))
    assert done.report.decision == Drain(XID, False)
    assert (done.report.record.hold, done.report.record.awaits_count, done.report.settled) == (None, False, True)
    assert [argv[0] for argv in done.asked_of_fleet] == ["sinfo", "sinfo"]


def test_at_the_limit_nothing_is_sent_and_each_wait_is_longer() -> None:
    memory, now, waits = DrainRecord(hold=DUE), NOW, []
    for times in range(1, 6):
        done = look(SHARED, [FREE], memory, now=lambda now=now: now, fleet=held_by_healthd(100))
        memory, hold = done.report.record, done.report.record.hold
        assert hold is not None
        assert (hold.times, hold.partition, hold.drained, hold.limit, hold.since) == (times, "gpu", 100, 100, DUE.since)
        waits.append(hold.until - now)
        now = hold.until + 1
    assert waits[4] > 4 * waits[0]


def test_a_drain_that_another_one_overtook_is_taken_back() -> None:
    answers = [FREE, DONE, TAKEN, DONE, FREE]
    done = look(SHARED, answers, DrainRecord(hold=DUE), fleet=held_by_healthd(99, 101))
    assert [line.split()[3] for line in done.changes()] == ["State=DRAIN", "State=UNDRAIN"]
    assert (done.report.record.reason, done.report.record.awaits_count) == ("", False)
    assert done.report.record.hold is not None
    assert isinstance(done.report.decision, Leave)


def test_a_drain_that_was_refused_and_is_no_longer_wanted_is_looked_for_until_it_cannot_be_under_way() -> None:
    refused = look(CRITICAL, [sinfo("idle"), NOT_ALLOWED]).report.record
    soon = look(REPAIRED, [sinfo("idle")], refused, now=lambda: NOW + 1)
    assert not soon.report.settled
    later = look(REPAIRED, [sinfo("idle")], soon.report.record, now=lambda: NOW + IN_FLIGHT_SECONDS + 1)
    assert (later.report.settled, later.report.next_read_at) == (True, 0.0)


def test_a_daemon_that_died_before_it_counted_again_does_so() -> None:
    died = DrainRecord(pending_reason=XID, pending_since=NOW - 5, awaits_count=True)
    stays = look(SHARED, [TAKEN], died, fleet=held_by_healthd(100))
    assert (stays.report.record.awaits_count, stays.changes()) == (False, [])
    goes = look(SHARED, [TAKEN, DONE, FREE], died, fleet=held_by_healthd(101))
    assert goes.changes() == ["scontrol update NodeName=n1 State=UNDRAIN"]


def test_a_drain_that_was_counted_is_never_lifted_by_the_limit() -> None:
    done = look(SHARED, [TAKEN], OURS, fleet=held_by_healthd(500))
    assert (done.asked_of_fleet, done.changes(), done.report.settled) == ([], [], True)


def test_a_drain_that_was_lost_is_put_back_without_a_new_wait_if_there_is_still_room() -> None:
    lost = [sinfo("idle"), started(NOW - 30)]
    done = look(SHARED, [*lost, DONE, TAKEN], OURS, fleet=held_by_healthd(99, 100))
    assert done.report.decision == Drain(XID, False)
    held = look(SHARED, lost, OURS, fleet=held_by_healthd(100))
    assert held.changes() == []
    assert held.report.record.hold is not None


def test_a_drain_of_somebody_else_needs_no_count() -> None:
    done = look(SHARED, [sinfo("idle+drain", "mine")])
    assert (done.asked_of_fleet, done.changes()) == ([], [])


def test_a_shared_cause_waits_while_nobody_can_count() -> None:
    done = look(SHARED, [FREE], DrainRecord(hold=DUE), fleet=unreadable)
    assert (done.changes(), done.report.problem) == (
        [],
        "the nodes that healthd keeps drained cannot be counted: "
        "sinfo: slurm_update error: Socket timed out on send/recv operation",
    )
    assert done.report.record.hold == DUE
    assert (done.report.next_read_at, done.report.settled) == (0.0, False), "retried with the driver's backoff"


def test_a_fault_of_the_nodes_own_hardware_does_not_wait() -> None:
    for memory in (DrainRecord(), DrainRecord(hold=FleetHold(NOW, NOW + 900))):
        done = look(DEGRADED, [FREE, DONE, TAKEN], memory, fleet=held_by_healthd(100, 101))
        assert (done.report.decision, done.report.settled) == (Drain(XID, False), True)


# failed fleet counts


def withheld(verdict: Verdict, memory: DrainRecord, now: float = NOW) -> bool:
    return fleet_limit.is_withheld(verdict.causes, memory, "n1", FLEET, now)


UNCOUNTED = "the nodes that healthd keeps drained cannot be counted: "
FLEET = ACT.fleet
LATEST = NOW + 2 * FLEET.uncounted_drain_after_seconds + 1


def later(seconds: float) -> Callable[[], float]:
    return lambda: NOW + seconds


def counts_then_fails(*held: int) -> Callable[[tuple[str, ...]], CommandResult]:
    counts = iter(held)

    def answer(argv: tuple[str, ...]) -> CommandResult:
        count = next(counts, None)
        return unreadable(argv) if count is None else nodes(argv, held=count)

    return answer


@pytest.mark.parametrize("verdict", [CRITICAL, DEGRADED], ids=["critical", "degraded"])
@pytest.mark.parametrize(
    "table", [unreadable, lambda _: CommandResult(0, b"garbage\n"), lambda _: LATE, lambda _: CommandResult(0)]
)
def test_a_drain_is_held_if_the_fleet_cannot_be_counted(
    verdict: Verdict, table: Callable[[tuple[str, ...]], CommandResult]
) -> None:
    done = look(verdict, [FREE], fleet=table)
    assert done.changes() == []
    assert done.report.problem.startswith(UNCOUNTED)
    assert isinstance(done.report.decision, Leave)
    assert done.report.decision.would.startswith("drain with")
    assert (done.report.settled, done.report.record.count_failing_since) == (False, NOW)
    assert withheld(verdict, done.report.record), "the prolog admits jobs"


UNREAD_NODE = [LATE, CONNECT_FAILURE, SOCKET_TIMEOUT, CommandResult(0, b"garbage\n"), CommandResult(0)]


@pytest.mark.parametrize("verdict", [CRITICAL, DEGRADED], ids=["critical", "degraded"])
@pytest.mark.parametrize("answer", UNREAD_NODE)
def test_jobs_may_start_while_the_node_cannot_be_read(verdict: Verdict, answer: CommandResult) -> None:
    """A refusal by the prolog drains the node without a limit, so the prolog must not refuse before a count."""
    done = look(verdict, [answer])
    assert (done.changes(), done.report.settled, done.report.record.count_failing_since) == ([], False, NOW)
    assert withheld(verdict, done.report.record)
    assert isinstance(done.report.decision, Leave)
    assert done.report.decision.would.startswith("drain with")
    back = look(DEGRADED, [FREE, DONE, TAKEN], done.report.record, fleet=held_by_healthd(100, 101), now=later(60))
    assert (back.report.decision, back.report.record.count_failing_since) == (Drain(XID, False), 0.0)


@pytest.mark.parametrize("answer", UNREAD_NODE)
def test_a_drain_that_a_count_has_allowed_keeps_jobs_out_while_slurmctld_is_away(answer: CommandResult) -> None:
    refused = look(DEGRADED, [FREE, NOT_ALLOWED]).report.record
    away = look(DEGRADED, [answer], refused, now=later(60)).report.record
    assert not withheld(DEGRADED, away)


@pytest.mark.parametrize(
    ("verdict", "memory", "policy"),
    [
        (REPAIRED, DrainRecord(), ACT),
        (DEGRADED, OURS, ACT),
        (SHARED, DrainRecord(), ACT),
        (DEGRADED, DrainRecord(), replace(ACT, paused_until=NOW + 60)),
    ],
    ids=["no fault", "drained already", "shared cause", "paused"],
)
def test_no_count_is_missing_where_none_is_needed(verdict: Verdict, memory: DrainRecord, policy: Policy) -> None:
    assert look(verdict, [LATE], memory, policy).report.record.count_failing_since == 0.0


ONE_ROW_UNREAD = CommandResult(0, FREE.stdout + columns(("night", "1", "???", "", "", "", ""), NODE_COLUMNS))


def test_a_node_with_a_row_that_cannot_be_read_is_not_drained_without_its_other_partition() -> None:
    """The partition of the unreadable row may be at its limit."""
    done = look(CRITICAL, [ONE_ROW_UNREAD])
    assert done.changes() == []
    assert (done.report.node is not None, done.report.record.count_failing_since) == (True, NOW)
    assert done.report.problem.startswith(UNCOUNTED)


def test_a_row_that_cannot_be_read_is_reported_and_a_resume_goes_on() -> None:
    drained = CommandResult(0, TAKEN.stdout + columns(("night", "1", "???", "", "", "", ""), NODE_COLUMNS))
    done = look(REPAIRED, [drained, DONE, ONE_ROW_UNREAD], OURS)
    assert done.report.resumed
    assert (done.report.problem, done.report.settled) == ("1 row from sinfo could not be read", False)


def test_a_held_drain_is_set_once_the_fleet_can_be_counted() -> None:
    held = look(CRITICAL, [FREE], fleet=unreadable).report.record
    jobs = [listpids("12"), squeue(), DONE, squeue(restarts=1, state="PENDING")]
    done = look(CRITICAL, [FREE, DONE, TAKEN, *jobs], held, fleet=held_by_healthd(100, 101), now=later(60))
    assert (done.report.problem, done.report.requeued) == ("", ("12",))
    assert done.report.record.count_failing_since == 0.0


def test_a_critical_fault_of_own_hardware_drains_without_a_count_after_its_deadline_and_requeues_nothing() -> None:
    held = look(CRITICAL, [FREE], fleet=unreadable).report.record
    due = fleet_limit.uncounted_drain_at(held, "n1", FLEET)
    assert NOW + FLEET.uncounted_drain_after_seconds <= due < LATEST
    still = replace(held, count_failed_at=due - 300)
    early = look(CRITICAL, [FREE], still, fleet=unreadable, now=lambda: due - 1)
    assert early.changes() == []
    done = look(CRITICAL, [FREE, DONE, TAKEN], early.report.record, fleet=unreadable, now=lambda: due)
    assert [line.split()[3] for line in done.changes()] == ["State=DRAIN"]
    assert done.report.decision == Drain(XID, False)
    assert (done.report.record.awaits_count, done.report.settled) == (True, False)
    assert done.report.problem.startswith(UNCOUNTED)
    assert not withheld(CRITICAL, done.report.record), "drained: the prolog may refuse"


@pytest.mark.parametrize("gap", [601.0, 3600.0, 3 * 86400.0])
def test_the_wait_for_an_uncounted_drain_begins_again_after_a_gap_without_counts(gap: float) -> None:
    """No count was tried while the node was off or the daemon was stopped."""
    held = look(CRITICAL, [FREE], fleet=unreadable).report.record
    done = look(CRITICAL, [FREE], held, fleet=unreadable, now=later(gap))
    assert (done.changes(), done.report.record.count_failing_since) == ([], NOW + gap)


def test_an_uncounted_drain_that_a_person_takes_over_requeues_nothing_before_a_count() -> None:
    due = DrainRecord(count_failing_since=NOW - 1e6, count_failed_at=NOW - 60)
    drained = look(CRITICAL, [FREE, DONE, TAKEN], due, fleet=unreadable).report.record
    assert drained.awaits_count
    theirs = sinfo("idle+drain", "fan broken, bob")
    taken_over = look(CRITICAL, [theirs], drained, fleet=unreadable, now=later(60))
    assert not any("requeue" in line for line in taken_over.sent())
    assert taken_over.report.record.awaits_count
    jobs = [listpids("12"), squeue(), DONE, squeue(restarts=1, state="PENDING")]
    counted = look(CRITICAL, [theirs, *jobs], taken_over.report.record, fleet=held_by_healthd(7), now=later(120))
    assert (counted.report.requeued, counted.report.record.awaits_count) == (("12",), False)


@pytest.mark.parametrize("hours", [0, 1, 24 * 365])
def test_no_deadline_ever_requeues_without_a_count(hours: int) -> None:
    memory = DrainRecord(reason=XID, confirmed_at=NOW, boot_id="b1", reason_time=NOW - 60, awaits_count=True)
    done = look(CRITICAL, [TAKEN], memory, fleet=unreadable, now=later(3600.0 * hours))
    assert (done.changes(), done.report.record.awaits_count) == ([], True)
    jobs = [listpids("12"), squeue(), DONE, squeue(restarts=1, state="PENDING")]
    counted = look(CRITICAL, [TAKEN, *jobs], done.report.record, fleet=held_by_healthd(7), now=later(3600.0 * hours))
    assert (counted.report.requeued, counted.report.record.awaits_count) == (("12",), False)


def test_a_drain_without_a_count_is_taken_back_if_the_fleet_turns_out_to_be_beyond_the_limit() -> None:
    memory = DrainRecord(reason=XID, confirmed_at=NOW, boot_id="b1", reason_time=NOW - 60, awaits_count=True)
    done = look(CRITICAL, [TAKEN, DONE, FREE], memory, fleet=held_by_healthd(301))
    assert [line.split()[3] for line in done.changes()] == ["State=UNDRAIN"]
    assert done.report.record.hold is not None


@pytest.mark.parametrize("verdict", [DEGRADED, SHARED], ids=["own", "shared"])
def test_only_critical_faults_of_own_hardware_drain_without_a_count(verdict: Verdict) -> None:
    memory = DrainRecord(count_failing_since=NOW - 1e6, hold=DUE if verdict is SHARED else None)
    done = look(verdict, [FREE], memory, fleet=unreadable)
    assert (done.changes(), done.report.settled) == ([], False)
    assert done.report.problem.startswith(UNCOUNTED)


def test_a_drain_whose_second_count_fails_stays_and_requeues_once_it_is_counted() -> None:
    done = look(CRITICAL, [FREE, DONE, TAKEN], fleet=counts_then_fails(10))
    assert (done.report.decision, done.report.record.awaits_count) == (Drain(XID, False), True)
    assert done.report.problem.startswith(UNCOUNTED)
    assert not any("requeue" in line for line in done.sent())


def test_a_count_that_confirmed_a_drain_stands_in_for_ten_minutes() -> None:
    drained = look(DEGRADED, [FREE, DONE, TAKEN], fleet=held_by_healthd(100, 101)).report.record
    assert drained.stored_count == FleetCount(NOW, (PartitionCount("gpu", 1000, 101),))
    over = look(REPAIRED, [TAKEN, DONE, FREE], drained, now=later(100)).report.record
    within = look(CRITICAL, [FREE, DONE, TAKEN], over, fleet=unreadable, now=later(600))
    assert within.report.decision == Drain(XID, False), "no requeue before a count"
    assert within.report.problem.startswith(UNCOUNTED)
    assert look(CRITICAL, [FREE], over, fleet=unreadable, now=later(601)).changes() == []


def test_a_count_that_gave_no_room_stands_in_too() -> None:
    full = look(CRITICAL, [FREE], fleet=held_by_healthd(300)).report.record
    assert full.stored_count == FleetCount(NOW, (PartitionCount("gpu", 1000, 300),))
    done = look(CRITICAL, [FREE], replace(full, hold=None), fleet=unreadable, now=later(300))
    assert (done.changes(), done.report.record.hold is not None) == ([], True)


def test_a_first_count_with_room_is_not_kept_and_none_of_other_partitions_stands_in() -> None:
    """Many nodes may have seen the same free place at the same time."""
    failed_drain = look(CRITICAL, [FREE, CONNECT_FAILURE], fleet=held_by_healthd(100)).report.record
    assert failed_drain.stored_count is None
    other = DrainRecord(stored_count=FleetCount(NOW - 10, (PartitionCount("other", 1000, 1),)))
    assert look(CRITICAL, [FREE], other, fleet=unreadable).changes() == []


def test_the_second_limit_holds_faults_of_nodes_own_hardware_and_their_requeues() -> None:
    done = look(CRITICAL, [FREE], fleet=held_by_healthd(300))
    hold = done.report.record.hold
    assert hold is not None
    assert (hold.own_hardware, hold.limit, done.changes()) == (True, 300, [])
    overtaken = look(CRITICAL, [FREE, DONE, TAKEN, DONE, FREE], fleet=held_by_healthd(299, 301))
    assert not any("requeue" in line for line in overtaken.sent())


def test_a_wait_is_over_with_its_cause() -> None:
    done = look(REPAIRED, [FREE], DrainRecord(hold=FleetHold(NOW, NOW + 900, times=3)))
    assert (done.report.record.hold, done.report.settled) == (None, True)
