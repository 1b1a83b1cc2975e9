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
from tests.agent.slurm.test_policy import ACT, NOW, OWN_DRAIN, XID, cause, node

LIMITS = Flapping()
MINUTE, HOUR = 60.0, 3600.0
CLEAN = Verdict(Health.HEALTHY, may_resume=True)
DRAINED_NODE = node("IDLE+DRAIN", XID)


def verdict(shared: bool) -> Verdict:
    condition = replace(cause(Severity.DEGRADED), shared_cause=shared)
    return Verdict(Health.DEGRADED, (condition,), (condition,))


class FlappingNode:
    """A node with a fault that comes and goes. Slurm applies each decision at once."""

    def __init__(self, shared: bool, limits: Flapping = LIMITS) -> None:
        self.shared, self.policy, self.now = shared, replace(ACT, flapping=limits), NOW
        self.record = DrainRecord()

    def drain(self) -> FlappingNode:
        assert isinstance(decide(verdict(self.shared), node("IDLE"), self.record, self.policy, self.now), Drain)
        self.record = after_reading(replace(self.record, reason=XID), verdict(self.shared), self.now)
        return self

    def recover(self) -> Resume | Leave:
        """End the fault and return the decision."""
        self.record = after_reading(self.record, CLEAN, self.now)
        decided = decide(CLEAN, DRAINED_NODE, self.record, self.policy, self.now)
        assert isinstance(decided, Resume | Leave)
        if isinstance(decided, Resume):
            self.record = after_resume(after_drain_ended(self.record, DRAINED_NODE, self.now), self.record, self.now)
        return decided

    def seconds_until_resume(self) -> float:
        """Return how long the node stays clean until it is resumed, with the queries that healthd makes by itself."""
        started = self.now
        while isinstance(self.recover(), Leave):
            check_at = waits_until(self.record, self.policy.flapping, self.now)
            assert check_at > self.now, "no further query is scheduled"
            self.now = check_at
        return self.now - started


def test_third_own_hardware_drain_within_hour_requires_operator() -> None:
    flapping_node = FlappingNode(shared=False)
    for _ in range(2):
        assert isinstance(flapping_node.drain().recover(), Resume)
        flapping_node.now += 20 * MINUTE
    decision = flapping_node.drain().recover()
    assert decision == Leave(
        "clean, but drained 3 times within an hour for the node's own hardware: an operator must resume it, "
        'or run "healthd repaired gpu_xid/79"'
    )
    flapping_node.now += 30 * 24 * HOUR
    assert isinstance(flapping_node.recover(), Leave), "time alone does not clear it"
    assert waits_until(flapping_node.record, LIMITS, flapping_node.now) == 0.0


@pytest.mark.parametrize(("minutes", "is_resumed"), [(29, False), (31, True)])
def test_own_hardware_drains_further_apart_are_resumed(minutes: int, is_resumed: bool) -> None:
    flapping_node = FlappingNode(shared=False)
    for _ in range(2):
        assert flapping_node.drain().seconds_until_resume() == 0
        flapping_node.now += minutes * MINUTE
    assert isinstance(flapping_node.drain().recover(), Resume) is is_resumed


def test_reset_count_restarts_count() -> None:
    flapping_node = FlappingNode(shared=False)
    for _ in range(2):
        flapping_node.drain().recover()
    assert isinstance(flapping_node.drain().recover(), Leave)
    flapping_node.record = reset_count(flapping_node.record)
    assert isinstance(flapping_node.recover(), Resume)


def test_own_faults_per_hour_0_disables_count() -> None:
    flapping_node = FlappingNode(shared=False, limits=Flapping(own_faults_per_hour=0))
    for _ in range(30):
        assert isinstance(flapping_node.drain().recover(), Resume)


def test_wait_for_shared_cause_doubles_up_to_four_hours() -> None:
    flapping_node = FlappingNode(shared=True)
    waits = []
    for _ in range(9):
        waits.append(flapping_node.drain().seconds_until_resume() / MINUTE)
        flapping_node.now += 5 * MINUTE
    assert waits == [0, 10, 20, 40, 80, 160, 240, 240, 240]
    assert all(wait <= 240 for wait in (flapping_node.drain().seconds_until_resume() / MINUTE for _ in range(40)))
    assert len(flapping_node.record.resumed_drains) == flapping.MAX_RESUMED


def test_wait_for_shared_cause_restarts_after_quiet_hour() -> None:
    flapping_node = FlappingNode(shared=True)
    flapping_node.drain().seconds_until_resume()
    flapping_node.now += HOUR
    assert flapping_node.drain().seconds_until_resume() == 10 * MINUTE
    flapping_node.now += HOUR + 1
    assert flapping_node.drain().seconds_until_resume() == 0


def test_wait_counts_only_clean_time() -> None:
    flapping_node = FlappingNode(shared=True)
    flapping_node.drain().seconds_until_resume()
    flapping_node.drain()
    assert flapping_node.recover() == Leave("clean, but drained 2 times in a row: resumed after 10 min without a fault")
    flapping_node.now += 9 * MINUTE
    flapping_node.record = after_reading(flapping_node.record, verdict(shared=True), flapping_node.now)
    assert isinstance(flapping_node.recover(), Leave)
    flapping_node.now += 9 * MINUTE
    assert isinstance(flapping_node.recover(), Leave)
    flapping_node.now += MINUTE
    assert isinstance(flapping_node.recover(), Resume)


PENDING = Verdict(Health.HEALTHY, (replace(cause(Severity.DEGRADED), state=ConditionState.PENDING),))
UNKNOWN = Verdict(Health.UNKNOWN, unknown=("mount did not answer in time",))


@pytest.mark.parametrize("unclear", [UNKNOWN, PENDING])
def test_unclear_verdict_pauses_wait(unclear: Verdict) -> None:
    flapping_node = FlappingNode(shared=True)
    flapping_node.drain().seconds_until_resume()
    flapping_node.drain()
    for _ in range(9):  # a check times out in every second minute
        assert isinstance(flapping_node.recover(), Leave)
        flapping_node.now += MINUTE
        assert isinstance(flapping_node.recover(), Leave)
        flapping_node.record = after_reading(flapping_node.record, unclear, flapping_node.now)
        assert flapping_node.record.clean_since == 0.0
        assert waits_until(flapping_node.record, LIMITS, flapping_node.now) == 0.0
        flapping_node.now += HOUR
    assert flapping_node.seconds_until_resume() == MINUTE


def test_wait_continues_after_restart() -> None:
    flapping_node = FlappingNode(shared=True)
    flapping_node.drain().seconds_until_resume()
    flapping_node.drain().recover()
    flapping_node.now += 4 * MINUTE
    flapping_node.recover()
    flapping_node.record = decode(encode(Ledger(slurm=flapping_node.record)), "here").slurm
    flapping_node.record = after_reading(
        flapping_node.record, UNKNOWN, flapping_node.now + HOUR
    )  # no check has run yet
    flapping_node.now += HOUR + MINUTE
    assert flapping_node.seconds_until_resume() == 6 * MINUTE


def test_open_condition_restarts_wait() -> None:
    flapping_node = FlappingNode(shared=True)
    flapping_node.drain().seconds_until_resume()
    flapping_node.drain().recover()
    flapping_node.now += 9 * MINUTE
    untrusted = Verdict(Health.DEGRADED, (replace(cause(Severity.DEGRADED), state=ConditionState.OPEN),))
    flapping_node.record = after_reading(flapping_node.record, untrusted, flapping_node.now)
    assert flapping_node.seconds_until_resume() == 10 * MINUTE


def test_third_drain_reason_names_operator() -> None:
    flapping_node = FlappingNode(shared=False)
    for _ in range(2):
        drain = decide(verdict(False), node("IDLE"), after_reading(flapping_node.record, verdict(False), NOW), ACT, NOW)
        assert isinstance(drain, Drain)
        assert "person" not in drain.reason
        flapping_node.drain().recover()
    record = after_reading(flapping_node.record, verdict(False), NOW)
    drain = decide(verdict(False), node("IDLE"), record, ACT, NOW)
    assert isinstance(drain, Drain)
    assert drain.reason.endswith(" (3 times in an hour: an operator must resume it)")
    own_record, drained_node = replace(record, reason=drain.reason), node("IDLE+DRAIN", drain.reason)
    assert drain_owner(drained_node, own_record) is Owner.HEALTHD
    assert drain_owner(drained_node, DrainRecord()) is Owner.UNRECORDED_HEALTHD, (
        "like every unrecorded drain of healthd"
    )
    assert decide(verdict(False), drained_node, own_record, ACT, NOW) == drain, "no second update"


def test_long_reason_keeps_ending_text() -> None:
    long_cause = replace(cause(Severity.DEGRADED), message="x" * 300)
    text = reason((long_cause, long_cause), "3 times in an hour: an operator must resume it")
    assert text.endswith("... (+1 more) (3 times in an hour: an operator must resume it)")
    assert len(text) == MAX_CHARACTERS


def test_single_own_fault_makes_drain_own_hardware() -> None:
    mixed = Verdict(Health.DEGRADED, causes=(*verdict(True).causes, *verdict(False).causes))
    record = after_reading(after_reading(DrainRecord(reason=XID), mixed, NOW), verdict(True), NOW + 60)
    assert record.own_hardware
    assert record.drained_at == NOW


def test_resumed_drains_survive_restart() -> None:
    flapping_node = FlappingNode(shared=False)
    flapping_node.drain().recover()
    restored = decode(encode(Ledger(slurm=flapping_node.drain().record)), "here").slurm
    assert restored == flapping_node.record
    assert restored.resumed_drains == (ResumedDrain(NOW, NOW, True),)
    assert wait_seconds(OWN_DRAIN, LIMITS) == 0.0


def test_clock_step_moves_times_in_drain_record() -> None:
    record = DrainRecord(
        reason=XID, drained_at=NOW, clean_since=NOW + 1, resumed_drains=(ResumedDrain(NOW - 9, NOW - 8, False),)
    )
    stepped = after_clock_step(Ledger(slurm=record), 100.0).slurm
    assert (stepped.drained_at, stepped.clean_since) == (NOW + 100, NOW + 101)
    assert stepped.resumed_drains == (ResumedDrain(NOW + 91, NOW + 92, False),)
    future_record = replace(record, clean_since=NOW + 30 * HOUR)
    corrected = after_reading(future_record, CLEAN, NOW)
    assert (corrected.clean_since, corrected.clean_seconds) == (NOW, 0.0), "a clock that was ahead delays no resume"
    assert waits_until(future_record, LIMITS, NOW) <= NOW + 10 * MINUTE


def test_future_times_in_drain_record_are_corrected() -> None:
    future = NOW + 300 * HOUR
    past_drain, future_drain, mixed_drain = (
        ResumedDrain(NOW - 9, NOW - 8, True),
        ResumedDrain(future, future + 9, True),
        ResumedDrain(NOW, future, False),
    )
    ended_drain = EndedDrain(XID, XID, 7.0, future)
    record = DrainRecord(
        reason=XID,
        drained_at=future,
        clean_since=future,
        resumed_drains=(past_drain, future_drain, mixed_drain),
        ended_drain=ended_drain,
        earlier_drains=(replace(ended_drain, ended_at=NOW - 1), ended_drain),
    )
    corrected = without_future_times(Ledger(slurm=record), NOW).slurm
    assert (corrected.drained_at, corrected.clean_since, corrected.resumed_drains) == (NOW, NOW, (past_drain,))
    assert corrected.ended_drain == replace(ended_drain, ended_at=NOW)
    assert [earlier.ended_at for earlier in corrected.earlier_drains] == [NOW - 1, NOW]
    without_ended = replace(corrected, ended_drain=None)
    assert without_future_times(Ledger(slurm=without_ended), NOW).slurm == without_ended


def test_restored_drain_removes_resume() -> None:
    flapping_node = FlappingNode(shared=True)
    flapping_node.drain().recover()
    lifted = EndedDrain(XID, XID, 0.0, NOW)
    restored = after_restored_drain(replace(flapping_node.record, ended_drain=lifted), lifted, NOW)
    assert (restored.reason, restored.resumed_drains, restored.drained_at) == (XID, (), NOW)
    assert wait_reason(restored, LIMITS, NOW) == ""
