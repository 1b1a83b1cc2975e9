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
    recent_count,
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
    FleetCount,
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
    ("nodes", "shared_limit", "own_limit"),
    [(1, 2, 5), (3, 2, 5), (10, 2, 5), (29, 2, 8), (30, 3, 9), (100, 10, 30), (10_000, 1000, 3000)],
)
def test_limit_for_is_percentage_with_minimum(nodes: int, shared_limit: int, own_limit: int) -> None:
    assert (limit_for(nodes, LIMITS, SHARED), limit_for(nodes, LIMITS, OWN)) == (shared_limit, own_limit)


def test_limit_for_does_not_round_decimal_percent_down() -> None:
    assert limit_for(1000, replace(LIMITS, limit_percent=0.7), SHARED) == 7


def test_is_own_hardware_if_any_cause_is() -> None:
    assert not is_own_hardware([cause(shared=True), cause(shared=True)])
    assert is_own_hardware([cause(shared=True), cause(shared=False)])


def test_tightest_returns_partition_with_least_room() -> None:
    big, small, full = PartitionCount("big", 1000, 90), PartitionCount("small", 20, 0), PartitionCount("full", 40, 4)
    assert tightest([big, small], LIMITS, SHARED) == small
    assert tightest([big, small, full], LIMITS, SHARED) == full
    assert not has_room(full, LIMITS, SHARED)
    assert not is_exceeded(full, LIMITS, SHARED)
    assert is_exceeded(replace(full, drained=5), LIMITS, SHARED)


def test_tightest_includes_nvlink_domain() -> None:
    big, domain = PartitionCount("big", 1000, 90), PartitionCount("1a2b3c4d", 0, 1, is_domain=True)
    for kind in (SHARED, OWN):
        assert tightest([big, domain], LIMITS, kind) == domain
        assert has_room(domain, LIMITS, kind)
        assert not has_room(replace(domain, drained=2), LIMITS, kind)
        assert not is_exceeded(replace(domain, drained=2), LIMITS, kind)
        assert is_exceeded(replace(domain, drained=3), LIMITS, kind)
    wide = replace(LIMITS, domain_limit_nodes=18)
    assert tightest([big, domain], wide, SHARED) == big
    assert has_room(replace(domain, drained=17), wide, SHARED)


def test_hold_for_nvlink_domain_names_the_domain() -> None:
    hold = backoff(None, PartitionCount("1a2b3c4d", 0, 2, is_domain=True), LIMITS, OWN, "n1", NOW)
    assert (hold.partition, hold.domain, hold.nodes, hold.drained, hold.limit) == ("", "1a2b3c4d", 0, 2, 2)
    assert hold.until - NOW >= 0.8 * MIN_HOLD_SECONDS
    assert describe(hold) == (
        "delayed by the fleet limit: healthd keeps 2 nodes in NVLink domain 1a2b3c4d drained; "
        "the limit for a domain is 2"
    )


def test_recent_count_must_cover_the_domain() -> None:
    partition, domain = PartitionCount("gpu", 100, 9), PartitionCount("1a2b3c4d", 0, 2, is_domain=True)
    with_domain = DrainRecord(stored_count=FleetCount(NOW, (partition, domain)))
    without_domain = DrainRecord(stored_count=FleetCount(NOW, (partition,)))
    assert recent_count(with_domain, ["gpu"], "1a2b3c4d", NOW) == (partition, domain)
    assert recent_count(without_domain, ["gpu"], "1a2b3c4d", NOW) == ()
    assert recent_count(without_domain, ["gpu"], "", NOW) == (partition,)
    assert recent_count(with_domain, ["gpu"], "ffffffff", NOW) == ()
    assert recent_count(with_domain, ["gpu", "1a2b3c4d"], "", NOW) == (), "a partition with the domain's name"


# --- waits


def test_first_wait_spreads_nodes_over_window() -> None:
    names = [f"gpu{i:05d}" for i in range(10_000)]
    waits = [first_wait(name, 10_000, LIMITS, NOW).until - NOW for name in names]
    assert min(waits) >= 0
    assert spread_seconds(10_000, LIMITS) == 1800.0
    assert max(waits) <= 1800
    count_by_minute = Counter(int(wait // 60) for wait in waits)
    assert len(count_by_minute) == 30
    assert max(count_by_minute.values()) < 1.2 * 10_000 / 30


def test_spread_seconds_is_shorter_for_small_partition() -> None:
    assert spread_seconds(100, LIMITS) == pytest.approx(100 * SECONDS_PER_NODE)
    assert spread_seconds(100, replace(LIMITS, jitter_seconds=5.0)) == 5.0


def test_must_wait_ignores_shared_hold_for_own_hardware() -> None:
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
def test_backoff_grows_up_to_limit_and_each_hold_ends(
    name: str, count: PartitionCount, limits: FleetLimits, own: bool, now: float
) -> None:
    hold, started, max_wait = None, now, max(MAX_HOLD_SECONDS, spread_seconds(count.nodes, limits))
    waits = []
    for times in range(1, 30):
        hold = backoff(hold, count, limits, own, name, now)
        wait = hold.until - now
        assert (hold.since, hold.times) == (started, times)
        assert 0.8 * MIN_HOLD_SECONDS - 0.01 <= wait <= 1.2 * max_wait + 0.01
        waits.append(wait)
        assert must_wait(hold, own, now)
        now = hold.until
        assert not must_wait(hold, own, now)
    for earlier_wait, later_wait in pairwise(waits):
        assert later_wait >= earlier_wait * 0.8 / 1.2 - 0.01


def test_spread_again_replaces_late_wait() -> None:
    hold = first_wait("n1", 10_000, LIMITS, NOW)
    assert not is_late(hold, hold.until + LATE_SECONDS)
    late_time = hold.until + LATE_SECONDS + 1
    assert is_late(hold, late_time)
    new_hold = spread_again(hold, "n1", LIMITS, late_time)
    assert late_time <= new_hold.until <= late_time + 1800
    assert new_hold.since == hold.since


def test_pseudo_random_differs_by_node_and_time() -> None:
    assert len({pseudo_random(f"n{i}", NOW) for i in range(100)}) == 100
    assert pseudo_random("n1", NOW) != pseudo_random("n1", NOW + 1)
    assert all(0 <= pseudo_random(f"n{i}", NOW + i) < 1 for i in range(1000))


# --- whether the prolog may refuse jobs


def withheld(causes: list[Condition], record: DrainRecord, now: float = NOW) -> bool:
    return is_withheld(causes, record, "n1", LIMITS, now)


def test_shared_cause_is_withheld_until_drain_is_counted() -> None:
    causes = [cause(shared=True)]
    assert withheld(causes, DrainRecord())
    assert withheld(causes, DrainRecord(reason="healthd: ...", awaits_count=True))
    assert not withheld(causes, DrainRecord(reason="healthd: ..."))
    assert not withheld(causes, DrainRecord(overriding_reason="mine"))


def test_own_hardware_is_withheld_only_by_own_limit() -> None:
    causes = [cause(shared=True), cause(shared=False)]
    assert not withheld(causes, DrainRecord())
    assert not withheld(causes, DrainRecord(hold=FleetHold(NOW, NOW + 60, times=1)))
    assert withheld(causes, DrainRecord(hold=FleetHold(NOW, NOW + 60, times=1, own_hardware=True)))


def test_critical_fault_is_withheld_until_uncounted_drain_is_due() -> None:
    critical, degraded = [replace(cause(shared=False), severity=Severity.CRITICAL)], [cause(shared=False)]
    record = DrainRecord(count_failing_since=NOW, count_failed_at=NOW)
    due = uncounted_drain_at(record, "n1", LIMITS)
    assert NOW + LIMITS.uncounted_drain_after_seconds <= due <= NOW + 2 * LIMITS.uncounted_drain_after_seconds
    assert withheld(critical, record, due - 1)
    assert not withheld(critical, record, due)
    assert withheld(degraded, record, due)


def test_describe_names_limit() -> None:
    count = PartitionCount("gpu", 100, 10)
    text = describe(backoff(None, count, LIMITS, SHARED, "n1", NOW))
    assert text.startswith("delayed by the fleet limit: healthd keeps 10 of 100 nodes in partition gpu drained; ")
    assert text.endswith("drained; the limit for shared causes is 10")
    assert "waiting before the first fleet count" in describe(first_wait("n1", 100, LIMITS, NOW))
