"""Tests of the fleet limit: its size, the waits, and that the number of drained nodes never exceeds it."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from healthd.agent.settings.config import FleetLimits
from healthd.agent.slurm.fleet_limit import (
    LATE_SECONDS,
    MIN_HOLD_SECONDS,
    SECONDS_PER_NODE,
    backoff,
    describe,
    first_wait,
    has_room,
    is_exceeded,
    is_late,
    is_own_hardware,
    is_withheld,
    limit_for,
    must_wait,
    pseudo_random,
    spread_again,
    spread_seconds,
    tightest,
    uncounted_drain_at,
)
from healthd.common.model import (
    MAX_HOLD_SECONDS,
    Clears,
    Condition,
    ConditionState,
    DrainRecord,
    FleetHold,
    PartitionCount,
    Severity,
)

NOW = 1_795_207_900.0
LIMITS = FleetLimits()
OWN, SHARED = True, False


def cause(shared: bool) -> Condition:
    return Condition(
        check="mount",
        instance="",
        code="mount/hang",
        subject="/data",
        severity=Severity.DEGRADED,
        message="does not answer",
        clears=Clears.PASS,
        state=ConditionState.OPEN,
        first_seen=1.0,
        last_seen=2.0,
        count=1,
        boot_id="b",
        shared_cause=shared,
    )


# --- size


@pytest.mark.parametrize(
    ("nodes", "shared", "own"),
    [(1, 2, 5), (3, 2, 5), (10, 2, 5), (29, 2, 8), (30, 3, 9), (100, 10, 30), (10_000, 1000, 3000)],
)
def test_ten_and_thirty_percent_but_at_least_two_and_five(nodes: int, shared: int, own: int) -> None:
    assert (limit_for(nodes, LIMITS, SHARED), limit_for(nodes, LIMITS, OWN)) == (shared, own)


def test_a_percent_that_is_no_binary_fraction_is_not_rounded_down() -> None:
    assert limit_for(1000, replace(LIMITS, limit_percent=0.7), SHARED) == 7


def test_one_cause_of_the_nodes_own_decides() -> None:
    assert not is_own_hardware([cause(shared=True), cause(shared=True)])
    assert is_own_hardware([cause(shared=True), cause(shared=False)])


def test_of_several_partitions_the_one_with_the_least_room_counts() -> None:
    big, small, full = PartitionCount("big", 1000, 90), PartitionCount("small", 20, 0), PartitionCount("full", 40, 4)
    assert tightest([big, small], LIMITS, SHARED) == small
    assert tightest([big, small, full], LIMITS, SHARED) == full
    assert not has_room(full, LIMITS, SHARED)
    assert not is_exceeded(full, LIMITS, SHARED)
    assert is_exceeded(replace(full, drained=5), LIMITS, SHARED)


# --- waits


def test_a_thousand_nodes_spread_their_first_count_over_the_window() -> None:
    names = [f"gpu{i:05d}" for i in range(10_000)]
    waits = [first_wait(name, 10_000, LIMITS, NOW).until - NOW for name in names]
    assert min(waits) >= 0
    assert spread_seconds(10_000, LIMITS) == 1800.0
    assert max(waits) <= 1800
    minutes = Counter(int(wait // 60) for wait in waits)
    assert len(minutes) == 30
    assert max(minutes.values()) < 1.2 * 10_000 / 30


def test_a_small_partition_waits_shorter() -> None:
    assert spread_seconds(100, LIMITS) == pytest.approx(100 * SECONDS_PER_NODE)
    assert spread_seconds(100, replace(LIMITS, jitter_seconds=5.0)) == 5.0


def test_a_fault_of_the_nodes_own_does_not_wait_for_what_a_shared_cause_waits_for() -> None:
    hold = first_wait("n1", 10_000, LIMITS, NOW)
    assert must_wait(hold, SHARED, NOW)
    assert not must_wait(hold, OWN, NOW)
    assert must_wait(FleetHold(NOW, NOW + 9, times=1, own_hardware=True), OWN, NOW)
    assert not must_wait(None, SHARED, NOW)


NAMES = st.text("abcdefgh0123456789-", min_size=1, max_size=12)
PARTITIONS = st.builds(PartitionCount, st.just("p"), st.integers(1, 100_000), st.integers(0, 100_000))
SETTINGS = st.builds(
    FleetLimits,
    limit_percent=st.floats(0, 100),
    limit_min_nodes=st.integers(0, 20),
    own_hardware_limit_percent=st.floats(0, 100),
    own_hardware_limit_min_nodes=st.integers(0, 20),
    jitter_seconds=st.floats(0, 86400),
)


@given(name=NAMES, count=PARTITIONS, limits=SETTINGS, own=st.booleans(), now=st.floats(1e9, 2e9))
def test_holds_grow_up_to_an_hour_or_the_window_and_each_ends(
    name: str, count: PartitionCount, limits: FleetLimits, own: bool, now: float
) -> None:
    hold, begun, longest = None, now, max(MAX_HOLD_SECONDS, spread_seconds(count.nodes, limits))
    middles = []
    for times in range(1, 30):
        hold = backoff(hold, count, limits, own, name, now)
        wait = hold.until - now
        assert (hold.since, hold.times) == (begun, times)
        assert 0.8 * MIN_HOLD_SECONDS - 0.01 <= wait <= 1.2 * longest + 0.01
        middles.append(wait)
        assert must_wait(hold, own, now)
        now = hold.until
        assert not must_wait(hold, own, now)
    for shorter, longer in pairwise(middles):
        assert longer >= shorter * 0.8 / 1.2 - 0.01


def test_a_wait_that_nobody_could_end_in_time_is_spread_anew() -> None:
    hold = first_wait("n1", 10_000, LIMITS, NOW)
    assert not is_late(hold, hold.until + LATE_SECONDS)
    late = hold.until + LATE_SECONDS + 1
    assert is_late(hold, late)
    again = spread_again(hold, "n1", LIMITS, late)
    assert late <= again.until <= late + 1800
    assert again.since == hold.since


def test_chance_differs_from_node_to_node_and_from_time_to_time() -> None:
    assert len({pseudo_random(f"n{i}", NOW) for i in range(100)}) == 100
    assert pseudo_random("n1", NOW) != pseudo_random("n1", NOW + 1)
    assert all(0 <= pseudo_random(f"n{i}", NOW + i) < 1 for i in range(1000))


# --- whether the prolog may refuse jobs


def withheld(causes: list[Condition], memory: DrainRecord, now: float = NOW) -> bool:
    return is_withheld(causes, memory, "n1", LIMITS, now)


def test_a_shared_cause_keeps_jobs_away_only_where_a_counted_drain_stands() -> None:
    causes = [cause(shared=True)]
    assert withheld(causes, DrainRecord())
    assert withheld(causes, DrainRecord(reason="healthd: ...", awaits_count=True))
    assert not withheld(causes, DrainRecord(reason="healthd: ..."))
    assert not withheld(causes, DrainRecord(overriding_reason="mine"))


def test_a_fault_of_the_nodes_own_keeps_jobs_away_at_once_but_for_its_own_limit() -> None:
    causes = [cause(shared=True), cause(shared=False)]
    assert not withheld(causes, DrainRecord())
    assert not withheld(causes, DrainRecord(hold=FleetHold(NOW, NOW + 60, times=1)))
    assert withheld(causes, DrainRecord(hold=FleetHold(NOW, NOW + 60, times=1, own_hardware=True)))


def test_a_critical_fault_keeps_jobs_away_once_its_drain_without_a_count_is_due() -> None:
    critical, degraded = [replace(cause(shared=False), severity=Severity.CRITICAL)], [cause(shared=False)]
    memory = DrainRecord(count_failing_since=NOW, count_failed_at=NOW)
    due = uncounted_drain_at(memory, "n1", LIMITS)
    assert NOW + LIMITS.uncounted_drain_after_seconds <= due <= NOW + 2 * LIMITS.uncounted_drain_after_seconds
    assert withheld(critical, memory, due - 1)
    assert not withheld(critical, memory, due)
    assert withheld(degraded, memory, due)


def test_the_words_say_which_limit_holds() -> None:
    count = PartitionCount("gpu", 100, 10)
    said = describe(backoff(None, count, LIMITS, SHARED, "n1", NOW))
    assert said.startswith("delayed by the fleet limit: healthd keeps 10 of 100 nodes in partition gpu drained; ")
    assert said.endswith("drained; the limit for shared causes is 10")
    assert "waiting before the first fleet count" in describe(first_wait("n1", 100, LIMITS, NOW))
