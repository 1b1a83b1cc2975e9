"""Finds outliers among peers: ranks whose own time rose relative to their baseline and to their peers.

All functions are pure.

peers.py describes the limits and their reasons.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from healthd.failslow import windows
from healthd.failslow.model import Cause, Kind
from healthd.failslow.steps import Observed, Step
from healthd.failslow.windows import Change, Channel, measure_change

MIN_PEERS = 4
LIMIT = 1.1
COMMUNICATION_LIMIT = 1.2
MIN_STANDARD_ERRORS = 4.0
MIN_EXPLAINED_SHARE = 0.3
PAUSE_EXCESS, MAX_FAST_SHARE = (
    1.3,
    0.2,
)  # a rise above this, with a larger share of samples as fast as before, indicates frequent pauses


class Outlier(NamedTuple):
    """An outlier.

    Attributes:
        excess: its change divided by its peers' change.
        standard_errors: difference between both changes, in standard errors.
    """

    member: int
    cause: Cause
    excess: float
    standard_errors: float
    limit: float
    peers: int
    sentence: str
    channel: Channel | None = None  # the compared time that became slower
    role: tuple[int, ...] = ()
    time: float = 0.0
    fast_share: float = 0.0


def find_outliers(
    observed: Observed,
    role: Sequence[int],
    changes: Mapping[int, Change],
    limit: float,
    lost: float,
    kind: Kind,
    candidates: Iterable[int] = (),
    ranks: int = 0,
) -> list[Outlier]:
    """Return the members whose change is more than `limit` times the median change in their role.

    Args:
        lost: increase in the iteration time.
        candidates: members to test; all by default.
        ranks: number of ranks with the role, if `role` contains only a selection of them.
    """
    peer_changes = {member: changes[member] for member in role if member in changes}
    if len(peer_changes) < MIN_PEERS:
        return []
    logs = {member: math.log(change.ratio) for member, change in peer_changes.items()}
    middle = statistics.median_high(logs.values())
    scatter = windows.robust_deviation(list(logs.values()))
    found = []
    for member in candidates or peer_changes:
        if member not in changes:
            continue
        change = changes[member]
        above = math.log(change.ratio) - middle
        excess = math.exp(above)
        error = math.hypot(change.noise / change.before, scatter, 0.005)
        standard_errors = above / error
        own_seconds = change.after - change.before * math.exp(middle)
        if (
            change.ratio > limit
            and excess > limit
            and standard_errors > MIN_STANDARD_ERRORS
            and own_seconds >= MIN_EXPLAINED_SHARE * lost
        ):
            peers_time = statistics.median(
                peer_change.after for peer, peer_change in peer_changes.items() if peer != member
            )
            measure = {Kind.BUSY: "busy", Kind.TRANSFER: "transfer"}.get(kind, "an iteration")
            count = len(peer_changes) - (member in peer_changes)
            sentence = (
                f"{measure} {format_duration(change.after)}, up from {format_duration(change.before)}; "
                f"{_peers_text(count, ranks or len(role))} {format_duration(peers_time)}"
            )
            cause = _cause(observed, member, role, kind)
            channel = {Kind.BUSY: windows.busy, Kind.TRANSFER: windows.transfer}.get(kind, windows.value)
            found.append(
                Outlier(
                    member,
                    cause,
                    excess,
                    standard_errors,
                    limit,
                    count,
                    sentence,
                    channel,
                    tuple(peer_changes),
                    change.after,
                    change.fast_share if excess > PAUSE_EXCESS else 0.0,
                )
            )
    return found


def find_host_outliers(
    role: Sequence[int],
    host: Mapping[int, Change],
    values: Mapping[int, Change],
    lost: float,
    candidates: Iterable[int] = (),
    ranks: int = 0,
) -> list[Outlier]:
    """Return the members whose host time takes a larger share of an iteration than before, and than their peers' host
    time.

    The arguments are those of `find_outliers`.
    """
    peer_changes = {member: host[member] for member in role if member in host and member in values}
    if len(peer_changes) < MIN_PEERS:
        return []
    shares = {member: change.increase / values[member].before for member, change in peer_changes.items()}
    middle, scatter = statistics.median_high(shares.values()), windows.robust_deviation(list(shares.values()))
    found = []
    for member in candidates or peer_changes:
        if member not in host or member not in values:
            continue
        change, iteration_time = host[member], values[member].before
        above = change.increase / iteration_time - middle
        standard_errors = above / math.hypot(change.noise / iteration_time, scatter, 0.005)
        own_seconds = above * iteration_time
        if above > LIMIT - 1 and standard_errors > MIN_STANDARD_ERRORS and own_seconds >= MIN_EXPLAINED_SHARE * lost:
            peers_time = statistics.median(
                peer_change.after for peer, peer_change in peer_changes.items() if peer != member
            )
            count = len(peer_changes) - (member in peer_changes)
            sentence = (
                f"neither busy, waiting nor transferring for {format_duration(change.after)}, up from "
                f"{format_duration(change.before)}; {_peers_text(count, ranks or len(role))} "
                f"{format_duration(peers_time)}"
            )
            excess = 1 + above
            found.append(Outlier(member, Cause.COMPUTE_CPU, excess, standard_errors, LIMIT, count, sentence))
    return found


def _cause(observed: Observed, member: int, role: Sequence[int], kind: Kind) -> Cause:
    series = observed.series[member]
    if kind is Kind.BUSY:
        return Cause.COMPUTE_GPU if series.busy is not None else Cause.COMPUTE
    if kind is Kind.TRANSFER:
        return link_cause(observed, role)
    return Cause.COMPUTE


def link_cause(observed: Observed, members: Iterable[int]) -> Cause:
    """Return the kind of link that connects these members."""
    nodes = {observed.series[member].node for member in members}
    if "" in nodes:
        return Cause.COMMUNICATION
    return Cause.COMMUNICATION_INTRA_NODE if len(nodes) == 1 else Cause.COMMUNICATION_INTER_NODE


def with_final_change(observed: Observed, step: Step, found: Outlier) -> Outlier:
    """Update an outlier that became worse after the samples in which it was found."""
    max_samples = windows.AFTER_SAMPLES[0]
    if found.channel is None or not observed.is_long_enough(step, found.member, 2 * max_samples):
        return found
    last = {}
    for member in {*found.role, found.member}:
        onset, end = observed.window(step, member)
        end = min(end, len(observed.series[member].value))
        change = measure_change(
            observed.series[member], observed.points[member], onset, end, found.channel, max(onset, end - max_samples)
        )
        if change is not None:
            last[member] = change
    if found.member not in last or last[found.member].after <= LIMIT * found.time:
        return found
    middle = statistics.median_high(last[member].ratio for member in found.role if member in last)
    excess = last[found.member].ratio / middle
    return found._replace(
        excess=max(found.excess, excess),
        standard_errors=max(found.standard_errors, found.standard_errors * math.log(excess) / math.log(found.excess)),
        sentence=f"{found.sentence}; {format_duration(last[found.member].after)} at the end",
    )


def with_pause_note(found: Outlier) -> Outlier:
    if found.fast_share <= MAX_FAST_SHARE:
        return found
    return found._replace(sentence=f"{found.sentence}; {found.fast_share:.0%} of its samples as fast as before")


def _peers_text(compared: int, ranks: int) -> str:
    """Return text like "its 7 peers".

    If not all peers were compared (the role is large, or some do not report the time), the text has both numbers.
    """
    peers = ranks - 1
    return f"its {peers} peers" if compared >= peers else f"the median of {compared} of its {peers} peers"


def format_duration(seconds: float) -> str:
    """Format a duration in the unit of the series, with three digits."""
    return f"{seconds:,.0f}" if abs(seconds) >= 1000 else f"{seconds:.3g}"
