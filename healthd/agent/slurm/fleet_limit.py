"""Fleet limit: how many nodes healthd may keep drained at the same time. Pure functions; reconcile.py does the
counting.

A fault of the node's own hardware (a GPU off the bus) drains at once while healthd keeps fewer nodes drained than the
higher limit. A fault that other nodes may share (file server, service, fabric, driver) first waits for a random time,
so that thousands of nodes do not query slurmctld in the same second, and then drains while there is room under the
lower limit. Otherwise the drain is held and retried with exponential backoff.

Nodes that count at the same moment may all see room for one more. Each node therefore counts again after its drain,
including only drains that are at least as old as its own by slurmctld's clock, and takes its drain back if the limit is
exceeded. The last node that stays has counted all others that stay, so the limit is never exceeded for long.

If the fleet cannot be counted (sinfo fails, its table cannot be read, slurmctld is away), the limit must not be off:

- A stored count stands in for RECENT_SECONDS. Only counts that gave no room, or that confirmed a drain of this node,
  are stored. Nodes count only when they want to drain, so the nodes that find room in a stored count are nodes whose
  drain was within the limit and has been resumed since. At most as many nodes as the limit allows can do that within
  RECENT_SECONDS, however many want to drain; with those that drained in their place, at most twice the limit.
- Otherwise the drain is held. After `uncounted_drain_after_seconds`, and a random time of up to as long again, a
  CRITICAL fault of the node's own hardware drains without a count.
- Jobs are requeued only after a count that was made after the drain.

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
    LONGEST_HOLD_SECONDS,
    Condition,
    FleetCount,
    FleetHold,
    PartitionCount,
    Severity,
    SlurmMemory,
)

# A count takes 13 ms of slurmctld's time at 10,000 nodes. Five nodes a second count, and those that drain twice.
SECONDS_A_NODE = 0.2
SHORTEST_HOLD_SECONDS = 60.0
# A node that is later than this (slurmctld was away, daemons were stopped) is not alone: all spread out anew.
LATE_SECONDS = 60.0
# How long a stored count stands in for one that fails: a slurmctld that restarts or is busy is back by then.
RECENT_SECONDS = 600.0


def is_own_hardware(causes: Iterable[Condition]) -> bool:
    """Whether one of the causes is this node's own: one is enough."""
    return any(not cause.shared_cause for cause in causes)


def allowed(nodes: int, limits: FleetLimits, own_hardware: bool) -> int:
    """How many of `nodes` nodes healthd may hold drained."""
    if own_hardware:
        percent, at_least = limits.own_hardware_limit_percent, limits.own_hardware_limit_min_nodes
    else:
        percent, at_least = limits.limit_percent, limits.limit_min_nodes
    return max(math.floor(nodes * percent / 100 + 1e-9), at_least)


def strictest(counts: Sequence[PartitionCount], limits: FleetLimits, own_hardware: bool) -> PartitionCount:
    """The partition with the least room."""
    return min(counts, key=lambda count: (allowed(count.nodes, limits, own_hardware) - count.drained, count.name))


def has_room(count: PartitionCount, limits: FleetLimits, own_hardware: bool) -> bool:
    """Whether one more may be drained. A node that is drained already counts itself and asks `is_beyond`."""
    return count.drained < allowed(count.nodes, limits, own_hardware)


def is_beyond(count: PartitionCount, limits: FleetLimits, own_hardware: bool) -> bool:
    return count.drained > allowed(count.nodes, limits, own_hardware)


# --- waits


def window(nodes: int, limits: FleetLimits) -> float:
    """The seconds over which `nodes` nodes spread their first counts."""
    return min(limits.jitter_seconds, nodes * SECONDS_A_NODE)


def chance(node_name: str, now: float) -> float:
    """0 to 1, as good as random from node to node and from time to time."""
    return zlib.crc32(f"{now:.3f} {node_name}".encode()) / 2**32


def first_wait(node_name: str, nodes: int, limits: FleetLimits, now: float) -> FleetHold:
    """The wait before the first count for a shared cause. `nodes`: the size of the largest partition."""
    return FleetHold(since=now, until=now + chance(node_name, now) * window(nodes, limits), nodes=nodes)


def no_wait(now: float) -> FleetHold:
    """The hold of a drain that was lost: it had its wait, and is counted as soon as it is put back."""
    return FleetHold(since=now, until=now)


def spread_anew(hold: FleetHold, node_name: str, limits: FleetLimits, now: float) -> FleetHold:
    return replace(hold, until=now + chance(node_name, now) * window(hold.nodes, limits))


def held(
    before: FleetHold | None, count: PartitionCount, limits: FleetLimits, own_hardware: bool, node_name: str, now: float
) -> FleetHold:
    """The limit holds the drain back: the hold, with the next try after a doubled wait."""
    times = before.times if before else 0
    first = max(SHORTEST_HOLD_SECONDS, window(count.nodes, limits))
    seconds = min(first * 2.0 ** min(times, 20), max(LONGEST_HOLD_SECONDS, first))
    return FleetHold(
        since=before.since if before else now,
        until=now + seconds * (0.8 + 0.4 * chance(node_name, now)),
        times=times + 1,
        own_hardware=own_hardware,
        partition=count.name,
        nodes=count.nodes,
        drained=count.drained,
        limit=allowed(count.nodes, limits, own_hardware),
    )


def must_wait(hold: FleetHold | None, own_hardware: bool, now: float) -> bool:
    """Whether a drain must still wait. A fault of the node's own does not wait like a shared cause."""
    return hold is not None and now < hold.until and (hold.own_hardware or not own_hardware)


def stored(count: Sequence[PartitionCount], now: float) -> FleetCount:
    return FleetCount(now, tuple(count))


def stand_in(memory: SlurmMemory, partitions: Collection[str], now: float) -> tuple[PartitionCount, ...]:
    """Return the stored count if it is recent and of these partitions, else nothing.

    It includes this node's own earlier drain, so it shows at most the room that there was."""
    count = memory.counted
    if count is None or not 0 <= now - count.time <= RECENT_SECONDS:
        return ()
    return count.partitions if {each.name for each in count.partitions} == set(partitions) else ()


def count_failed(memory: SlurmMemory, now: float) -> SlurmMemory:
    """Return the memory after a count that failed. Failures further apart than RECENT_SECONDS are not one outage: the
    wait for an uncounted drain begins again, because nothing is known of the time between."""
    goes_on = memory.uncounted_since > 0 and now - memory.uncounted_at <= RECENT_SECONDS
    return replace(memory, uncounted_since=memory.uncounted_since if goes_on else now, uncounted_at=now)


def count_succeeded(memory: SlurmMemory) -> SlurmMemory:
    return replace(memory, uncounted_since=0.0, uncounted_at=0.0)


def uncounted_drain_at(memory: SlurmMemory, node_name: str, limits: FleetLimits) -> float:
    """Return when a drain may be set without a count (epoch seconds), for a count that fails since `uncounted_since`.

    The random part keeps nodes that fail together from draining in the same minute."""
    wait = limits.uncounted_drain_after_seconds
    return memory.uncounted_since + wait * (1.0 + chance(node_name, memory.uncounted_since))


def may_drain_uncounted(causes: Iterable[Condition]) -> bool:
    """Return True if one of the causes is a CRITICAL fault of the node's own hardware."""
    return any(not cause.shared_cause and cause.severity >= Severity.CRITICAL for cause in causes)


def is_withheld(
    causes: Sequence[Condition], memory: SlurmMemory, node_name: str, limits: FleetLimits, now: float
) -> bool:
    """Return True if the prolog must let jobs start although a drain is wanted for these causes.

    A prolog that refuses a job makes slurmctld drain the node, so it must not refuse while the limit holds the drain,
    nor while the fleet cannot be counted and a drain without a count is not due. A shared cause keeps jobs away only
    once its drain stands and was counted.
    """
    if not is_own_hardware(causes):
        return memory.uncounted or not _stands(memory)
    if memory.hold is not None and memory.hold.own_hardware:
        return True
    waits_for_count = memory.uncounted_since > 0 and not _stands(memory)
    return waits_for_count and not is_uncounted_drain_due(causes, memory, node_name, limits, now)


def is_uncounted_drain_due(
    causes: Iterable[Condition], memory: SlurmMemory, node_name: str, limits: FleetLimits, now: float
) -> bool:
    """Return True if the node may be drained now although the fleet cannot be counted."""
    return may_drain_uncounted(causes) and now >= uncounted_drain_at(memory, node_name, limits)


def needs_count(causes: Sequence[Condition], memory: SlurmMemory) -> bool:
    """Return True if a new drain is wanted for a fault of the node's own hardware, and no count has allowed it yet.

    A drain for a shared cause is withheld until it stands, so it needs no note of a missing count.
    """
    return is_own_hardware(causes) and not _stands(memory) and not memory.uncounted


def _stands(memory: SlurmMemory) -> bool:
    return bool(memory.reason or memory.overruled or memory.adopted)


def is_late(hold: FleetHold, now: float) -> bool:
    return now > hold.until + LATE_SECONDS


def why(hold: FleetHold) -> str:
    if not hold.times:
        return "other nodes may have the same cause: this one waits for its turn to count how many healthd holds"
    kind = "faults of nodes' own hardware" if hold.own_hardware else "shared causes"
    return (
        f"held by the fleet limit: healthd holds {hold.drained} of the {hold.nodes} nodes of partition "
        f"{hold.partition}, and for {kind} it may hold {hold.limit}"
    )


def why_uncounted(memory: SlurmMemory, causes: Sequence[Condition], node_name: str, limits: FleetLimits) -> str:
    """Return why a drain is held while the fleet cannot be counted."""
    held_because = "held by the fleet limit: the nodes that healthd keeps drained cannot be counted"
    if not may_drain_uncounted(causes):
        return held_because
    at = datetime.fromtimestamp(uncounted_drain_at(memory, node_name, limits), timezone.utc)
    return f"{held_because}; if that lasts, this node is drained at {at:%H:%M:%S} UTC, without a requeue"
