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
OURS = DrainRecord(reason=XID, confirmed_at=NOW - 60, boot_id="b1", reason_time=5.0)


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


def over_at(moment: float) -> DrainRecord:
    return DrainRecord(ended_drain=EndedDrain(XID, XID, NOW - 60, moment))


@pytest.mark.parametrize(
    ("verdict", "state", "memory", "decision"),
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
        (CRITICAL, node("MIXED+DRAIN", XID), OURS, Drain(XID, True)),
        (DEGRADED, node("IDLE+DRAIN", XID), OURS, Drain(XID, False)),
        (CRITICAL, node("IDLE+DRAIN", "Kill task failed"), OURS, Drain("Kill task failed", True)),
        (
            CRITICAL,
            node("DOWN+DRAIN+REBOOT_ISSUED", f"{XID} : reboot issued"),
            OURS,
            Drain(f"{XID} : reboot issued", True),
        ),
        (CRITICAL, node("IDLE+DRAIN", XID), DrainRecord(pending_reason=XID), Drain(XID, True)),
        (REPAIRED, node("IDLE+DRAIN", XID), OURS, Resume("every check that can drain has completed clean")),
        (
            REPAIRED,
            node("IDLE+DRAIN", "Kill task failed"),
            OURS,
            Resume("every check that can drain has completed clean"),
        ),
        (
            NOT_YET,
            node("IDLE+DRAIN", XID),
            OURS,
            Leave("drained by healthd until every check that can drain has completed clean"),
        ),
        (
            REPAIRED,
            node("DOWN+DRAIN", XID),
            OURS,
            Leave("repaired, but the node is DOWN in Slurm"),
        ),
        (
            REPAIRED,
            node("IDLE+DRAIN+REBOOT_REQUESTED", XID),
            OURS,
            Leave("repaired, but the node is REBOOT_REQUESTED in Slurm"),
        ),
        # the reason changes only if another cause is the worst
        (
            faulty(cause(text=ECC), cause(Severity.DEGRADED)),
            node("IDLE+DRAIN", XID),
            OURS,
            Drain(f"{ECC} (+1 more)", True),
        ),
        (faulty(cause(text=ECC), cause()), node("IDLE+DRAIN", XID), OURS, Drain(XID, True)),
        (faulty(cause(text=ECC)), node("IDLE+DRAIN", "Kill task failed"), OURS, Drain(ECC, True)),
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
        (REPAIRED, node("IDLE+DRAIN", "fan"), OURS, Leave('drained by root: "fan"')),
        (REPAIRED, node("IDLE+DRAIN", ECC), OURS, Leave(f'drained by root: "{ECC}"')),
        (REPAIRED, node("IDLE+DRAIN", f"{XID}, RMA 7"), OURS, Leave(f'drained by root: "{XID}, RMA 7"')),
        (CRITICAL, node("IDLE+DRAIN", f"{XID}, RMA 7"), OURS, Drain(f"{XID}, RMA 7", True)),
        (
            REPAIRED,
            node("IDLE+DRAIN", "Kill task failed"),
            DrainRecord(),
            Leave('drained by root: "Kill task failed"'),
        ),
    ],
)
def test_what_is_decided_to_act(
    verdict: Verdict, state: NodeState, memory: DrainRecord, decision: Drain | Resume | Leave
) -> None:
    assert decide(verdict, state, memory, ACT, NOW) == decision


@pytest.mark.parametrize("verdict", [CRITICAL, DEGRADED, REPAIRED])
def test_a_node_that_could_not_be_read_is_left_alone(verdict: Verdict) -> None:
    assert isinstance(decide(verdict, None, OURS, ACT, NOW), Leave)


@pytest.mark.parametrize(
    ("policy", "why"),
    [
        (Policy(), 'mode is "observe"'),
        (Policy(paused_until=NOW + 1), 'mode is "observe"'),
        (Policy(mode=Mode.ACT, paused_until=NOW + 1), "paused"),
        (Policy(mode=Mode.DRAIN, paused_until=NOW + 1), "paused"),
    ],
)
def test_observing_and_paused_it_only_says_what_it_would_do(policy: Policy, why: str) -> None:
    drain = Leave(why, would=f'drain with "{XID}" and requeue')
    assert decide(CRITICAL, node("IDLE"), DrainRecord(), policy, NOW) == drain
    assert decide(REPAIRED, node("IDLE+DRAIN", XID), OURS, policy, NOW) == Leave(why, would="resume")
    assert decide(REPAIRED, node("IDLE"), DrainRecord(), policy, NOW) == Leave("nothing to do")


def test_a_pause_that_is_over_no_longer_counts() -> None:
    policy = Policy(mode=Mode.ACT, paused_until=NOW)
    assert decide(CRITICAL, node("IDLE"), DrainRecord(), policy, NOW) == Drain(XID, True)


def test_in_mode_drain_nothing_is_requeued() -> None:
    policy = Policy(mode=Mode.DRAIN)
    assert decide(CRITICAL, node("IDLE"), DrainRecord(), policy, NOW) == Drain(XID, False)
    assert decide(CRITICAL, node("IDLE+DRAIN", "fan"), DrainRecord(), policy, NOW) == Drain("fan", False)
    assert isinstance(decide(REPAIRED, node("IDLE+DRAIN", XID), OURS, policy, NOW), Resume)


@pytest.mark.parametrize(
    ("state", "memory", "whose"),
    [
        (node("IDLE"), DrainRecord(), Owner.NONE),
        (node("IDLE"), OURS, Owner.NONE),
        (node("IDLE+DRAIN", XID), OURS, Owner.HEALTHD),
        (node("IDLE+DRAIN", XID), DrainRecord(), Owner.UNRECORDED_HEALTHD),
        (node("IDLE+DRAIN", XID), DrainRecord(adopted_reason=XID), Owner.UNRECORDED_HEALTHD),
        (node("IDLE+DRAIN", f"{XID} : reboot issued : reboot timed out"), OURS, Owner.HEALTHD),
        (node("IDLE+DRAIN", "Kill task failed : reboot issued"), OURS, Owner.HEALTHD),
        (node("IDLE+DRAIN", "Kill task failed (JobId=7 StepId=batch)"), OURS, Owner.HEALTHD),  # 26.05
        (node("IDLE+DRAIN", "Kill task failed, RMA 7"), OURS, Owner.OTHER),
        # 24.11: slurmd is down and returns with one GPU less
        (node("DOWN+DRAIN+NOT_RESPONDING", f"{XID} : Not responding"), OURS, Owner.HEALTHD),
        (node("IDLE+DRAIN+INVALID_REG", "gres/gpu count reported lower than configured (7 < 8)"), OURS, Owner.HEALTHD),
        (node("IDLE+DRAIN+INVALID_REG", "Low RealMemory (reported:1 < 100.00% of configured:2)"), OURS, Owner.HEALTHD),
        (node("IDLE+DRAIN+INVALID_REG", "gres/gpu count too low (7 < 8)"), DrainRecord(), Owner.OTHER),
        (node("DOWN+NOT_RESPONDING", "fan broken : Not responding"), DrainRecord(), Owner.NONE),
        (node("DOWN", "fan broken"), DrainRecord(), Owner.OTHER),
        (node("IDLE+DRAIN", f"{XID} RMA 7"), DrainRecord(overriding_reason=f"{XID} RMA 7"), Owner.OTHER),
        (node("IDLE+DRAIN", f"{XID} RMA 7"), DrainRecord(pending_reason=XID), Owner.OTHER),
        (node("IDLE+DRAIN", "Prolog error"), OURS, Owner.OTHER),
        (node("IDLE+DRAIN", ""), OURS, Owner.HEALTHD),  # 22.05 drops the reason when it powers up a node
        (node("IDLE+DRAIN", ""), DrainRecord(), Owner.OTHER),
        (node("IDLE+DRAIN", ECC), replace(OURS, pending_reason=ECC), Owner.HEALTHD),
    ],
)
def test_whose_drain_it_is(state: NodeState, memory: DrainRecord, whose: Owner) -> None:
    assert drain_owner(state, memory) is whose


@pytest.mark.parametrize(
    ("state", "refusals", "memory", "is_ours"),
    [
        (PROLOG_ERROR, [NOW], DrainRecord(), True),
        (PROLOG_ERROR, [NOW + 5], DrainRecord(), True),  # clock difference
        (PROLOG_ERROR, [NOW + 5.1], DrainRecord(), False),  # drained before the refusal, by another prolog
        (PROLOG_ERROR, [NOW, NOW + 30, NOW + 50], DrainRecord(), True),  # Slurm keeps the time of the first refusal
        (PROLOG_ERROR, [NOW - 15], DrainRecord(), True),
        (PROLOG_ERROR, [NOW - 15.1], DrainRecord(), False),
        (PROLOG_ERROR, [NOW - 10], over_at(NOW - 5), True),  # it ended just before Slurm received the refusal
        (PROLOG_ERROR, [NOW - 10], over_at(NOW - 4.9), False),  # the drain of that refusal has ended
        (PROLOG_ERROR, [NOW - 10, NOW - 1], over_at(NOW - 4.9), True),
        (PROLOG_ERROR, [], DrainRecord(), False),
        (PROLOG_ERROR, [], DrainRecord(prolog_drain_time=NOW), True),  # recorded by the last reading
        (PROLOG_ERROR, [], DrainRecord(prolog_drain_time=NOW - 1), False),  # that drain ended; this is another one
        (replace(PROLOG_ERROR, reason="Epilog error"), [NOW], DrainRecord(prolog_drain_time=NOW), False),
        (replace(PROLOG_ERROR, reason="Prolog error, fan"), [NOW], DrainRecord(prolog_drain_time=NOW), False),
        # 24.11 keeps the reason of an ended drain
        (replace(PROLOG_ERROR, flags=frozenset({"IDLE"})), [NOW], DrainRecord(prolog_drain_time=NOW), False),
    ],
)
def test_a_prolog_error_is_of_our_prolog_if_that_refused_a_job_right_before(
    state: NodeState, refusals: list[float], memory: DrainRecord, is_ours: bool
) -> None:
    seen = mark_prolog_drain(state, refusals, memory)
    assert seen.drained_by_own_prolog is is_ours
    assert (drain_owner(seen, DrainRecord()) is Owner.NONE) is (is_ours or "DRAIN" not in state.flags)


def test_a_drain_that_our_prologs_refusal_made_concerns_us_until_it_is_over() -> None:
    noted = after_reading(DrainRecord(), REFUSED, "b1", NOW)
    assert noted == DrainRecord(prolog_drain_time=5.0)
    assert not needs_no_query(REPAIRED, noted)
    assert needs_no_query(REPAIRED, after_reading(noted, node("IDLE"), "b1", NOW))
    assert needs_no_query(REPAIRED, after_reading(noted, node("IDLE+DRAIN", "fan"), "b1", NOW)), "an operator took over"


def test_a_job_that_our_prolog_refused_though_our_drain_stood_shows_that_a_person_resumed_the_node() -> None:
    assert is_drain_gone(REFUSED, OURS)
    assert not is_drain_gone(node("IDLE+DRAIN", "Prolog error"), OURS)


def test_a_reading_of_our_drain_is_remembered() -> None:
    before = DrainRecord(reason=ECC, pending_reason=XID, pending_since=NOW - 1)
    after = after_reading(before, node("IDLE+DRAIN+REBOOT_REQUESTED", XID), "b2", NOW)
    assert after == DrainRecord(reason=XID, confirmed_at=NOW, boot_id="b2", reboot_pending=True, reason_time=5.0)


def test_an_operators_words_over_ours_are_remembered_until_they_are_gone() -> None:
    after = after_reading(OURS, node("IDLE+DRAIN", "fan"), "b1", NOW)
    assert after == DrainRecord(overriding_reason="fan", confirmed_at=NOW, boot_id="b1")
    assert not is_drain_gone(node("IDLE+DRAIN", "fan"), after)
    assert is_drain_gone(node("IDLE"), after)
    assert after_drain_ended(after, node("IDLE"), NOW) == DrainRecord()


def test_a_drain_of_ours_that_is_over_is_known_until_slurmctld_has_surely_saved_that() -> None:
    over, lifted = (
        after_drain_ended(OURS, node("IDLE+DRAIN", f"{XID} : Not responding"), NOW),
        EndedDrain(XID, XID, 5.0, NOW),
    )
    assert over == DrainRecord(ended_drain=lifted)
    assert next_read_at(over) == NOW + SAVED_SECONDS
    assert mark_saved(over, NOW + SAVED_SECONDS - 1) == over
    saved = mark_saved(over, NOW + SAVED_SECONDS)
    assert next_read_at(saved) == 0.0
    for state in (node("IDLE+DRAIN", XID), node("IDLE+DRAIN+INVALID_REG", XID)):
        assert restored_drain(state, over) == over.ended_drain
        assert not restored_drain(state, saved)
        assert drain_owner(state, over) is drain_owner(state, saved) is Owner.OTHER
        assert drain_owner(state, after_restored_drain(over, lifted, NOW)) is Owner.HEALTHD
        assert decide(REPAIRED, state, saved, ACT, NOW) == Leave(
            "drained by Slurm, with the Reason from an earlier drain by healthd"
        )
    assert not restored_drain(node("IDLE", XID), over), "24.11 keeps the reason"
    back = after_reading(after_restored_drain(over, lifted, NOW), node("IDLE+DRAIN", XID), "b1", NOW)
    assert back == replace(OURS, confirmed_at=NOW)


def drained(reason: str, stamp: float) -> NodeState:
    return NodeState("n1", frozenset({"IDLE", "DRAIN"}), reason, "root", stamp)


def test_each_drain_before_the_last_one_is_known_when_slurmctld_brings_it_back() -> None:
    memory = DrainRecord()
    for stamp, reason in enumerate((XID, ECC, XID), 1):
        memory = replace(memory, pending_reason=reason, pending_since=NOW)
        memory = after_reading(memory, drained(reason, stamp), "b1", NOW)
        memory = after_drain_ended(memory, node("IDLE"), NOW + stamp)
    assert memory.ended_drain == EndedDrain(XID, XID, 3.0, NOW + 3)
    for stamp, reason in enumerate((XID, ECC, XID), 1):
        state = drained(reason, stamp)
        old = restored_drain(state, memory)
        assert old == EndedDrain(reason, reason, stamp, NOW + stamp)
        back = after_restored_drain(memory, old, NOW)
        assert drain_owner(state, back) is Owner.HEALTHD
        others = {1.0, 2.0, 3.0} - {stamp}
        assert {e.reason_time for e in back.earlier_drains} == others, "these may be restored from another saved state"
    assert restored_drain(drained(XID, 4), memory) is None, "healthd's reason, set by another user"
    assert restored_drain(drained("fan", 1), memory) is None


def test_our_words_that_newer_ones_replaced_are_ours_when_slurmctld_brings_them_back() -> None:
    memory = after_reading(replace(OURS, pending_reason=ECC), drained(ECC, 6.0), "b1", NOW)
    assert (memory.reason, memory.earlier_drains) == (ECC, (EndedDrain(XID, XID, 5.0, NOW),))
    old = restored_drain(drained(XID, 5.0), memory)
    assert old is not None
    back = after_restored_drain(memory, old, NOW)
    assert (back.reason, back.reason_time, back.earlier_drains) == (XID, 5.0, (EndedDrain(ECC, ECC, 6.0, NOW),))


def test_the_drains_that_are_remembered_have_a_bound_and_end_where_an_operator_takes_over() -> None:
    memory = DrainRecord()
    for stamp in range(1, MAX_EARLIER + 10):
        memory = after_reading(replace(memory, pending_reason=XID), drained(XID, stamp), "b1", NOW)
        memory = after_drain_ended(memory, node("IDLE"), NOW)
    assert [e.reason_time for e in memory.earlier_drains] == list(range(9, MAX_EARLIER + 9))
    again = after_reading(replace(memory, pending_reason=XID), drained(XID, 50.0), "b1", NOW)
    theirs = after_reading(again, drained("fan", 51.0), "b1", NOW)
    assert (theirs.earlier_drains, theirs.reason_time) == ((), 0.0)
    assert restored_drain(drained(XID, 50.0), theirs) is None, "the operator who took over must lift it"


@pytest.mark.parametrize(
    "state",
    [
        NodeState("n1", frozenset({"IDLE", "DRAIN"}), XID, "root", 6.0),  # healthd's reason, set again by another user
        node("IDLE+DRAIN", ECC),
        node("IDLE+DRAIN", f"{XID}, RMA 7"),
        node("IDLE+DRAIN", "Prolog error"),
    ],
)
def test_another_drain_after_ours_is_not_taken_for_it(state: NodeState) -> None:
    over = DrainRecord(ended_drain=EndedDrain(XID, XID, 5.0, NOW))
    assert not is_stale_reason(state, over)
    assert not restored_drain(state, over)
    assert drain_owner(state, over) in (Owner.OTHER, Owner.UNRECORDED_HEALTHD)


def test_our_next_drain_in_the_same_words_is_ours() -> None:
    over = DrainRecord(ended_drain=EndedDrain(XID, XID, 0.0, NOW))
    sent = replace(over, pending_reason=XID, pending_since=NOW)
    assert drain_owner(node("IDLE+DRAIN", XID), sent) is Owner.HEALTHD
    assert after_reading(sent, node("IDLE+DRAIN", XID), "b1", NOW).ended_drain is None


def test_an_operators_drain_that_never_was_ours_is_not_remembered() -> None:
    assert after_reading(DrainRecord(), node("IDLE+DRAIN", "fan"), "b1", NOW) == DrainRecord()


def test_what_was_sent_stays_known_until_it_can_no_longer_be_under_way() -> None:
    sent = DrainRecord(pending_reason=XID, pending_since=NOW)
    assert after_reading(sent, node("IDLE"), "b1", NOW + IN_FLIGHT_SECONDS) == sent
    assert after_reading(sent, node("IDLE"), "b1", NOW + IN_FLIGHT_SECONDS + 1) == DrainRecord()


@pytest.mark.parametrize(
    ("memory", "boot_id", "lost"),
    [
        (OURS, "b1", False),
        (OURS, "b2", True),
        (replace(OURS, reboot_pending=True), "b1", True),
        (replace(OURS, resume_sent_at=NOW - 1), "b1", True),  # resumed by healthd, and not read as drained since
        (replace(OURS, resume_sent_at=NOW - 80), "b1", True),  # resumed by healthd, perhaps applied late
        (replace(OURS, resume_sent_at=NOW - 1000), "b1", False),
    ],
)
def test_a_drain_is_lost_without_an_operator(memory: DrainRecord, boot_id: str, lost: bool) -> None:
    assert is_certainly_lost(node("IDLE"), memory, boot_id, ACT, NOW) is lost


@pytest.mark.parametrize("state", ["IDLE+POWERING_DOWN", "IDLE+POWERED_DOWN", "IDLE+POWERING_UP+NOT_RESPONDING"])
def test_switching_a_node_off_takes_its_drain_away_without_an_operator(state: str) -> None:
    assert is_certainly_lost(node(state, XID), OURS, "b1", ACT, NOW)
    assert decide(CRITICAL, node(state, XID), DrainRecord(), ACT, NOW) == Drain(XID, True)


@pytest.mark.parametrize(
    "flag",
    [
        *("DOWN", "INVALID_REG", "REBOOT_REQUESTED", "REBOOT_ISSUED", "REBOOT^"),
        *("POWER_DOWN", "POWER_DRAIN", "POWERING_DOWN", "POWERED_DOWN", "POWER_UP", "POWERING_UP"),
    ],
)
def test_a_repaired_node_waits_until_slurm_is_through_with_it(flag: str) -> None:
    waits = decide(REPAIRED, node(f"IDLE+DRAIN+{flag}", XID), OURS, ACT, NOW)
    assert waits == Leave(f"repaired, but the node is {flag} in Slurm")
    assert isinstance(decide(DEGRADED, node(f"IDLE+{flag}"), DrainRecord(), ACT, NOW), Drain)


@pytest.mark.parametrize(
    "flags",
    [
        *("MAINTENANCE+RESERVED", "RESERVED", "PLANNED", "COMPLETING", "NOT_RESPONDING", "CLOUD", "DYNAMIC_NORM"),
        *("PERFCTRS", "BLOCKED"),
    ],
)
def test_what_else_slurm_says_of_a_node_changes_nothing(flags: str) -> None:
    assert decide(DEGRADED, node(f"MIXED+{flags}"), DrainRecord(), ACT, NOW) == Drain(XID, False)
    assert isinstance(decide(REPAIRED, node(f"MIXED+DRAIN+{flags}", XID), OURS, ACT, NOW), Resume)
    assert decide(REPAIRED, node(f"MIXED+{flags}"), DrainRecord(), ACT, NOW) == Leave("nothing to do")


def test_words_that_slurm_dropped_are_written_again() -> None:
    bare = node("IDLE+DRAIN+POWERING_UP")
    assert decide(DEGRADED, bare, OURS, ACT, NOW) == Drain(XID, False)
    assert isinstance(decide(REPAIRED, node("IDLE+DRAIN"), OURS, ACT, NOW), Resume)


@pytest.mark.parametrize(
    ("before", "now", "lost"),
    [
        *(("1 a", "1 a", False), ("1 a", "2 a", True), ("1 a", "1 b", True), ("", "1 a", False), ("1 a", "1", True)),
        *((UNKNOWN_CONTROLLER, "1 a", True), (UNKNOWN_CONTROLLER, "1", True)),
    ],
)
def test_a_change_is_lost_by_another_controller_than_the_one_that_confirmed_it(
    before: str, now: str, lost: bool
) -> None:
    assert is_lost_by_slurmctld(OURS.confirmed_at, NOW - 9e5, before, now) is lost


@pytest.mark.parametrize(
    ("started", "lost"), [(NOW - 100, False), (NOW - 63, False), (NOW - 61, True), (NOW - 10, True)]
)
def test_a_drain_is_lost_by_a_slurmctld_that_started_after_it_was_last_read(started: float, lost: bool) -> None:
    assert is_lost_by_slurmctld(OURS.confirmed_at, started, "", "1 ctl1") is lost


def test_slurm_is_not_asked_while_nothing_is_wanted_and_nothing_stands() -> None:
    assert needs_no_query(REPAIRED, DrainRecord(resume_sent_at=NOW))
    assert not needs_no_query(DEGRADED, DrainRecord())
    for memory in (
        OURS,
        DrainRecord(pending_reason=XID),
        DrainRecord(overriding_reason="fan"),
        DrainRecord(adopted_reason=XID),
    ):
        assert not needs_no_query(REPAIRED, memory)


@pytest.mark.parametrize(
    ("flags", "idle"),
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
def test_a_node_is_idle_when_it_is_drained_and_the_last_epilog_is_over(flags: set[str], idle: bool) -> None:
    assert is_idle(NodeState("n1", frozenset(flags))) is idle


def test_every_decision_has_words() -> None:
    assert describe(Drain(XID, False)) == f'drain with "{XID}"'
    assert describe(Drain(XID, True)) == f'drain with "{XID}" and requeue'
    assert describe(Resume("why")) == "resume"
    assert describe(Leave("why")) == "why"


STOOD = DrainRecord(reason=XID, confirmed_at=70.0, boot_id="b")


@pytest.mark.parametrize(
    ("read", "memory", "since"),
    [
        (node("IDLE+DRAIN", XID), STOOD, 65.0),
        (node("ALLOCATED+DRAIN", "fan broken"), DrainRecord(overriding_reason="fan broken", boot_id="b"), 65.0),
        (node("IDLE+DRAIN", XID), replace(STOOD, boot_id="the boot before"), None),
        (node("IDLE+DRAIN+NOT_RESPONDING", XID), STOOD, None),  # the drain may be removed when slurmd registers
        (node("DOWN+DRAIN+REBOOT_ISSUED", XID), STOOD, None),
        (node("IDLE"), STOOD, None),  # lost or resumed
        (node("IDLE+DRAIN", XID), DrainRecord(boot_id="b"), None),
        (None, STOOD, None),
    ],
)
def test_slurm_holds_a_node_by_itself_once_a_drain_has_stood_for_a_minute_in_this_boot(
    read: NodeState | None, memory: DrainRecord, since: float | None
) -> None:
    assert jobs_blocked_since(read, memory, "b") == (since if since is not None else float("inf"))
