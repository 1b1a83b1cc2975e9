"""Whether the fleet can spare this node: pure. One bad shared thing must not drain the cluster. look.py counts.

the causes of a new drain       what happens
------------------------------  ------------------------------------------------------------------------------
one is this node's own          at once, if healthd holds fewer nodes than the second, higher limit
(a GPU off the bus)
all may be shared with others   first a wait of random length, so that no thousand nodes count in one second; then
(file server, service, fabric,  it drains if healthd holds fewer nodes than the limit. Else it is held: it looks
driver)                         again after waits that double

Nodes that count at the same moment may all see room for one more. So each, once drained, counts again the nodes
whose drain is not younger than its own, by slurmctld's clock. If they are more than the limit, it takes its drain
back. The last node that stays has counted all others that stay: so never more stay than the limit.

A drain that was counted again is never lifted by the limit, and a drain of somebody else needs no count.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import replace

from healthd.config import FleetLimits
from healthd.model import LONGEST_HOLD_SECONDS, Condition, FleetHold, SlurmMemory
from healthd.values import dataclass

# A count takes 13 ms of slurmctld's time at 10,000 nodes. Five nodes a second count, and those that drain twice.
SECONDS_A_NODE = 0.2
SHORTEST_HOLD_SECONDS = 60.0
# A node that is later than this (slurmctld was away, daemons were stopped) is not alone: all spread out anew.
LATE_SECONDS = 60.0


@dataclass(frozen=True, slots=True)
class PartitionCount:
    """`drained`: the nodes of the partition that healthd holds drained."""

    name: str
    nodes: int
    drained: int


def is_own_hardware(causes: Iterable[Condition]) -> bool:
    """Whether one of the causes is this node's own: one is enough."""
    return any(not cause.shared_cause for cause in causes)


def allowed(nodes: int, limits: FleetLimits, own_hardware: bool) -> int:
    """How many of `nodes` nodes healthd may hold drained."""
    if own_hardware:
        percent, at_least = limits.own_hardware_limit_percent, limits.own_hardware_limit_at_least
    else:
        percent, at_least = limits.limit_percent, limits.limit_at_least
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


def is_withheld(causes: Sequence[Condition], memory: SlurmMemory) -> bool:
    """Whether these causes must not keep jobs away (yet): a shared cause only where a drain stands and was counted."""
    if is_own_hardware(causes):
        return memory.hold is not None and memory.hold.own_hardware
    return memory.uncounted or not (memory.reason or memory.overruled or memory.adopted)


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
