"""Fleet limit: the number of nodes that healthd may keep drained at the same time. The functions are pure. reconcile.py
does the counting.

A fault of the node's own hardware (a GPU off the bus) drains at once while healthd keeps fewer nodes drained than the
higher limit. A fault that other nodes may share (file server, service, fabric, driver) first waits for a random time,
so that thousands of nodes do not query slurmctld in the same second. It then drains if there is room under the lower
limit. Otherwise the drain is held and retried with exponential backoff.

Nodes that count at the same moment may all find room for one more. Each node therefore counts again after its drain,
and lifts the drain if the limit is exceeded. The second count includes only drains that, by slurmctld's clock, are at
least as old as the node's own drain. The last node that stays has counted all others that stay, so the limit is never
exceeded for long.

If the fleet cannot be counted (sinfo fails, its table cannot be read, slurmctld is unreachable), the limit must still
apply:

- A stored count is used for RECENT_SECONDS. Only counts that left no room, or that confirmed a drain of this node, are
  stored. Nodes count only if they need to drain. A stored count therefore shows room only to a node whose drain was
  within the limit and that has been resumed since. At most as many such nodes as the limit allows can drain again
  within RECENT_SECONDS, even if more need to drain. Together with the nodes that drained in their place, that is at
  most twice the limit.
- Otherwise the drain is held. After `uncounted_drain_after_seconds`, plus a random time of at most the same length, a
  CRITICAL fault of the node's own hardware drains without a count.
- Jobs are requeued only after a count that was made after the drain.

A node whose NVLink domain spans several nodes (an NVL72 rack) also counts the drained nodes of this domain, for which
there is a separate limit. Many nodes of a domain may report one fault of a switch, and the node that reports a fault is
often not the one that has it. The same limit therefore applies to both kinds of causes. Slurm does not show the
domains: each Reason contains the short id of its node's domain (drain_reason.py).

The limit never lifts a drain that has passed the second count. Drains made by other tools are not counted.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Collection, Iterable, Sequence
from datetime import datetime, timezone

from msgspec.structs import replace

from healthd.agent.settings.config import FleetLimits
from healthd.common.model import (
    MAX_HOLD_SECONDS,
    Condition,
    DrainRecord,
    FleetCount,
    FleetHold,
    PartitionCount,
    Severity,
)

# A count takes 13 ms of slurmctld's time at 10,000 nodes. The value below limits first counts to about five per second.
# A node that drains counts twice.
SECONDS_PER_NODE = 0.2
MIN_HOLD_SECONDS = 60.0
# If a node counts later than planned by more than this, other nodes probably do so too (slurmctld was unreachable,
# daemons were stopped). All of them then spread out again.
LATE_SECONDS = 60.0
# How long a stored count can replace a failed count. By then, a slurmctld that was restarting or busy responds again.
RECENT_SECONDS = 600.0


def is_own_hardware(causes: Iterable[Condition]) -> bool:
    """Return True if at least one of the causes is a fault of this node itself."""
    return any(not cause.shared_cause for cause in causes)


def limit_for(nodes: int, limits: FleetLimits, own_hardware: bool) -> int:
    """Return the number of nodes, out of `nodes`, that healthd may keep drained."""
    if own_hardware:
        percent, min_nodes = limits.own_hardware_limit_percent, limits.own_hardware_limit_min_nodes
    else:
        percent, min_nodes = limits.limit_percent, limits.limit_min_nodes
    return max(math.floor(nodes * percent / 100 + 1e-9), min_nodes)


def count_limit(count: PartitionCount, limits: FleetLimits, own_hardware: bool) -> int:
    """Return the number of nodes in this partition or NVLink domain that healthd may keep drained."""
    return limits.domain_limit_nodes if count.is_domain else limit_for(count.nodes, limits, own_hardware)


def tightest(counts: Sequence[PartitionCount], limits: FleetLimits, own_hardware: bool) -> PartitionCount:
    """Return the count of the partition or NVLink domain with the least room left."""
    return min(counts, key=lambda count: (count_limit(count, limits, own_hardware) - count.drained, count.name))


def has_room(count: PartitionCount, limits: FleetLimits, own_hardware: bool) -> bool:
    """Return True if one more node may be drained. For a node that is already drained, use `is_exceeded`."""
    return count.drained < count_limit(count, limits, own_hardware)


def is_exceeded(count: PartitionCount, limits: FleetLimits, own_hardware: bool) -> bool:
    return count.drained > count_limit(count, limits, own_hardware)


# --- waits


def spread_seconds(nodes: int, limits: FleetLimits) -> float:
    """Return the time in seconds over which `nodes` nodes spread their first counts."""
    return min(limits.jitter_seconds, nodes * SECONDS_PER_NODE)


def pseudo_random(node_name: str, now: float) -> float:
    """Return a pseudo-random number from 0 to 1 that varies between nodes and over time."""
    return zlib.crc32(f"{now:.3f} {node_name}".encode()) / 2**32


def first_wait(node_name: str, nodes: int, limits: FleetLimits, now: float) -> FleetHold:
    """Return the wait before the first count for a shared cause. `nodes` is the size of the largest partition."""
    return FleetHold(since=now, until=now + pseudo_random(node_name, now) * spread_seconds(nodes, limits), nodes=nodes)


def no_wait(now: float) -> FleetHold:
    """Return the hold for a lost drain. The drain has already waited, so it is counted as soon as it is set again."""
    return FleetHold(since=now, until=now)


def spread_again(hold: FleetHold, node_name: str, limits: FleetLimits, now: float) -> FleetHold:
    return replace(hold, until=now + pseudo_random(node_name, now) * spread_seconds(hold.nodes, limits))


def backoff(
    previous: FleetHold | None,
    count: PartitionCount,
    limits: FleetLimits,
    own_hardware: bool,
    node_name: str,
    now: float,
) -> FleetHold:
    """Return the next hold for a delayed drain. The wait doubles each time up to a maximum and has 20 % jitter."""
    attempts = previous.times if previous else 0
    first = max(MIN_HOLD_SECONDS, spread_seconds(count.nodes, limits))
    seconds = min(first * 2.0 ** min(attempts, 20), max(MAX_HOLD_SECONDS, first))
    return FleetHold(
        since=previous.since if previous else now,
        until=now + seconds * (0.8 + 0.4 * pseudo_random(node_name, now)),
        times=attempts + 1,
        own_hardware=own_hardware,
        partition="" if count.is_domain else count.name,
        nodes=count.nodes,
        drained=count.drained,
        limit=count_limit(count, limits, own_hardware),
        domain=count.name if count.is_domain else "",
    )


def must_wait(hold: FleetHold | None, own_hardware: bool, now: float) -> bool:
    """Return True if a drain must still wait.

    The hold for a shared cause does not delay a drain for the node's own hardware.
    """
    return hold is not None and now < hold.until and (hold.own_hardware or not own_hardware)


def fleet_count(count: Sequence[PartitionCount], now: float) -> FleetCount:
    return FleetCount(now, tuple(count))


def recent_count(
    record: DrainRecord, partitions: Collection[str], domain: str, now: float
) -> tuple[PartitionCount, ...]:
    """Return the stored count if it is recent and covers these partitions and this NVLink domain, otherwise ().

    The count includes this node's own earlier drain, so it never overstates the room.
    """
    count = record.stored_count
    if count is None or not 0 <= now - count.time <= RECENT_SECONDS:
        return ()
    needed = {(name, False) for name in partitions} | ({(domain, True)} if domain else set())
    return count.partitions if {(each.name, each.is_domain) for each in count.partitions} == needed else ()


def after_failed_count(record: DrainRecord, now: float) -> DrainRecord:
    """Return the record, updated to reflect a failed count.

    Two failures that are more than RECENT_SECONDS apart are not one outage, because the state in between is unknown.
    The wait for an uncounted drain then starts over.
    """
    is_same_outage = record.count_failing_since > 0 and now - record.count_failed_at <= RECENT_SECONDS
    return replace(
        record, count_failing_since=record.count_failing_since if is_same_outage else now, count_failed_at=now
    )


def after_count(record: DrainRecord) -> DrainRecord:
    return replace(record, count_failing_since=0.0, count_failed_at=0.0)


def uncounted_drain_at(record: DrainRecord, node_name: str, limits: FleetLimits) -> float:
    """Return the time at which a drain may be set without a count (epoch seconds), if counts have failed since
    `count_failing_since`.

    The random part keeps nodes that fail at the same time from draining in the same minute.
    """
    wait = limits.uncounted_drain_after_seconds
    return record.count_failing_since + wait * (1.0 + pseudo_random(node_name, record.count_failing_since))


def may_drain_uncounted(causes: Iterable[Condition]) -> bool:
    """Return True if one of the causes is a CRITICAL fault of the node's own hardware."""
    return any(not cause.shared_cause and cause.severity >= Severity.CRITICAL for cause in causes)


def is_withheld(
    causes: Sequence[Condition], record: DrainRecord, node_name: str, limits: FleetLimits, now: float
) -> bool:
    """Return True if the prolog must let jobs start even though a drain is desired for these causes.

    If a prolog refuses a job, slurmctld drains the node. The prolog must therefore not refuse jobs while the limit
    delays the drain. The same applies while the fleet cannot be counted and a drain without a count is not due. For a
    shared cause, jobs are refused only once the drain is set and counted.
    """
    if not is_own_hardware(causes):
        return record.awaits_count or not _is_drained(record)
    if record.hold is not None and record.hold.own_hardware:
        return True
    is_count_missing = record.count_failing_since > 0 and not _is_drained(record)
    return is_count_missing and not is_uncounted_drain_due(causes, record, node_name, limits, now)


def is_uncounted_drain_due(
    causes: Iterable[Condition], record: DrainRecord, node_name: str, limits: FleetLimits, now: float
) -> bool:
    """Return True if the node may be drained now even though the fleet cannot be counted."""
    return may_drain_uncounted(causes) and now >= uncounted_drain_at(record, node_name, limits)


def needs_count(causes: Sequence[Condition], record: DrainRecord) -> bool:
    """Return True if a new drain is desired for a fault of the node's own hardware, and no count has allowed the drain
    yet.

    A drain for a shared cause is withheld until it is set, so a missing count does not have to be recorded.
    """
    return is_own_hardware(causes) and not _is_drained(record) and not record.awaits_count


def _is_drained(record: DrainRecord) -> bool:
    return bool(record.reason or record.overriding_reason or record.adopted_reason)


def is_late(hold: FleetHold, now: float) -> bool:
    return now > hold.until + LATE_SECONDS


def describe(hold: FleetHold) -> str:
    if not hold.times:
        return "waiting before the first fleet count: other nodes may share this fault"
    if hold.domain:
        return (
            f"delayed by the fleet limit: healthd keeps {hold.drained} nodes in NVLink domain {hold.domain} drained; "
            f"the limit for a domain is {hold.limit}"
        )
    kind = "hardware faults" if hold.own_hardware else "shared causes"
    return (
        f"delayed by the fleet limit: healthd keeps {hold.drained} of {hold.nodes} nodes in partition {hold.partition} "
        f"drained; the limit for {kind} is {hold.limit}"
    )


def describe_uncounted(record: DrainRecord, causes: Sequence[Condition], node_name: str, limits: FleetLimits) -> str:
    """Return the reason why a drain is delayed while the fleet cannot be counted."""
    text = "delayed by the fleet limit: the nodes that healthd keeps drained cannot be counted"
    if not may_drain_uncounted(causes):
        return text
    at = datetime.fromtimestamp(uncounted_drain_at(record, node_name, limits), timezone.utc)
    return f"{text}; if this continues, the node is drained at {at:%H:%M:%S} UTC, without a requeue"
