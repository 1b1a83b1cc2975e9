"""Outliers among peers: ranks with a time of their own that rose against its baseline and against the peers. Pure
functions.

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
from healthd.failslow.windows import Change, Channel, changed

FEWEST = 4
LIMIT = 1.1
COMMUNICATION_LIMIT = 1.2
CLEAR = 4.0
EXPLAINS = 0.3
PAUSES, PAUSING = 1.3, 0.2  # a higher rise with more samples as fast as before: frequent pauses


class Found(NamedTuple):
    """An outlier. excess: its change divided by that of its peers. standard_errors: size of the difference."""

    member: int
    cause: Cause
    excess: float
    clear: float
    limit: float
    peers: int
    sentence: str
    channel: Channel | None = None  # the compared time that became slower
    role: tuple[int, ...] = ()
    now: float = 0.0
    resting: float = 0.0


def outliers(
    seen: Observed,
    role: Sequence[int],
    changes: Mapping[int, Change],
    limit: float,
    lost: float,
    kind: Kind,
    of: Iterable[int] = (),
    ranks: int = 0,
) -> list[Found]:
    """Return the members whose change is more than `limit` times the median of their role.

    Args:
        lost: by how much an iteration is longer now.
        candidates: members to test, default all.
        ranks: size of the role if `role` is a sample of it.
    """
    there = {one: changes[one] for one in role if one in changes}
    if len(there) < FEWEST:
        return []
    logs = {one: math.log(change.ratio) for one, change in there.items()}
    middle = statistics.median_high(logs.values())
    scatter = windows.spread(list(logs.values()))
    found = []
    for one in of or there:
        if one not in changes:
            continue
        change = changes[one]
        above = math.log(change.ratio) - middle
        excess = math.exp(above)
        error = math.hypot(change.noise / change.before, scatter, 0.005)
        clear = above / error
        own = change.after - change.before * math.exp(middle)
        if change.ratio > limit and excess > limit and clear > CLEAR and own >= EXPLAINS * lost:
            others = statistics.median(other.after for peer, other in there.items() if peer != one)
            what = {Kind.BUSY: "busy", Kind.TRANSFER: "transfer"}.get(kind, "an iteration")
            count = len(there) - (one in there)
            sentence = (
                f"{what} {duration(change.after)} against {duration(change.before)} before; "
                f"{_its_peers(count, ranks or len(role))} {duration(others)}"
            )
            cause = _cause(seen, one, role, kind)
            channel = {Kind.BUSY: windows.busy, Kind.TRANSFER: windows.transfer}.get(kind, windows.value)
            found.append(
                Found(
                    one,
                    cause,
                    excess,
                    clear,
                    limit,
                    count,
                    sentence,
                    channel,
                    tuple(there),
                    change.after,
                    change.resting if excess > PAUSES else 0.0,
                )
            )
    return found


def hosts(
    role: Sequence[int],
    host: Mapping[int, Change],
    values: Mapping[int, Change],
    lost: float,
    of: Iterable[int] = (),
    ranks: int = 0,
) -> list[Found]:
    """Return the members whose host takes a larger share of an iteration than before and than that of their peers.

    Arguments as in `find_outliers`.
    """
    there = {one: host[one] for one in role if one in host and one in values}
    if len(there) < FEWEST:
        return []
    more = {one: change.more / values[one].before for one, change in there.items()}
    middle, scatter = statistics.median_high(more.values()), windows.spread(list(more.values()))
    found = []
    for one in of or there:
        if one not in host or one not in values:
            continue
        change, rest = host[one], values[one].before
        above = change.more / rest - middle
        clear = above / math.hypot(change.noise / rest, scatter, 0.005)
        own = above * rest
        if above > LIMIT - 1 and clear > CLEAR and own >= EXPLAINS * lost:
            others = statistics.median(other.after for peer, other in there.items() if peer != one)
            count = len(there) - (one in there)
            sentence = (
                f"neither busy, waiting nor transferring {duration(change.after)} against {duration(change.before)} "
                f"before; {_its_peers(count, ranks or len(role))} {duration(others)}"
            )
            excess = 1 + above
            found.append(Found(one, Cause.COMPUTE_CPU, excess, clear, LIMIT, count, sentence))
    return found


def _cause(seen: Observed, one: int, role: Sequence[int], kind: Kind) -> Cause:
    series = seen.series[one]
    if kind is Kind.BUSY:
        return Cause.COMPUTE_GPU if series.busy is not None else Cause.COMPUTE
    if kind is Kind.TRANSFER:
        return link(seen, role)
    return Cause.COMPUTE


def link(seen: Observed, members: Iterable[int]) -> Cause:
    """Return the kind of the links between these members."""
    nodes = {seen.series[one].node for one in members}
    if "" in nodes:
        return Cause.COMMUNICATION
    return Cause.COMMUNICATION_INTRA_NODE if len(nodes) == 1 else Cause.COMMUNICATION_INTER_NODE


def until_the_end(seen: Observed, step: Step, found: Found) -> Found:
    """Update an outlier that became worse after the samples by which it was found."""
    longest = windows.AFTER[0]
    if found.channel is None or not seen.lasts(step, found.member, 2 * longest):
        return found
    last = {}
    for one in {*found.role, found.member}:
        onset, end = seen.window(step, one)
        end = min(end, len(seen.series[one].value))
        change = changed(seen.series[one], seen.points[one], onset, end, found.channel, max(onset, end - longest))
        if change is not None:
            last[one] = change
    if found.member not in last or last[found.member].after <= LIMIT * found.now:
        return found
    middle = statistics.median_high(last[one].ratio for one in found.role if one in last)
    excess = last[found.member].ratio / middle
    return found._replace(
        excess=max(found.excess, excess),
        clear=max(found.clear, found.clear * math.log(excess) / math.log(found.excess)),
        sentence=f"{found.sentence}; {duration(last[found.member].after)} at the end",
    )


def pausing(found: Found) -> Found:
    if found.resting <= PAUSING:
        return found
    return found._replace(sentence=f"{found.sentence}; {found.resting:.0%} of its samples as fast as before")


def _its_peers(compared: int, ranks: int) -> str:
    """Return "its 7 peers", or how many of them were compared in a large role or if some do not report the time."""
    peers = ranks - 1
    return f"its {peers} peers" if compared >= peers else f"the median of {compared} of its {peers} peers"


def duration(seconds: float) -> str:
    """Format a duration in the unit of the series with three digits."""
    return f"{seconds:,.0f}" if abs(seconds) >= 1000 else f"{seconds:.3g}"
