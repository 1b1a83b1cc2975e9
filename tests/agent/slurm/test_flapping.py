"""Tests of a fault that comes and goes: what its drains wait for, at each limit and beyond."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from healthd.agent.conditions.ledger import Ledger, after_clock_step, without_future_times
from healthd.agent.conditions.store import decode
from healthd.agent.slurm import flapping
from healthd.agent.slurm.flapping import (
    Flapping,
    after_reading,
    after_resume,
    reset_count,
    wait_reason,
    wait_seconds,
    waits_until,
)
from healthd.agent.slurm.policy import Owner, after_drain_ended, after_restored_drain, decide, drain_owner
from healthd.common.model import (
    ConditionState,
    Drain,
    DrainRecord,
    EndedDrain,
    Health,
    Leave,
    Resume,
    ResumedDrain,
    Severity,
    Verdict,
)
from healthd.common.slurm.drain_reason import MAX_CHARACTERS, reason
from healthd.common.values import encode
from tests.agent.slurm.test_policy import ACT, NOW, OURS, XID, cause, node

LIMITS = Flapping()
MINUTE, HOUR = 60.0, 3600.0
CLEAN = Verdict(Health.HEALTHY, may_resume=True)
STANDS = node("IDLE+DRAIN", XID)


def verdict(shared: bool) -> Verdict:
    found = replace(cause(Severity.DEGRADED), shared_cause=shared)
    return Verdict(Health.DEGRADED, (found,), (found,))


class Node:
    """A node with a fault that comes and goes. Slurm applies each decision at once."""

    def __init__(self, shared: bool, limits: Flapping = LIMITS) -> None:
        self.shared, self.policy, self.now = shared, replace(ACT, flapping=limits), NOW
        self.memory = DrainRecord()

    def breaks(self) -> Node:
        assert isinstance(decide(verdict(self.shared), node("IDLE"), self.memory, self.policy, self.now), Drain)
        self.memory = after_reading(replace(self.memory, reason=XID), verdict(self.shared), self.now)
        return self

    def mends(self) -> Resume | Leave:
        """End the fault and return the decision."""
        self.memory = after_reading(self.memory, CLEAN, self.now)
        decided = decide(CLEAN, STANDS, self.memory, self.policy, self.now)
        assert isinstance(decided, Resume | Leave)
        if isinstance(decided, Resume):
            self.memory = after_resume(after_drain_ended(self.memory, STANDS, self.now), self.memory, self.now)
        return decided

    def waits(self) -> float:
        """Return how long the node stays clean until it is resumed, with the queries that healthd makes by itself."""
        began = self.now
        while isinstance(self.mends(), Leave):
            until = waits_until(self.memory, self.policy.flapping, self.now)
            assert until > self.now, "no further query is scheduled"
            self.now = until
        return self.now - began


def test_the_third_drain_for_own_hardware_within_an_hour_waits_for_a_person() -> None:
    faulty = Node(shared=False)
    for _ in range(2):
        assert isinstance(faulty.breaks().mends(), Resume)
        faulty.now += 20 * MINUTE
    decided = faulty.breaks().mends()
    assert decided == Leave(
        "clean, but drained 3 times within an hour for the node's own hardware: an operator must resume it, "
        'or run "healthd repaired gpu_xid/79"'
    )
    faulty.now += 30 * 24 * HOUR
    assert isinstance(faulty.mends(), Leave), "time alone does not clear it"
    assert waits_until(faulty.memory, LIMITS, faulty.now) == 0.0


@pytest.mark.parametrize(("minutes", "goes"), [(29, False), (31, True)])
def test_drains_for_own_hardware_that_are_further_apart_go_by_themselves(minutes: int, goes: bool) -> None:
    faulty = Node(shared=False)
    for _ in range(2):
        assert faulty.breaks().waits() == 0
        faulty.now += minutes * MINUTE
    assert isinstance(faulty.breaks().mends(), Resume) is goes


def test_a_person_who_answers_for_the_node_lets_the_count_begin_anew() -> None:
    faulty = Node(shared=False)
    for _ in range(2):
        faulty.breaks().mends()
    assert isinstance(faulty.breaks().mends(), Leave)
    faulty.memory = reset_count(faulty.memory)
    assert isinstance(faulty.mends(), Resume)


def test_a_setting_of_zero_lets_own_hardware_come_and_go() -> None:
    faulty = Node(shared=False, limits=Flapping(own_faults_per_hour=0))
    for _ in range(30):
        assert isinstance(faulty.breaks().mends(), Resume)


def test_for_a_shared_cause_the_wait_doubles_up_to_four_hours_and_then_goes_by_itself() -> None:
    faulty = Node(shared=True)
    waited = []
    for _ in range(9):
        waited.append(faulty.breaks().waits() / MINUTE)
        faulty.now += 5 * MINUTE
    assert waited == [0, 10, 20, 40, 80, 160, 240, 240, 240]
    assert all(later <= 240 for later in (faulty.breaks().waits() / MINUTE for _ in range(40)))
    assert len(faulty.memory.resumed_drains) == flapping.MAX_RESUMED


def test_a_shared_cause_that_rests_for_an_hour_begins_anew() -> None:
    faulty = Node(shared=True)
    faulty.breaks().waits()
    faulty.now += HOUR
    assert faulty.breaks().waits() == 10 * MINUTE
    faulty.now += HOUR + 1
    assert faulty.breaks().waits() == 0


def test_the_time_counts_in_which_all_was_clean_and_begins_anew_where_it_was_not() -> None:
    faulty = Node(shared=True)
    faulty.breaks().waits()
    faulty.breaks()
    assert faulty.mends() == Leave("clean, but drained 2 times in a row: resumed after 10 min without a fault")
    faulty.now += 9 * MINUTE
    faulty.memory = after_reading(faulty.memory, verdict(shared=True), faulty.now)
    assert isinstance(faulty.mends(), Leave)
    faulty.now += 9 * MINUTE
    assert isinstance(faulty.mends(), Leave)
    faulty.now += MINUTE
    assert isinstance(faulty.mends(), Resume)


PENDING = Verdict(Health.HEALTHY, (replace(cause(Severity.DEGRADED), state=ConditionState.PENDING),))
UNKNOWN = Verdict(Health.UNKNOWN, unknown=("mount did not answer in time",))


@pytest.mark.parametrize("unclear", [UNKNOWN, PENDING])
def test_what_is_not_known_is_not_clean_and_lets_no_wait_begin_anew(unclear: Verdict) -> None:
    faulty = Node(shared=True)
    faulty.breaks().waits()
    faulty.breaks()
    for _ in range(9):  # a check times out in every second minute
        assert isinstance(faulty.mends(), Leave)
        faulty.now += MINUTE
        assert isinstance(faulty.mends(), Leave)
        faulty.memory = after_reading(faulty.memory, unclear, faulty.now)
        assert faulty.memory.clean_since == 0.0
        assert waits_until(faulty.memory, LIMITS, faulty.now) == 0.0
        faulty.now += HOUR
    assert faulty.waits() == MINUTE


def test_a_restart_lets_no_wait_begin_anew() -> None:
    faulty = Node(shared=True)
    faulty.breaks().waits()
    faulty.breaks().mends()
    faulty.now += 4 * MINUTE
    faulty.mends()
    faulty.memory = decode(encode(Ledger(slurm=faulty.memory)), "here").slurm
    faulty.memory = after_reading(faulty.memory, UNKNOWN, faulty.now + HOUR)  # no check has run yet
    faulty.now += HOUR + MINUTE
    assert faulty.waits() == 6 * MINUTE


def test_a_condition_that_stands_lets_the_wait_begin_anew_though_it_may_not_drain() -> None:
    faulty = Node(shared=True)
    faulty.breaks().waits()
    faulty.breaks().mends()
    faulty.now += 9 * MINUTE
    untrusted = Verdict(Health.DEGRADED, (replace(cause(Severity.DEGRADED), state=ConditionState.OPEN),))
    faulty.memory = after_reading(faulty.memory, untrusted, faulty.now)
    assert faulty.waits() == 10 * MINUTE


def test_the_reason_says_at_the_third_time_that_a_person_must_end_it_and_is_still_known_as_ours() -> None:
    faulty = Node(shared=False)
    for _ in range(2):
        drain = decide(verdict(False), node("IDLE"), after_reading(faulty.memory, verdict(False), NOW), ACT, NOW)
        assert isinstance(drain, Drain)
        assert "person" not in drain.reason
        faulty.breaks().mends()
    memory = after_reading(faulty.memory, verdict(False), NOW)
    drain = decide(verdict(False), node("IDLE"), memory, ACT, NOW)
    assert isinstance(drain, Drain)
    assert drain.reason.endswith(" (3 times in an hour: an operator must resume it)")
    ours, stands = replace(memory, reason=drain.reason), node("IDLE+DRAIN", drain.reason)
    assert drain_owner(stands, ours) is Owner.HEALTHD
    assert drain_owner(stands, DrainRecord()) is Owner.UNRECORDED_HEALTHD, "like every unrecorded drain of healthd"
    assert decide(verdict(False), stands, ours, ACT, NOW) == drain, "no second update"


def test_the_words_of_its_end_stay_in_a_reason_that_is_too_long() -> None:
    long = replace(cause(Severity.DEGRADED), message="x" * 300)
    text = reason((long, long), "3 times in an hour: an operator must resume it")
    assert text.endswith("... (+1 more) (3 times in an hour: an operator must resume it)")
    assert len(text) == MAX_CHARACTERS


def test_one_own_fault_among_shared_causes_makes_the_drain_one_for_own_hardware() -> None:
    both = Verdict(Health.DEGRADED, causes=(*verdict(True).causes, *verdict(False).causes))
    memory = after_reading(after_reading(DrainRecord(reason=XID), both, NOW), verdict(True), NOW + 60)
    assert memory.own_hardware
    assert memory.drained_at == NOW


def test_a_restart_forgets_nothing_of_it_and_an_old_ledger_has_nothing() -> None:
    faulty = Node(shared=False)
    faulty.breaks().mends()
    kept = decode(encode(Ledger(slurm=faulty.breaks().memory)), "here").slurm
    assert kept == faulty.memory
    assert kept.resumed_drains == (ResumedDrain(NOW, NOW, True),)
    assert wait_seconds(OURS, LIMITS) == 0.0


def test_a_clock_that_is_set_moves_its_moments() -> None:
    memory = DrainRecord(
        reason=XID, drained_at=NOW, clean_since=NOW + 1, resumed_drains=(ResumedDrain(NOW - 9, NOW - 8, False),)
    )
    moved = after_clock_step(Ledger(slurm=memory), 100.0).slurm
    assert (moved.drained_at, moved.clean_since) == (NOW + 100, NOW + 101)
    assert moved.resumed_drains == (ResumedDrain(NOW + 91, NOW + 92, False),)
    ahead = replace(memory, clean_since=NOW + 30 * HOUR)
    back = after_reading(ahead, CLEAN, NOW)
    assert (back.clean_since, back.clean_seconds) == (NOW, 0.0), "a clock that was ahead delays no resume"
    assert waits_until(ahead, LIMITS, NOW) <= NOW + 10 * MINUTE


def test_what_a_clock_wrote_that_stood_ahead_is_in_a_row_with_nothing() -> None:
    later = NOW + 300 * HOUR
    past, ahead, between = (
        ResumedDrain(NOW - 9, NOW - 8, True),
        ResumedDrain(later, later + 9, True),
        ResumedDrain(NOW, later, False),
    )
    old = EndedDrain(XID, XID, 7.0, later)
    memory = DrainRecord(
        reason=XID,
        drained_at=later,
        clean_since=later,
        resumed_drains=(past, ahead, between),
        ended_drain=old,
        earlier_drains=(replace(old, ended_at=NOW - 1), old),
    )
    told = without_future_times(Ledger(slurm=memory), NOW).slurm
    assert (told.drained_at, told.clean_since, told.resumed_drains) == (NOW, NOW, (past,))
    assert told.ended_drain == replace(old, ended_at=NOW)
    assert [each.ended_at for each in told.earlier_drains] == [NOW - 1, NOW]
    right = replace(told, ended_drain=None)
    assert without_future_times(Ledger(slurm=right), NOW).slurm == right


def test_a_resume_that_slurmctld_lost_is_none() -> None:
    faulty = Node(shared=True)
    faulty.breaks().mends()
    lifted = EndedDrain(XID, XID, 0.0, NOW)
    back = after_restored_drain(replace(faulty.memory, ended_drain=lifted), lifted, NOW)
    assert (back.reason, back.resumed_drains, back.drained_at) == (XID, (), NOW)
    assert wait_reason(back, LIMITS, NOW) == ""
