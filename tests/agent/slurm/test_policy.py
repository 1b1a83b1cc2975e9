"""The table of policy.py, row by row."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from healthd.agent.slurm.policy import (
    EARLIER,
    IN_FLIGHT_SECONDS,
    SAVED_SECONDS,
    UNKNOWN_CONTROLLER,
    Owner,
    Policy,
    brought_back,
    decide,
    describe,
    forget,
    held_from,
    is_gone,
    is_idle,
    is_left_over,
    is_lost_by_slurmctld,
    is_lost_for_sure,
    is_quiet,
    look_at,
    owner,
    refused_here,
    remember,
    settled_by_now,
    taken_back,
)
from healthd.common.model import (
    Clears,
    Condition,
    ConditionState,
    Drain,
    Health,
    Leave,
    Lifted,
    Mode,
    NodeState,
    Resume,
    Severity,
    SlurmMemory,
    Verdict,
)

NOW = 1_000_000.0
ACT = Policy(mode=Mode.ACT)
XID = "healthd: gpu_xid/79 0000:1b:00.0: fell off the bus"
ECC = "healthd: gpu_ecc/uncorrected 0000:1c:00.0: 3 errors"
OURS = SlurmMemory(reason=XID, confirmed_at=NOW - 60, boot_id="b1", stamp=5.0)


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


REFUSED = replace(node("IDLE+DRAIN", "Prolog error"), refused_here=True)
PROLOG_ERROR = replace(node("IDLE+DRAIN", "Prolog error"), reason_time=NOW)


def over_at(moment: float) -> SlurmMemory:
    return SlurmMemory(lifted=Lifted(XID, XID, NOW - 60, moment))


@pytest.mark.parametrize(
    ("verdict", "state", "memory", "decision"),
    [
        # nobody's drain
        (CRITICAL, node("IDLE"), SlurmMemory(), Drain(XID, True)),
        (DEGRADED, node("MIXED"), SlurmMemory(), Drain(XID, False)),
        (DEGRADED, node("MIXED+PLANNED"), SlurmMemory(), Drain(XID, False)),
        (CRITICAL, node("IDLE+MAINT"), SlurmMemory(), Drain(XID, True)),
        (CRITICAL, node("DOWN+NOT_RESPONDING", "Not responding"), SlurmMemory(), Drain(XID, True)),
        (CRITICAL, node("DOWN", "Node unexpectedly rebooted"), SlurmMemory(), Drain(XID, True)),
        (CRITICAL, node("DOWN", XID), SlurmMemory(), Drain(XID, True)),
        (CRITICAL, node("IDLE", XID), SlurmMemory(), Drain(XID, True)),  # 24.11 keeps a reason after RESUME
        (REPAIRED, node("IDLE"), SlurmMemory(), Leave("nothing to do")),
        (REPAIRED, node("IDLE", XID), SlurmMemory(), Leave("nothing to do")),
        # ours
        (CRITICAL, node("MIXED+DRAIN", XID), OURS, Drain(XID, True)),
        (DEGRADED, node("IDLE+DRAIN", XID), OURS, Drain(XID, False)),
        (CRITICAL, node("IDLE+DRAIN", "Kill task failed"), OURS, Drain("Kill task failed", True)),
        (
            CRITICAL,
            node("DOWN+DRAIN+REBOOT_ISSUED", f"{XID} : reboot issued"),
            OURS,
            Drain(f"{XID} : reboot issued", True),
        ),
        (CRITICAL, node("IDLE+DRAIN", XID), SlurmMemory(writing=XID), Drain(XID, True)),
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
        # the text changes for another worst cause only
        (
            faulty(cause(text=ECC), cause(Severity.DEGRADED)),
            node("IDLE+DRAIN", XID),
            OURS,
            Drain(f"{ECC} (+1 more)", True),
        ),
        (faulty(cause(text=ECC), cause()), node("IDLE+DRAIN", XID), OURS, Drain(XID, True)),
        (faulty(cause(text=ECC)), node("IDLE+DRAIN", "Kill task failed"), OURS, Drain(ECC, True)),
        # others'
        (CRITICAL, node("IDLE+DRAIN", "fan"), SlurmMemory(), Drain("fan", True)),
        (DEGRADED, node("IDLE+DRAIN", "fan"), SlurmMemory(), Leave('drained by root: "fan"')),
        (DEGRADED, node("DOWN", "fan"), SlurmMemory(), Leave('drained by root: "fan"')),
        (DEGRADED, node("IDLE+FAIL", "fan"), SlurmMemory(), Leave('drained by root: "fan"')),
        (
            DEGRADED,
            node("IDLE+DRAIN", "Prolog error"),
            SlurmMemory(),
            Leave(f'drained by root: "Prolog error"; healthd\'s finding: {XID}'),
        ),
        # our own prolog refused a job because of our verdict, before our drain was in Slurm
        (CRITICAL, REFUSED, SlurmMemory(), Drain(XID, True)),
        (DEGRADED, REFUSED, SlurmMemory(), Drain(XID, False)),
        (
            REPAIRED,
            REFUSED,
            SlurmMemory(),
            Resume("healthd's prolog refused a job, and Slurm drained the node; every check has completed clean"),
        ),
        (
            NOT_YET,
            REFUSED,
            SlurmMemory(),
            Leave("healthd's prolog refused a job, and Slurm drained the node; not every check is clean yet"),
        ),
        (REPAIRED, node("IDLE+DRAIN", "fan"), SlurmMemory(), Leave('drained by root: "fan"')),
        (REPAIRED, node("IDLE+DRAIN", "fan"), OURS, Leave('drained by root: "fan"')),
        (REPAIRED, node("IDLE+DRAIN", ECC), OURS, Leave(f'drained by root: "{ECC}"')),
        (REPAIRED, node("IDLE+DRAIN", f"{XID}, RMA 7"), OURS, Leave(f'drained by root: "{XID}, RMA 7"')),
        (CRITICAL, node("IDLE+DRAIN", f"{XID}, RMA 7"), OURS, Drain(f"{XID}, RMA 7", True)),
        (
            REPAIRED,
            node("IDLE+DRAIN", "Kill task failed"),
            SlurmMemory(),
            Leave('drained by root: "Kill task failed"'),
        ),
    ],
)
def test_what_is_decided_to_act(
    verdict: Verdict, state: NodeState, memory: SlurmMemory, decision: Drain | Resume | Leave
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
    assert decide(CRITICAL, node("IDLE"), SlurmMemory(), policy, NOW) == drain
    assert decide(REPAIRED, node("IDLE+DRAIN", XID), OURS, policy, NOW) == Leave(why, would="resume")
    assert decide(REPAIRED, node("IDLE"), SlurmMemory(), policy, NOW) == Leave("nothing to do")


def test_a_pause_that_is_over_no_longer_counts() -> None:
    policy = Policy(mode=Mode.ACT, paused_until=NOW)
    assert decide(CRITICAL, node("IDLE"), SlurmMemory(), policy, NOW) == Drain(XID, True)


def test_in_mode_drain_nothing_is_requeued() -> None:
    policy = Policy(mode=Mode.DRAIN)
    assert decide(CRITICAL, node("IDLE"), SlurmMemory(), policy, NOW) == Drain(XID, False)
    assert decide(CRITICAL, node("IDLE+DRAIN", "fan"), SlurmMemory(), policy, NOW) == Drain("fan", False)
    assert isinstance(decide(REPAIRED, node("IDLE+DRAIN", XID), OURS, policy, NOW), Resume)


@pytest.mark.parametrize(
    ("state", "memory", "whose"),
    [
        (node("IDLE"), SlurmMemory(), Owner.NOBODY),
        (node("IDLE"), OURS, Owner.NOBODY),
        (node("IDLE+DRAIN", XID), OURS, Owner.OURS),
        (node("IDLE+DRAIN", XID), SlurmMemory(), Owner.FOREIGN_HEALTHD),
        (node("IDLE+DRAIN", XID), SlurmMemory(adopted=XID), Owner.FOREIGN_HEALTHD),
        (node("IDLE+DRAIN", f"{XID} : reboot issued : reboot timed out"), OURS, Owner.OURS),
        (node("IDLE+DRAIN", "Kill task failed : reboot issued"), OURS, Owner.OURS),
        (node("IDLE+DRAIN", "Kill task failed (JobId=7 StepId=batch)"), OURS, Owner.OURS),  # 26.05
        (node("IDLE+DRAIN", "Kill task failed, RMA 7"), OURS, Owner.FOREIGN),
        # 24.11: slurmd is away; it comes back with a GPU less
        (node("DOWN+DRAIN+NOT_RESPONDING", f"{XID} : Not responding"), OURS, Owner.OURS),
        (node("IDLE+DRAIN+INVALID_REG", "gres/gpu count reported lower than configured (7 < 8)"), OURS, Owner.OURS),
        (node("IDLE+DRAIN+INVALID_REG", "Low RealMemory (reported:1 < 100.00% of configured:2)"), OURS, Owner.OURS),
        (node("IDLE+DRAIN+INVALID_REG", "gres/gpu count too low (7 < 8)"), SlurmMemory(), Owner.FOREIGN),
        (node("DOWN+NOT_RESPONDING", "fan broken : Not responding"), SlurmMemory(), Owner.NOBODY),
        (node("DOWN", "fan broken"), SlurmMemory(), Owner.FOREIGN),
        (node("IDLE+DRAIN", f"{XID} RMA 7"), SlurmMemory(overruled=f"{XID} RMA 7"), Owner.FOREIGN),
        (node("IDLE+DRAIN", f"{XID} RMA 7"), SlurmMemory(writing=XID), Owner.FOREIGN),
        (node("IDLE+DRAIN", "Prolog error"), OURS, Owner.FOREIGN),
        (node("IDLE+DRAIN", ""), OURS, Owner.OURS),  # 22.05 drops the words when it switches a node on
        (node("IDLE+DRAIN", ""), SlurmMemory(), Owner.FOREIGN),
        (node("IDLE+DRAIN", ECC), replace(OURS, writing=ECC), Owner.OURS),
    ],
)
def test_whose_drain_it_is(state: NodeState, memory: SlurmMemory, whose: Owner) -> None:
    assert owner(state, memory) is whose


@pytest.mark.parametrize(
    ("state", "refusals", "memory", "is_ours"),
    [
        (PROLOG_ERROR, [NOW], SlurmMemory(), True),
        (PROLOG_ERROR, [NOW + 5], SlurmMemory(), True),  # the clocks
        (PROLOG_ERROR, [NOW + 5.1], SlurmMemory(), False),  # it was drained before: another prolog
        (PROLOG_ERROR, [NOW, NOW + 30, NOW + 50], SlurmMemory(), True),  # Slurm keeps the time of the first
        (PROLOG_ERROR, [NOW - 15], SlurmMemory(), True),
        (PROLOG_ERROR, [NOW - 15.1], SlurmMemory(), False),
        (PROLOG_ERROR, [NOW - 10], over_at(NOW - 5), True),  # seen as over a moment before Slurm had heard of it
        (PROLOG_ERROR, [NOW - 10], over_at(NOW - 4.9), False),  # the drain that followed that refusal is over
        (PROLOG_ERROR, [NOW - 10, NOW - 1], over_at(NOW - 4.9), True),
        (PROLOG_ERROR, [], SlurmMemory(), False),
        (PROLOG_ERROR, [], SlurmMemory(refused=NOW), True),  # as at the last look
        (PROLOG_ERROR, [], SlurmMemory(refused=NOW - 1), False),  # it is over, and another one stands
        (replace(PROLOG_ERROR, reason="Epilog error"), [NOW], SlurmMemory(refused=NOW), False),
        (replace(PROLOG_ERROR, reason="Prolog error, fan"), [NOW], SlurmMemory(refused=NOW), False),
        # 24.11 keeps the words of a drain that is over
        (replace(PROLOG_ERROR, flags=frozenset({"IDLE"})), [NOW], SlurmMemory(refused=NOW), False),
    ],
)
def test_a_prolog_error_is_of_our_prolog_if_that_refused_a_job_right_before(
    state: NodeState, refusals: list[float], memory: SlurmMemory, is_ours: bool
) -> None:
    seen = refused_here(state, refusals, memory)
    assert seen.refused_here is is_ours
    assert (owner(seen, SlurmMemory()) is Owner.NOBODY) is (is_ours or "DRAIN" not in state.flags)


def test_a_drain_that_our_prologs_refusal_made_concerns_us_until_it_is_over() -> None:
    noted = remember(SlurmMemory(), REFUSED, "b1", NOW)
    assert noted == SlurmMemory(refused=5.0)
    assert not is_quiet(REPAIRED, noted)
    assert is_quiet(REPAIRED, remember(noted, node("IDLE"), "b1", NOW))
    assert is_quiet(REPAIRED, remember(noted, node("IDLE+DRAIN", "fan"), "b1", NOW)), "a person took it over"


def test_a_job_that_our_prolog_refused_though_our_drain_stood_shows_that_a_person_resumed_the_node() -> None:
    assert is_gone(REFUSED, OURS)
    assert not is_gone(node("IDLE+DRAIN", "Prolog error"), OURS)


def test_a_reading_of_our_drain_is_remembered() -> None:
    before = SlurmMemory(reason=ECC, writing=XID, written_at=NOW - 1)
    after = remember(before, node("IDLE+DRAIN+REBOOT_REQUESTED", XID), "b2", NOW)
    assert after == SlurmMemory(reason=XID, confirmed_at=NOW, boot_id="b2", rebooting=True, stamp=5.0)


def test_an_operators_words_over_ours_are_remembered_until_they_are_gone() -> None:
    after = remember(OURS, node("IDLE+DRAIN", "fan"), "b1", NOW)
    assert after == SlurmMemory(overruled="fan", confirmed_at=NOW, boot_id="b1")
    assert not is_gone(node("IDLE+DRAIN", "fan"), after)
    assert is_gone(node("IDLE"), after)
    assert forget(after, node("IDLE"), NOW) == SlurmMemory()


def test_a_drain_of_ours_that_is_over_is_known_until_slurmctld_has_surely_saved_that() -> None:
    over, lifted = forget(OURS, node("IDLE+DRAIN", f"{XID} : Not responding"), NOW), Lifted(XID, XID, 5.0, NOW)
    assert over == SlurmMemory(lifted=lifted)
    assert look_at(over) == NOW + SAVED_SECONDS
    assert settled_by_now(over, NOW + SAVED_SECONDS - 1) == over
    saved = settled_by_now(over, NOW + SAVED_SECONDS)
    assert look_at(saved) == 0.0
    for state in (node("IDLE+DRAIN", XID), node("IDLE+DRAIN+INVALID_REG", XID)):
        assert brought_back(state, over) == over.lifted
        assert not brought_back(state, saved)
        assert owner(state, over) is owner(state, saved) is Owner.FOREIGN
        assert owner(state, taken_back(over, lifted, NOW)) is Owner.OURS
        assert decide(REPAIRED, state, saved, ACT, NOW) == Leave(
            "drained by Slurm, with the Reason of an ended drain by healthd"
        )
    assert not brought_back(node("IDLE", XID), over), "24.11 keeps the words"
    back = remember(taken_back(over, lifted, NOW), node("IDLE+DRAIN", XID), "b1", NOW)
    assert back == replace(OURS, confirmed_at=NOW)


def drained(reason: str, stamp: float) -> NodeState:
    return NodeState("n1", frozenset({"IDLE", "DRAIN"}), reason, "root", stamp)


def test_each_drain_before_the_last_one_is_known_when_slurmctld_brings_it_back() -> None:
    memory = SlurmMemory()
    for stamp, reason in enumerate((XID, ECC, XID), 1):
        memory = replace(memory, writing=reason, written_at=NOW)
        memory = remember(memory, drained(reason, stamp), "b1", NOW)
        memory = forget(memory, node("IDLE"), NOW + stamp)
    assert memory.lifted == Lifted(XID, XID, 3.0, NOW + 3)
    for stamp, reason in enumerate((XID, ECC, XID), 1):
        state = drained(reason, stamp)
        old = brought_back(state, memory)
        assert old == Lifted(reason, reason, stamp, NOW + stamp)
        back = taken_back(memory, old, NOW)
        assert owner(state, back) is Owner.OURS
        others = {1.0, 2.0, 3.0} - {stamp}
        assert {e.stamp for e in back.earlier} == others, "it may come back from another state again"
    assert brought_back(drained(XID, 4), memory) is None, "our words, written by somebody else"
    assert brought_back(drained("fan", 1), memory) is None


def test_our_words_that_newer_ones_replaced_are_ours_when_slurmctld_brings_them_back() -> None:
    memory = remember(replace(OURS, writing=ECC), drained(ECC, 6.0), "b1", NOW)
    assert (memory.reason, memory.earlier) == (ECC, (Lifted(XID, XID, 5.0, NOW),))
    old = brought_back(drained(XID, 5.0), memory)
    assert old is not None
    back = taken_back(memory, old, NOW)
    assert (back.reason, back.stamp, back.earlier) == (XID, 5.0, (Lifted(ECC, ECC, 6.0, NOW),))


def test_the_drains_that_are_remembered_have_a_bound_and_end_where_an_operator_takes_over() -> None:
    memory = SlurmMemory()
    for stamp in range(1, EARLIER + 10):
        memory = remember(replace(memory, writing=XID), drained(XID, stamp), "b1", NOW)
        memory = forget(memory, node("IDLE"), NOW)
    assert [e.stamp for e in memory.earlier] == list(range(9, EARLIER + 9))
    again = remember(replace(memory, writing=XID), drained(XID, 50.0), "b1", NOW)
    theirs = remember(again, drained("fan", 51.0), "b1", NOW)
    assert (theirs.earlier, theirs.stamp) == ((), 0.0)
    assert brought_back(drained(XID, 50.0), theirs) is None, "who took it over lifts it"


@pytest.mark.parametrize(
    "state",
    [
        NodeState("n1", frozenset({"IDLE", "DRAIN"}), XID, "root", 6.0),  # our words again, written by somebody else
        node("IDLE+DRAIN", ECC),
        node("IDLE+DRAIN", f"{XID}, RMA 7"),
        node("IDLE+DRAIN", "Prolog error"),
    ],
)
def test_another_drain_after_ours_is_not_taken_for_it(state: NodeState) -> None:
    over = SlurmMemory(lifted=Lifted(XID, XID, 5.0, NOW))
    assert not is_left_over(state, over)
    assert not brought_back(state, over)
    assert owner(state, over) in (Owner.FOREIGN, Owner.FOREIGN_HEALTHD)


def test_our_next_drain_in_the_same_words_is_ours() -> None:
    over = SlurmMemory(lifted=Lifted(XID, XID, 0.0, NOW))
    sent = replace(over, writing=XID, written_at=NOW)
    assert owner(node("IDLE+DRAIN", XID), sent) is Owner.OURS
    assert remember(sent, node("IDLE+DRAIN", XID), "b1", NOW).lifted is None


def test_an_operators_drain_that_never_was_ours_is_not_remembered() -> None:
    assert remember(SlurmMemory(), node("IDLE+DRAIN", "fan"), "b1", NOW) == SlurmMemory()


def test_what_was_sent_stays_known_until_it_can_no_longer_be_under_way() -> None:
    sent = SlurmMemory(writing=XID, written_at=NOW)
    assert remember(sent, node("IDLE"), "b1", NOW + IN_FLIGHT_SECONDS) == sent
    assert remember(sent, node("IDLE"), "b1", NOW + IN_FLIGHT_SECONDS + 1) == SlurmMemory()


@pytest.mark.parametrize(
    ("memory", "boot_id", "lost"),
    [
        (OURS, "b1", False),
        (OURS, "b2", True),
        (replace(OURS, rebooting=True), "b1", True),
        (replace(OURS, resumed_at=NOW - 1), "b1", True),  # ours, and not read as drained since
        (replace(OURS, resumed_at=NOW - 80), "b1", True),  # ours, perhaps applied late
        (replace(OURS, resumed_at=NOW - 1000), "b1", False),
    ],
)
def test_a_drain_is_lost_without_an_operator(memory: SlurmMemory, boot_id: str, lost: bool) -> None:
    assert is_lost_for_sure(node("IDLE"), memory, boot_id, ACT, NOW) is lost


@pytest.mark.parametrize("state", ["IDLE+POWERING_DOWN", "IDLE+POWERED_DOWN", "IDLE+POWERING_UP+NOT_RESPONDING"])
def test_switching_a_node_off_takes_its_drain_away_without_an_operator(state: str) -> None:
    assert is_lost_for_sure(node(state, XID), OURS, "b1", ACT, NOW)
    assert decide(CRITICAL, node(state, XID), SlurmMemory(), ACT, NOW) == Drain(XID, True)


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
    assert isinstance(decide(DEGRADED, node(f"IDLE+{flag}"), SlurmMemory(), ACT, NOW), Drain)


@pytest.mark.parametrize(
    "flags",
    [
        *("MAINTENANCE+RESERVED", "RESERVED", "PLANNED", "COMPLETING", "NOT_RESPONDING", "CLOUD", "DYNAMIC_NORM"),
        *("PERFCTRS", "BLOCKED"),
    ],
)
def test_what_else_slurm_says_of_a_node_changes_nothing(flags: str) -> None:
    assert decide(DEGRADED, node(f"MIXED+{flags}"), SlurmMemory(), ACT, NOW) == Drain(XID, False)
    assert isinstance(decide(REPAIRED, node(f"MIXED+DRAIN+{flags}", XID), OURS, ACT, NOW), Resume)
    assert decide(REPAIRED, node(f"MIXED+{flags}"), SlurmMemory(), ACT, NOW) == Leave("nothing to do")


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
    assert is_quiet(REPAIRED, SlurmMemory(resumed_at=NOW))
    assert not is_quiet(DEGRADED, SlurmMemory())
    for memory in (OURS, SlurmMemory(writing=XID), SlurmMemory(overruled="fan"), SlurmMemory(adopted=XID)):
        assert not is_quiet(REPAIRED, memory)


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


STOOD = SlurmMemory(reason=XID, confirmed_at=70.0, boot_id="b")


@pytest.mark.parametrize(
    ("read", "memory", "since"),
    [
        (node("IDLE+DRAIN", XID), STOOD, 65.0),
        (node("ALLOCATED+DRAIN", "fan broken"), SlurmMemory(overruled="fan broken", boot_id="b"), 65.0),
        (node("IDLE+DRAIN", XID), replace(STOOD, boot_id="the boot before"), None),
        (node("IDLE+DRAIN+NOT_RESPONDING", XID), STOOD, None),  # it may be taken away when slurmd registers
        (node("DOWN+DRAIN+REBOOT_ISSUED", XID), STOOD, None),
        (node("IDLE"), STOOD, None),  # lost or resumed
        (node("IDLE+DRAIN", XID), SlurmMemory(boot_id="b"), None),
        (None, STOOD, None),
    ],
)
def test_slurm_holds_a_node_by_itself_once_a_drain_has_stood_for_a_minute_in_this_boot(
    read: NodeState | None, memory: SlurmMemory, since: float | None
) -> None:
    assert held_from(read, memory, "b") == (since if since is not None else float("inf"))
