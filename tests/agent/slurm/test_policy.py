"""Tests of the policy, row by row of the table in policy.py."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from healthd.agent.slurm.policy import (
    IN_FLIGHT_SECONDS,
    MAX_EARLIER,
    SAVED_SECONDS,
    UNKNOWN_CONTROLLER,
    Owner,
    Policy,
    after_drain_ended,
    after_reading,
    after_restored_drain,
    decide,
    describe,
    drain_owner,
    is_certainly_lost,
    is_drain_gone,
    is_idle,
    is_lost_by_slurmctld,
    is_stale_reason,
    jobs_blocked_since,
    mark_prolog_drain,
    mark_saved,
    needs_no_query,
    next_read_at,
    restored_drain,
)
from healthd.common.model import (
    Clears,
    Condition,
    ConditionState,
    Drain,
    DrainRecord,
    EndedDrain,
    Health,
    Leave,
    Mode,
    NodeState,
    Resume,
    Severity,
    Verdict,
)

NOW = 1_000_000.0
ACT = Policy(mode=Mode.ACT)
XID = "healthd: gpu_xid/79 0000:1b:00.0: fell off the bus"
ECC = "healthd: gpu_ecc/uncorrected 0000:1c:00.0: 3 errors"
OWN_DRAIN = DrainRecord(reason=XID, confirmed_at=NOW - 60, boot_id="b1", reason_time=5.0)


def cause(severity: Severity = Severity.CRITICAL, text: str = XID) -> Condition:
    _, code, subject, message = text.split(" ", 3)
    return Condition(
        check=code.partition("/")[0],
        instance="",
        code=code,
        subject=subject.rstrip(":"),
        severity=severity,
        message=message,
        clears=Clears.REBOOT,
        state=ConditionState.OPEN,
        first_seen=1.0,
        last_seen=2.0,
        count=1,
        boot_id="b1",
    )


def node(state: str, reason: str = "") -> NodeState:
    return NodeState("n1", frozenset(state.split("+")), reason, "root" if reason else "", 5.0 if reason else 0.0)


def faulty(*causes: Condition) -> Verdict:
    return Verdict(Health.UNHEALTHY, causes=causes, fault_time=NOW)


CRITICAL = faulty(cause())
DEGRADED = faulty(cause(Severity.DEGRADED))
REPAIRED = Verdict(Health.HEALTHY, may_resume=True)
NOT_YET = Verdict(Health.UNKNOWN, unknown=("gpu_ecc timed out",))


REFUSED = replace(node("IDLE+DRAIN", "Prolog error"), drained_by_own_prolog=True)
PROLOG_ERROR = replace(node("IDLE+DRAIN", "Prolog error"), reason_time=NOW)


def ended_drain_record(ended_at: float) -> DrainRecord:
    return DrainRecord(ended_drain=EndedDrain(XID, XID, NOW - 60, ended_at))


@pytest.mark.parametrize(
    ("verdict", "state", "record", "decision"),
    [
        # no drain
        (CRITICAL, node("IDLE"), DrainRecord(), Drain(XID, True)),
        (DEGRADED, node("MIXED"), DrainRecord(), Drain(XID, False)),
        (DEGRADED, node("MIXED+PLANNED"), DrainRecord(), Drain(XID, False)),
        (CRITICAL, node("IDLE+MAINT"), DrainRecord(), Drain(XID, True)),
        (CRITICAL, node("DOWN+NOT_RESPONDING", "Not responding"), DrainRecord(), Drain(XID, True)),
        (CRITICAL, node("DOWN", "Node unexpectedly rebooted"), DrainRecord(), Drain(XID, True)),
        (CRITICAL, node("DOWN", XID), DrainRecord(), Drain(XID, True)),
        (CRITICAL, node("IDLE", XID), DrainRecord(), Drain(XID, True)),  # 24.11 keeps a reason after RESUME
        (REPAIRED, node("IDLE"), DrainRecord(), Leave("nothing to do")),
        (REPAIRED, node("IDLE", XID), DrainRecord(), Leave("nothing to do")),
        # own drain
        (CRITICAL, node("MIXED+DRAIN", XID), OWN_DRAIN, Drain(XID, True)),
        (DEGRADED, node("IDLE+DRAIN", XID), OWN_DRAIN, Drain(XID, False)),
        (CRITICAL, node("IDLE+DRAIN", "Kill task failed"), OWN_DRAIN, Drain("Kill task failed", True)),
        (
            CRITICAL,
            node("DOWN+DRAIN+REBOOT_ISSUED", f"{XID} : reboot issued"),
            OWN_DRAIN,
            Drain(f"{XID} : reboot issued", True),
        ),
        (CRITICAL, node("IDLE+DRAIN", XID), DrainRecord(pending_reason=XID), Drain(XID, True)),
        (REPAIRED, node("IDLE+DRAIN", XID), OWN_DRAIN, Resume("every check that can drain has completed clean")),
        (
            REPAIRED,
            node("IDLE+DRAIN", "Kill task failed"),
            OWN_DRAIN,
            Resume("every check that can drain has completed clean"),
        ),
        (
            NOT_YET,
            node("IDLE+DRAIN", XID),
            OWN_DRAIN,
            Leave("drained by healthd until every check that can drain has completed clean"),
        ),
        (
            REPAIRED,
            node("DOWN+DRAIN", XID),
            OWN_DRAIN,
            Leave("repaired, but the node is DOWN in Slurm"),
        ),
        (
            REPAIRED,
            node("IDLE+DRAIN+REBOOT_REQUESTED", XID),
            OWN_DRAIN,
            Leave("repaired, but the node is REBOOT_REQUESTED in Slurm"),
        ),
        # the reason changes only if another cause is the worst
        (
            faulty(cause(text=ECC), cause(Severity.DEGRADED)),
            node("IDLE+DRAIN", XID),
            OWN_DRAIN,
            Drain(f"{ECC} (+1 more)", True),
        ),
        (faulty(cause(text=ECC), cause()), node("IDLE+DRAIN", XID), OWN_DRAIN, Drain(XID, True)),
        (faulty(cause(text=ECC)), node("IDLE+DRAIN", "Kill task failed"), OWN_DRAIN, Drain(ECC, True)),
        # foreign drain
        (CRITICAL, node("IDLE+DRAIN", "fan"), DrainRecord(), Drain("fan", True)),
        (DEGRADED, node("IDLE+DRAIN", "fan"), DrainRecord(), Leave('drained by root: "fan"')),
        (DEGRADED, node("DOWN", "fan"), DrainRecord(), Leave('drained by root: "fan"')),
        (DEGRADED, node("IDLE+FAIL", "fan"), DrainRecord(), Leave('drained by root: "fan"')),
        (
            DEGRADED,
            node("IDLE+DRAIN", "Prolog error"),
            DrainRecord(),
            Leave(f'drained by root: "Prolog error"; healthd\'s finding: {XID}'),
        ),
        # healthd's prolog refused a job because of the verdict, before healthd's drain was in Slurm
        (CRITICAL, REFUSED, DrainRecord(), Drain(XID, True)),
        (DEGRADED, REFUSED, DrainRecord(), Drain(XID, False)),
        (
            REPAIRED,
            REFUSED,
            DrainRecord(),
            Resume("healthd's prolog refused a job, and Slurm drained the node; every check has completed clean"),
        ),
        (
            NOT_YET,
            REFUSED,
            DrainRecord(),
            Leave("healthd's prolog refused a job, and Slurm drained the node; not every check is clean yet"),
        ),
        (REPAIRED, node("IDLE+DRAIN", "fan"), DrainRecord(), Leave('drained by root: "fan"')),
        (REPAIRED, node("IDLE+DRAIN", "fan"), OWN_DRAIN, Leave('drained by root: "fan"')),
        (REPAIRED, node("IDLE+DRAIN", ECC), OWN_DRAIN, Leave(f'drained by root: "{ECC}"')),
        (REPAIRED, node("IDLE+DRAIN", f"{XID}, RMA 7"), OWN_DRAIN, Leave(f'drained by root: "{XID}, RMA 7"')),
        (CRITICAL, node("IDLE+DRAIN", f"{XID}, RMA 7"), OWN_DRAIN, Drain(f"{XID}, RMA 7", True)),
        (
            REPAIRED,
            node("IDLE+DRAIN", "Kill task failed"),
            DrainRecord(),
            Leave('drained by root: "Kill task failed"'),
        ),
    ],
)
def test_decide_in_mode_act(
    verdict: Verdict, state: NodeState, record: DrainRecord, decision: Drain | Resume | Leave
) -> None:
    assert decide(verdict, state, record, ACT, NOW) == decision


@pytest.mark.parametrize("verdict", [CRITICAL, DEGRADED, REPAIRED])
def test_decide_leaves_unread_node(verdict: Verdict) -> None:
    assert isinstance(decide(verdict, None, OWN_DRAIN, ACT, NOW), Leave)


@pytest.mark.parametrize(
    ("policy", "reason"),
    [
        (Policy(), 'mode is "observe"'),
        (Policy(paused_until=NOW + 1), 'mode is "observe"'),
        (Policy(mode=Mode.ACT, paused_until=NOW + 1), "paused"),
        (Policy(mode=Mode.DRAIN, paused_until=NOW + 1), "paused"),
    ],
)
def test_decide_in_mode_observe_or_paused_only_describes(policy: Policy, reason: str) -> None:
    drain = Leave(reason, would=f'drain with "{XID}" and requeue')
    assert decide(CRITICAL, node("IDLE"), DrainRecord(), policy, NOW) == drain
    assert decide(REPAIRED, node("IDLE+DRAIN", XID), OWN_DRAIN, policy, NOW) == Leave(reason, would="resume")
    assert decide(REPAIRED, node("IDLE"), DrainRecord(), policy, NOW) == Leave("nothing to do")


def test_decide_ignores_expired_pause() -> None:
    policy = Policy(mode=Mode.ACT, paused_until=NOW)
    assert decide(CRITICAL, node("IDLE"), DrainRecord(), policy, NOW) == Drain(XID, True)


def test_decide_in_mode_drain_requeues_nothing() -> None:
    policy = Policy(mode=Mode.DRAIN)
    assert decide(CRITICAL, node("IDLE"), DrainRecord(), policy, NOW) == Drain(XID, False)
    assert decide(CRITICAL, node("IDLE+DRAIN", "fan"), DrainRecord(), policy, NOW) == Drain("fan", False)
    assert isinstance(decide(REPAIRED, node("IDLE+DRAIN", XID), OWN_DRAIN, policy, NOW), Resume)


@pytest.mark.parametrize(
    ("state", "record", "owner"),
    [
        (node("IDLE"), DrainRecord(), Owner.NONE),
        (node("IDLE"), OWN_DRAIN, Owner.NONE),
        (node("IDLE+DRAIN", XID), OWN_DRAIN, Owner.HEALTHD),
        (node("IDLE+DRAIN", XID), DrainRecord(), Owner.UNRECORDED_HEALTHD),
        (node("IDLE+DRAIN", XID), DrainRecord(adopted_reason=XID), Owner.UNRECORDED_HEALTHD),
        (node("IDLE+DRAIN", f"{XID} : reboot issued : reboot timed out"), OWN_DRAIN, Owner.HEALTHD),
        (node("IDLE+DRAIN", "Kill task failed : reboot issued"), OWN_DRAIN, Owner.HEALTHD),
        (node("IDLE+DRAIN", "Kill task failed (JobId=7 StepId=batch)"), OWN_DRAIN, Owner.HEALTHD),  # 26.05
        (node("IDLE+DRAIN", "Kill task failed, RMA 7"), OWN_DRAIN, Owner.OTHER),
        # 24.11: slurmd is down and returns with one GPU less
        (node("DOWN+DRAIN+NOT_RESPONDING", f"{XID} : Not responding"), OWN_DRAIN, Owner.HEALTHD),
        (
            node("IDLE+DRAIN+INVALID_REG", "gres/gpu count reported lower than configured (7 < 8)"),
            OWN_DRAIN,
            Owner.HEALTHD,
        ),
        (
            node("IDLE+DRAIN+INVALID_REG", "Low RealMemory (reported:1 < 100.00% of configured:2)"),
            OWN_DRAIN,
            Owner.HEALTHD,
        ),
        (node("IDLE+DRAIN+INVALID_REG", "gres/gpu count too low (7 < 8)"), DrainRecord(), Owner.OTHER),
        (node("DOWN+NOT_RESPONDING", "fan broken : Not responding"), DrainRecord(), Owner.NONE),
        (node("DOWN", "fan broken"), DrainRecord(), Owner.OTHER),
        (node("IDLE+DRAIN", f"{XID} RMA 7"), DrainRecord(overriding_reason=f"{XID} RMA 7"), Owner.OTHER),
        (node("IDLE+DRAIN", f"{XID} RMA 7"), DrainRecord(pending_reason=XID), Owner.OTHER),
        (node("IDLE+DRAIN", "Prolog error"), OWN_DRAIN, Owner.OTHER),
        (node("IDLE+DRAIN", ""), OWN_DRAIN, Owner.HEALTHD),  # 22.05 drops the reason when it powers up a node
        (node("IDLE+DRAIN", ""), DrainRecord(), Owner.OTHER),
        (node("IDLE+DRAIN", ECC), replace(OWN_DRAIN, pending_reason=ECC), Owner.HEALTHD),
    ],
)
def test_drain_owner(state: NodeState, record: DrainRecord, owner: Owner) -> None:
    assert drain_owner(state, record) is owner


@pytest.mark.parametrize(
    ("state", "refusals", "record", "is_own"),
    [
        (PROLOG_ERROR, [NOW], DrainRecord(), True),
        (PROLOG_ERROR, [NOW + 5], DrainRecord(), True),  # clock difference
        (PROLOG_ERROR, [NOW + 5.1], DrainRecord(), False),  # drained before the refusal, by another prolog
        (PROLOG_ERROR, [NOW, NOW + 30, NOW + 50], DrainRecord(), True),  # Slurm keeps the time of the first refusal
        (PROLOG_ERROR, [NOW - 15], DrainRecord(), True),
        (PROLOG_ERROR, [NOW - 15.1], DrainRecord(), False),
        (
            PROLOG_ERROR,
            [NOW - 10],
            ended_drain_record(NOW - 5),
            True,
        ),  # it ended just before Slurm received the refusal
        (PROLOG_ERROR, [NOW - 10], ended_drain_record(NOW - 4.9), False),  # the drain of that refusal has ended
        (PROLOG_ERROR, [NOW - 10, NOW - 1], ended_drain_record(NOW - 4.9), True),
        (PROLOG_ERROR, [], DrainRecord(), False),
        (PROLOG_ERROR, [], DrainRecord(prolog_drain_time=NOW), True),  # recorded by the last reading
        (PROLOG_ERROR, [], DrainRecord(prolog_drain_time=NOW - 1), False),  # that drain ended; this is another one
        (replace(PROLOG_ERROR, reason="Epilog error"), [NOW], DrainRecord(prolog_drain_time=NOW), False),
        (replace(PROLOG_ERROR, reason="Prolog error, fan"), [NOW], DrainRecord(prolog_drain_time=NOW), False),
        # 24.11 keeps the reason of an ended drain
        (replace(PROLOG_ERROR, flags=frozenset({"IDLE"})), [NOW], DrainRecord(prolog_drain_time=NOW), False),
    ],
)
def test_mark_prolog_drain_requires_recent_refusal(
    state: NodeState, refusals: list[float], record: DrainRecord, is_own: bool
) -> None:
    marked = mark_prolog_drain(state, refusals, record)
    assert marked.drained_by_own_prolog is is_own
    assert (drain_owner(marked, DrainRecord()) is Owner.NONE) is (is_own or "DRAIN" not in state.flags)


def test_prolog_drain_is_recorded_until_ended() -> None:
    record = after_reading(DrainRecord(), REFUSED, "b1", NOW)
    assert record == DrainRecord(prolog_drain_time=5.0)
    assert not needs_no_query(REPAIRED, record)
    assert needs_no_query(REPAIRED, after_reading(record, node("IDLE"), "b1", NOW))
    assert needs_no_query(REPAIRED, after_reading(record, node("IDLE+DRAIN", "fan"), "b1", NOW)), (
        "an operator took over"
    )


def test_refusal_during_own_drain_shows_operator_resume() -> None:
    assert is_drain_gone(REFUSED, OWN_DRAIN)
    assert not is_drain_gone(node("IDLE+DRAIN", "Prolog error"), OWN_DRAIN)


def test_after_reading_records_own_drain() -> None:
    earlier = DrainRecord(reason=ECC, pending_reason=XID, pending_since=NOW - 1)
    updated = after_reading(earlier, node("IDLE+DRAIN+REBOOT_REQUESTED", XID), "b2", NOW)
    assert updated == DrainRecord(reason=XID, confirmed_at=NOW, boot_id="b2", reboot_pending=True, reason_time=5.0)


def test_after_reading_records_overriding_reason() -> None:
    updated = after_reading(OWN_DRAIN, node("IDLE+DRAIN", "fan"), "b1", NOW)
    assert updated == DrainRecord(overriding_reason="fan", confirmed_at=NOW, boot_id="b1")
    assert not is_drain_gone(node("IDLE+DRAIN", "fan"), updated)
    assert is_drain_gone(node("IDLE"), updated)
    assert after_drain_ended(updated, node("IDLE"), NOW) == DrainRecord()


def test_ended_drain_is_recorded_until_saved_by_slurmctld() -> None:
    after_end, ended_drain = (
        after_drain_ended(OWN_DRAIN, node("IDLE+DRAIN", f"{XID} : Not responding"), NOW),
        EndedDrain(XID, XID, 5.0, NOW),
    )
    assert after_end == DrainRecord(ended_drain=ended_drain)
    assert next_read_at(after_end) == NOW + SAVED_SECONDS
    assert mark_saved(after_end, NOW + SAVED_SECONDS - 1) == after_end
    saved = mark_saved(after_end, NOW + SAVED_SECONDS)
    assert next_read_at(saved) == 0.0
    for state in (node("IDLE+DRAIN", XID), node("IDLE+DRAIN+INVALID_REG", XID)):
        assert restored_drain(state, after_end) == after_end.ended_drain
        assert not restored_drain(state, saved)
        assert drain_owner(state, after_end) is drain_owner(state, saved) is Owner.OTHER
        assert drain_owner(state, after_restored_drain(after_end, ended_drain, NOW)) is Owner.HEALTHD
        assert decide(REPAIRED, state, saved, ACT, NOW) == Leave(
            "drained by Slurm, with the Reason from an earlier drain by healthd"
        )
    assert not restored_drain(node("IDLE", XID), after_end), "24.11 keeps the reason"
    restored_record = after_reading(
        after_restored_drain(after_end, ended_drain, NOW), node("IDLE+DRAIN", XID), "b1", NOW
    )
    assert restored_record == replace(OWN_DRAIN, confirmed_at=NOW)


def drained_node(reason: str, stamp: float) -> NodeState:
    return NodeState("n1", frozenset({"IDLE", "DRAIN"}), reason, "root", stamp)


def test_restored_drain_finds_every_earlier_drain() -> None:
    record = DrainRecord()
    for stamp, reason in enumerate((XID, ECC, XID), 1):
        record = replace(record, pending_reason=reason, pending_since=NOW)
        record = after_reading(record, drained_node(reason, stamp), "b1", NOW)
        record = after_drain_ended(record, node("IDLE"), NOW + stamp)
    assert record.ended_drain == EndedDrain(XID, XID, 3.0, NOW + 3)
    for stamp, reason in enumerate((XID, ECC, XID), 1):
        state = drained_node(reason, stamp)
        ended_drain = restored_drain(state, record)
        assert ended_drain == EndedDrain(reason, reason, stamp, NOW + stamp)
        restored_record = after_restored_drain(record, ended_drain, NOW)
        assert drain_owner(state, restored_record) is Owner.HEALTHD
        other_times = {1.0, 2.0, 3.0} - {stamp}
        assert {e.reason_time for e in restored_record.earlier_drains} == other_times, (
            "these may be restored from another saved state"
        )
    assert restored_drain(drained_node(XID, 4), record) is None, "healthd's reason, set by another user"
    assert restored_drain(drained_node("fan", 1), record) is None


def test_restored_drain_finds_replaced_reason() -> None:
    record = after_reading(replace(OWN_DRAIN, pending_reason=ECC), drained_node(ECC, 6.0), "b1", NOW)
    assert (record.reason, record.earlier_drains) == (ECC, (EndedDrain(XID, XID, 5.0, NOW),))
    ended_drain = restored_drain(drained_node(XID, 5.0), record)
    assert ended_drain is not None
    restored_record = after_restored_drain(record, ended_drain, NOW)
    assert (restored_record.reason, restored_record.reason_time, restored_record.earlier_drains) == (
        XID,
        5.0,
        (EndedDrain(ECC, ECC, 6.0, NOW),),
    )


def test_earlier_drains_are_bounded_and_end_with_operator() -> None:
    record = DrainRecord()
    for stamp in range(1, MAX_EARLIER + 10):
        record = after_reading(replace(record, pending_reason=XID), drained_node(XID, stamp), "b1", NOW)
        record = after_drain_ended(record, node("IDLE"), NOW)
    assert [e.reason_time for e in record.earlier_drains] == list(range(9, MAX_EARLIER + 9))
    own_again = after_reading(replace(record, pending_reason=XID), drained_node(XID, 50.0), "b1", NOW)
    overridden = after_reading(own_again, drained_node("fan", 51.0), "b1", NOW)
    assert (overridden.earlier_drains, overridden.reason_time) == ((), 0.0)
    assert restored_drain(drained_node(XID, 50.0), overridden) is None, "the operator who took over must lift it"


@pytest.mark.parametrize(
    "state",
    [
        NodeState("n1", frozenset({"IDLE", "DRAIN"}), XID, "root", 6.0),  # healthd's reason, set again by another user
        node("IDLE+DRAIN", ECC),
        node("IDLE+DRAIN", f"{XID}, RMA 7"),
        node("IDLE+DRAIN", "Prolog error"),
    ],
)
def test_other_drain_is_not_restored_drain(state: NodeState) -> None:
    record = DrainRecord(ended_drain=EndedDrain(XID, XID, 5.0, NOW))
    assert not is_stale_reason(state, record)
    assert not restored_drain(state, record)
    assert drain_owner(state, record) in (Owner.OTHER, Owner.UNRECORDED_HEALTHD)


def test_next_drain_with_same_reason_is_own() -> None:
    ended_record = DrainRecord(ended_drain=EndedDrain(XID, XID, 0.0, NOW))
    sent_record = replace(ended_record, pending_reason=XID, pending_since=NOW)
    assert drain_owner(node("IDLE+DRAIN", XID), sent_record) is Owner.HEALTHD
    assert after_reading(sent_record, node("IDLE+DRAIN", XID), "b1", NOW).ended_drain is None


def test_after_reading_ignores_operator_drain() -> None:
    assert after_reading(DrainRecord(), node("IDLE+DRAIN", "fan"), "b1", NOW) == DrainRecord()


def test_pending_reason_is_kept_while_in_flight() -> None:
    sent_record = DrainRecord(pending_reason=XID, pending_since=NOW)
    assert after_reading(sent_record, node("IDLE"), "b1", NOW + IN_FLIGHT_SECONDS) == sent_record
    assert after_reading(sent_record, node("IDLE"), "b1", NOW + IN_FLIGHT_SECONDS + 1) == DrainRecord()


@pytest.mark.parametrize(
    ("record", "boot_id", "is_lost"),
    [
        (OWN_DRAIN, "b1", False),
        (OWN_DRAIN, "b2", True),
        (replace(OWN_DRAIN, reboot_pending=True), "b1", True),
        (replace(OWN_DRAIN, resume_sent_at=NOW - 1), "b1", True),  # resumed by healthd, and not read as drained since
        (replace(OWN_DRAIN, resume_sent_at=NOW - 80), "b1", True),  # resumed by healthd, perhaps applied late
        (replace(OWN_DRAIN, resume_sent_at=NOW - 1000), "b1", False),
    ],
)
def test_is_certainly_lost(record: DrainRecord, boot_id: str, is_lost: bool) -> None:
    assert is_certainly_lost(node("IDLE"), record, boot_id, ACT, NOW) is is_lost


@pytest.mark.parametrize("state", ["IDLE+POWERING_DOWN", "IDLE+POWERED_DOWN", "IDLE+POWERING_UP+NOT_RESPONDING"])
def test_power_saving_removes_drain_without_operator(state: str) -> None:
    assert is_certainly_lost(node(state, XID), OWN_DRAIN, "b1", ACT, NOW)
    assert decide(CRITICAL, node(state, XID), DrainRecord(), ACT, NOW) == Drain(XID, True)


@pytest.mark.parametrize(
    "flag",
    [
        *("DOWN", "INVALID_REG", "REBOOT_REQUESTED", "REBOOT_ISSUED", "REBOOT^"),
        *("POWER_DOWN", "POWER_DRAIN", "POWERING_DOWN", "POWERED_DOWN", "POWER_UP", "POWERING_UP"),
    ],
)
def test_repaired_node_waits_until_slurm_is_ready(flag: str) -> None:
    decision = decide(REPAIRED, node(f"IDLE+DRAIN+{flag}", XID), OWN_DRAIN, ACT, NOW)
    assert decision == Leave(f"repaired, but the node is {flag} in Slurm")
    assert isinstance(decide(DEGRADED, node(f"IDLE+{flag}"), DrainRecord(), ACT, NOW), Drain)


@pytest.mark.parametrize(
    "flags",
    [
        *("MAINTENANCE+RESERVED", "RESERVED", "PLANNED", "COMPLETING", "NOT_RESPONDING", "CLOUD", "DYNAMIC_NORM"),
        *("PERFCTRS", "BLOCKED"),
    ],
)
def test_other_node_flags_change_nothing(flags: str) -> None:
    assert decide(DEGRADED, node(f"MIXED+{flags}"), DrainRecord(), ACT, NOW) == Drain(XID, False)
    assert isinstance(decide(REPAIRED, node(f"MIXED+DRAIN+{flags}", XID), OWN_DRAIN, ACT, NOW), Resume)
    assert decide(REPAIRED, node(f"MIXED+{flags}"), DrainRecord(), ACT, NOW) == Leave("nothing to do")


def test_missing_reason_is_set_again() -> None:
    without_reason = node("IDLE+DRAIN+POWERING_UP")
    assert decide(DEGRADED, without_reason, OWN_DRAIN, ACT, NOW) == Drain(XID, False)
    assert isinstance(decide(REPAIRED, node("IDLE+DRAIN"), OWN_DRAIN, ACT, NOW), Resume)


@pytest.mark.parametrize(
    ("confirmed_by", "current", "is_lost"),
    [
        *(("1 a", "1 a", False), ("1 a", "2 a", True), ("1 a", "1 b", True), ("", "1 a", False), ("1 a", "1", True)),
        *((UNKNOWN_CONTROLLER, "1 a", True), (UNKNOWN_CONTROLLER, "1", True)),
    ],
)
def test_change_is_lost_by_other_controller(confirmed_by: str, current: str, is_lost: bool) -> None:
    assert is_lost_by_slurmctld(OWN_DRAIN.confirmed_at, NOW - 9e5, confirmed_by, current) is is_lost


@pytest.mark.parametrize(
    ("started", "is_lost"), [(NOW - 100, False), (NOW - 63, False), (NOW - 61, True), (NOW - 10, True)]
)
def test_drain_is_lost_by_restarted_slurmctld(started: float, is_lost: bool) -> None:
    assert is_lost_by_slurmctld(OWN_DRAIN.confirmed_at, started, "", "1 ctl1") is is_lost


def test_needs_no_query_without_drain_or_cause() -> None:
    assert needs_no_query(REPAIRED, DrainRecord(resume_sent_at=NOW))
    assert not needs_no_query(DEGRADED, DrainRecord())
    for record in (
        OWN_DRAIN,
        DrainRecord(pending_reason=XID),
        DrainRecord(overriding_reason="fan"),
        DrainRecord(adopted_reason=XID),
    ):
        assert not needs_no_query(REPAIRED, record)


@pytest.mark.parametrize(
    ("flags", "is_expected"),
    [
        ({"IDLE", "DRAIN"}, True),
        ({"IDLE", "DRAIN", "MAINTENANCE"}, True),
        ({"IDLE"}, False),
        ({"ALLOCATED", "DRAIN"}, False),
        ({"MIXED", "DRAIN"}, False),
        ({"IDLE", "DRAIN", "COMPLETING"}, False),
        ({"IDLE", "DRAIN", "NOT_RESPONDING"}, False),
        ({"DOWN", "DRAIN"}, False),
        (set(), False),
    ],
)
def test_is_idle_requires_drained_node_without_jobs(flags: set[str], is_expected: bool) -> None:
    assert is_idle(NodeState("n1", frozenset(flags))) is is_expected


def test_describe_every_decision() -> None:
    assert describe(Drain(XID, False)) == f'drain with "{XID}"'
    assert describe(Drain(XID, True)) == f'drain with "{XID}" and requeue'
    assert describe(Resume("why")) == "resume"
    assert describe(Leave("why")) == "why"


CONFIRMED = DrainRecord(reason=XID, confirmed_at=70.0, boot_id="b")


@pytest.mark.parametrize(
    ("node_state", "record", "expected"),
    [
        (node("IDLE+DRAIN", XID), CONFIRMED, 65.0),
        (node("ALLOCATED+DRAIN", "fan broken"), DrainRecord(overriding_reason="fan broken", boot_id="b"), 65.0),
        (node("IDLE+DRAIN", XID), replace(CONFIRMED, boot_id="the boot before"), None),
        (node("IDLE+DRAIN+NOT_RESPONDING", XID), CONFIRMED, None),  # the drain may be removed when slurmd registers
        (node("DOWN+DRAIN+REBOOT_ISSUED", XID), CONFIRMED, None),
        (node("IDLE"), CONFIRMED, None),  # lost or resumed
        (node("IDLE+DRAIN", XID), DrainRecord(boot_id="b"), None),
        (None, CONFIRMED, None),
    ],
)
def test_jobs_blocked_since_requires_drain_in_this_boot(
    node_state: NodeState | None, record: DrainRecord, expected: float | None
) -> None:
    assert jobs_blocked_since(node_state, record, "b") == (expected if expected is not None else float("inf"))


@pytest.mark.parametrize(
    ("flags", "is_booted", "is_expected"),
    [
        ({"DOWN", "DRAIN"}, True, True),
        ({"DOWN", "DRAIN"}, False, False),
        ({"DOWN"}, True, False),
        ({"DOWN", "DRAIN", "NOT_RESPONDING"}, True, False),
        ({"DOWN", "DRAIN", "REBOOT_ISSUED"}, True, False),
    ],
)
def test_down_node_is_idle_only_after_own_boot(flags: set[str], is_booted: bool, is_expected: bool) -> None:
    assert is_idle(NodeState("n1", frozenset(flags)), is_booted) is is_expected
