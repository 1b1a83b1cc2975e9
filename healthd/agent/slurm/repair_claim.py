"""The claim of a repair: how the nodes of a cluster keep to `repair.max_concurrent`. The functions are pure.
reconcile.py does the counting.

A node that is to be repaired adds a note to the Reason of its drain (drain_reason.py: claim_note). All nodes see this
claim in Slurm. A node claims its step only if fewer than `max_concurrent` other nodes have a claim, and if each of its
partitions has another node in service.

Nodes that count at the same moment may all find room for one more. Each node therefore counts three times:

before the claim      all claims
after the claim       the claims that, by slurmctld's clock, are at least as old as the node's own, so that of several
                      nodes one keeps its claim. The claim of a node that reboots, or whose Reason has one of Slurm's
                      suffixes ("reboot issued"), is always counted, because Slurm renewed its time stamp
right before a step   all claims (repair/slurm_state.py)

If there are too many, the node removes its claim, and tries again after a wait that grows.

Slurm may replace the Reason of a node that is being repaired, such as after a boot with fewer GPUs (from 24.11 on). The
claim is then hidden until the node's healthd has written it again, with a new time stamp. A drained node whose Reason
Slurm has replaced therefore counts as a claim for HIDDEN_SECONDS, and the last count includes newer claims. So the node
whose step has begun keeps its claim, and the others wait.

While a claim is in force, healthd does not change the Reason, even if another cause becomes the worst, because a change
would renew the time stamp.

If the nodes cannot be counted, there is no claim and therefore no repair.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from healthd.agent.slurm.fleet_limit import pseudo_random
from healthd.common.model import ClaimHold, DrainRecord, RepairClaim, RepairStep
from healthd.common.slurm.output import Claim, PartitionService

MIN_HOLD_SECONDS = 60.0
MAX_HOLD_SECONDS = 900.0
# How often the node is read while a claim is in force: a reboot changes the node's state at any moment.
READ_SECONDS = 15.0
# How long a Reason that Slurm has replaced may hide a claim: some times READ_SECONDS, because Slurm may answer late.
HIDDEN_SECONDS = 120.0


def is_counted(step: RepairStep | None) -> bool:
    """Return True for a step of a repair. A failed repair needs a person and is not counted."""
    return step is not None and step is not RepairStep.PERSON


def needs_cluster_size(max_concurrent: int | str) -> bool:
    return isinstance(max_concurrent, str)


def limit_for(max_concurrent: int | str, nodes: int) -> int:
    """Return the allowed number of simultaneous repairs. A percentage of `nodes` is rounded down (at least 1)."""
    if isinstance(max_concurrent, int):
        return max_concurrent
    return max(nodes * int(max_concurrent.removesuffix("%")) // 100, 1)


def other_claims(claims: Iterable[Claim], node_name: str, claimed_at: float) -> list[Claim]:
    """Return the claims of all other nodes, for the count right before a step.

    `claimed_at` is Slurm's time stamp of this node's claim, in epoch seconds. A hidden claim counts if Slurm replaced
    it in the last HIDDEN_SECONDS before `claimed_at` or later. If `claimed_at` is 0, there is no claim of this node
    yet, and hidden claims do not count.
    """
    hidden_since = claimed_at - HIDDEN_SECONDS if claimed_at else float("inf")
    others = (claim for claim in claims if claim.node != node_name)
    return [claim for claim in others if not claim.is_hidden or claim.time >= hidden_since]


def earlier_claims(claims: Iterable[Claim], node_name: str, claimed_at: float) -> list[Claim]:
    """Return the claims of other nodes that take precedence over this node's claim, for the count after the claim.

    If `claimed_at` is 0 (before the claim), all count. For hidden claims, see `other_claims`.
    """
    return [
        claim
        for claim in other_claims(claims, node_name, claimed_at)
        if claim.is_renewed or claim.is_hidden or claim.time <= claimed_at or not claimed_at
    ]


def count_problem(claims: Sequence[Claim], limit: int) -> str:
    """Return why the other nodes' claims leave no room for this node's claim, or ""."""
    if len(claims) < limit:
        return ""
    names = sorted(f"{claim.node}{' (perhaps)' if claim.is_hidden else ''}" for claim in claims)
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    verb = "is" if len(names) == 1 else "are"
    return f"{', '.join(names[:3])}{more} {verb} being repaired; the limit is {limit} (repair.max_concurrent)"


def service_problem(partitions: Iterable[PartitionService]) -> str:
    """Return which partition would be left without a node in service, or "". A partition of one node is ignored."""
    empty = [each.name for each in partitions if each.nodes > 1 and each.in_service == 0]
    return f"no other node of partition {empty[0]} is in service" if empty else ""


def backoff(previous: ClaimHold | None, problem: str, node_name: str, now: float) -> ClaimHold:
    """Return the next hold for a claim. The wait doubles each time up to a maximum and has 20 % jitter."""
    times = previous.times if previous else 0
    seconds = min(MIN_HOLD_SECONDS * 2.0 ** min(times, 10), MAX_HOLD_SECONDS)
    return ClaimHold(now + seconds * (0.8 + 0.4 * pseudo_random(node_name, now)), times + 1, problem)


def step_to_claim(claim: RepairClaim | None, record: DrainRecord, now: float) -> RepairStep | None:
    """Return the step that the Reason of healthd's drain must claim now, or None.

    A claim waits while it is on hold, or while the fleet limit may still lift the drain.
    """
    if claim is None:
        return None
    if claim.step is RepairStep.PERSON or record.claim is claim.step:
        return claim.step
    is_on_hold = record.claim_hold is not None and now < record.claim_hold.until
    return None if is_on_hold or record.awaits_count else claim.step


def read_again_at(claim: RepairClaim | None, record: DrainRecord, now: float) -> float:
    """Return the time to read the node again for a claim (epoch seconds), or infinity if no claim is in progress."""
    if claim is None or not is_counted(claim.step):
        return float("inf")
    hold = record.claim_hold
    return max(hold.until, now + 1.0) if hold is not None and record.claim is None else now + READ_SECONDS
