"""The table of policy.py, row by row."""

from __future__ import annotations

from dataclasses import replace

import pytest

from healthd.model import (
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
from healthd.slurm.policy import (
    IN_FLIGHT_SECONDS,
    SAVED_SECONDS,
    Owner,
    Policy,
    decide,
    describe,
    forget,
    held_from,
    is_back,
    is_gone,
    is_idle,
    is_left_over,
    is_lost_by_slurmctld,
    is_lost_for_sure,
    is_quiet,
    look_at,
    owner,
    remember,
    settled_by_now,
    taken_back,
)

NOW = 1_000_000.0
ACT = Policy(mode=Mode.ACT)
XID = "healthd: gpu_xid/79 0000:1b:00.0: fell off the bus"
ECC = "healthd: gpu_ecc/uncorrected 0000:1c:00.0: 3 errors"
OURS = SlurmMemory(reason=XID, confirmed_at=NOW - 60, boot_id="b1")


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
            Leave("drained by us until every check that can drain has completed clean"),
        ),
        (
            REPAIRED,
            node("DOWN+DRAIN", XID),
            OURS,
            Leave("repaired, but Slurm has the node DOWN"),
        ),
        (
            REPAIRED,
            node("IDLE+DRAIN+REBOOT_REQUESTED", XID),
            OURS,
            Leave("repaired, but Slurm has the node REBOOT_REQUESTED"),
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
        (DEGRADED, node("IDLE+DRAIN", "fan"), SlurmMemory(), Leave('root holds the node: "fan"')),
        (DEGRADED, node("DOWN", "fan"), SlurmMemory(), Leave('root holds the node: "fan"')),
        (DEGRADED, node("IDLE+FAIL", "fan"), SlurmMemory(), Leave('root holds the node: "fan"')),
        (
            DEGRADED,
            node("IDLE+DRAIN", "Prolog error"),
            SlurmMemory(),
            Leave('root holds the node: "Prolog error"'),
        ),
        (REPAIRED, node("IDLE+DRAIN", "fan"), SlurmMemory(), Leave('root holds the node: "fan"')),
        (REPAIRED, node("IDLE+DRAIN", "fan"), OURS, Leave('root holds the node: "fan"')),
        (REPAIRED, node("IDLE+DRAIN", ECC), OURS, Leave(f'root holds the node: "{ECC}"')),
        (REPAIRED, node("IDLE+DRAIN", f"{XID}, RMA 7"), OURS, Leave(f'root holds the node: "{XID}, RMA 7"')),
        (CRITICAL, node("IDLE+DRAIN", f"{XID}, RMA 7"), OURS, Drain(f"{XID}, RMA 7", True)),
        (
            REPAIRED,
            node("IDLE+DRAIN", "Kill task failed"),
            SlurmMemory(),
            Leave('root holds the node: "Kill task failed"'),
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


def test_a_reading_of_our_drain_is_remembered() -> None:
    before = SlurmMemory(reason=ECC, writing=XID, written_at=NOW - 1)
    after = remember(before, node("IDLE+DRAIN+REBOOT_REQUESTED", XID), "b2", NOW)
    assert after == SlurmMemory(reason=XID, confirmed_at=NOW, boot_id="b2", rebooting=True)


def test_an_operators_words_over_ours_are_remembered_until_they_are_gone() -> None:
    after = remember(OURS, node("IDLE+DRAIN", "fan"), "b1", NOW)
    assert after == SlurmMemory(overruled="fan", confirmed_at=NOW, boot_id="b1")
    assert not is_gone(node("IDLE+DRAIN", "fan"), after)
    assert is_gone(node("IDLE"), after)
    assert forget(after, node("IDLE"), NOW) == SlurmMemory()


def test_a_drain_of_ours_that_is_over_is_known_until_slurmctld_has_surely_saved_that() -> None:
    over = forget(OURS, node("IDLE+DRAIN", f"{XID} : Not responding"), NOW)
    assert over == SlurmMemory(lifted=Lifted(XID, XID, 5.0, NOW))
    assert look_at(over) == NOW + SAVED_SECONDS
    assert settled_by_now(over, NOW + SAVED_SECONDS - 1) == over
    saved = settled_by_now(over, NOW + SAVED_SECONDS)
    assert look_at(saved) == 0.0
    for state in (node("IDLE+DRAIN", XID), node("IDLE+DRAIN+INVALID_REG", XID)):
        assert is_back(state, over)
        assert not is_back(state, saved)
        assert owner(state, over) is owner(state, saved) is Owner.FOREIGN
        assert owner(state, taken_back(over)) is Owner.OURS
        assert decide(REPAIRED, state, saved, ACT, NOW) == Leave(
            "Slurm holds the node, under the words of our drain that is over"
        )
    assert not is_back(node("IDLE", XID), over), "24.11 keeps the words"
    assert remember(taken_back(over), node("IDLE+DRAIN", XID), "b1", NOW) == replace(OURS, confirmed_at=NOW)


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
    assert not is_back(state, over)
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
    assert waits == Leave(f"repaired, but Slurm has the node {flag}")
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
    ("started", "lost"), [(NOW - 100, False), (NOW - 63, False), (NOW - 61, True), (NOW - 10, True)]
)
def test_a_drain_is_lost_by_a_slurmctld_that_started_after_it_was_last_read(started: float, lost: bool) -> None:
    assert is_lost_by_slurmctld(OURS.confirmed_at, started) is lost


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
