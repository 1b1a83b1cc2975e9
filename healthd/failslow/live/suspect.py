"""Which rank of a job on this node makes it slow, and when nobody is named. Pure.

Rule: as in healthd/failslow/peers.py, for what one node sees. A collective makes every rank equally slow, so that a
rank is named only by a time that is its own: its busy time rose against its own baseline, and by LIMIT more than the
median of the ranks beside it did (FALCON, arXiv 2410.12588, step 5), of FEWEST ranks or more; it makes up EXPLAINS of
what an iteration lost; and those who stand out so are a minority. Of ranks that tell no busy time their iterations are
compared: those of workers that do not wait for each other.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import NamedTuple

from healthd.failslow.model import Cause, Point
from healthd.failslow.outliers import EXPLAINS, FEWEST, LIMIT


class Channel(NamedTuple):
    """A rank's times of one kind. healthy: seconds (0: not known yet); ratio: now against that (None: too few)."""

    slow: Point | None
    since: float | None
    healthy: float
    ratio: float | None


class RankSeen(NamedTuple):
    """name: as the rank calls itself ("rank 5"). gpu: its PCI address, "" if not known. busy: None if not told."""

    name: str
    gpu: str
    iteration: Channel
    busy: Channel | None


class Judged(NamedTuple):
    """As told.JobTold has them. rank: the index of the one that is named, None = nobody."""

    slow: bool
    since: float | None = None
    slowdown: float = 0.0
    rank: int | None = None
    cause: Cause = Cause.UNKNOWN
    evidence: tuple[str, ...] = ()


def judge(ranks: Sequence[RankSeen]) -> Judged:
    """Of the ranks that are on this node now."""
    slow = [one.iteration for one in ranks if one.iteration.slow is not None]
    if not slow:
        return Judged(False)
    slowdown = max(one.slow.slowdown for one in slow if one.slow is not None)
    since = min((one.since for one in slow if one.since is not None), default=None)
    rank, cause, evidence = _blame(ranks)
    return Judged(True, since, slowdown, rank, cause, evidence)


def _blame(ranks: Sequence[RankSeen]) -> tuple[int | None, Cause, tuple[str, ...]]:
    told = [number for number, one in enumerate(ranks) if one.busy is not None and one.busy.ratio is not None]
    if not told:
        return _of_iterations(ranks)
    if len(told) < FEWEST:
        return None, Cause.UNKNOWN, (f"{len(told)} ranks of this node tell their own work: too few to compare",)
    busy = {number: channel for number in told if (channel := ranks[number].busy) is not None}
    ratios = {number: channel.ratio or 1.0 for number, channel in busy.items()}
    middle = statistics.median_high(ratios.values())
    risen = [number for number in told if busy[number].slow is not None]
    if len(risen) * 2 >= len(told):
        return None, Cause.IMBALANCE, (f"the own work of {len(risen)} of {len(told)} ranks rose: more work for all",)
    lost = statistics.median([_rise(one.iteration) for one in ranks if one.iteration.slow is not None])
    standing_out = [
        number for number in risen if ratios[number] >= LIMIT * middle and _rise(busy[number]) >= EXPLAINS * lost
    ]
    if not standing_out:
        return None, Cause.UNKNOWN, ("no rank of this node works longer: it is communication, or another node's",)
    worst = max(standing_out, key=lambda number: ratios[number])
    return worst, Cause.COMPUTE, _why(ranks, worst, busy, standing_out, "its own work")


def _of_iterations(ranks: Sequence[RankSeen]) -> tuple[int | None, Cause, tuple[str, ...]]:
    """No rank tells what it did itself."""
    known = {number: one.iteration for number, one in enumerate(ranks) if one.iteration.ratio is not None}
    slow = [number for number, channel in known.items() if channel.slow is not None]
    if len(known) < FEWEST or len(slow) * 2 >= len(known):
        return (
            None,
            Cause.UNKNOWN,
            (f"{len(slow)} of {len(ranks)} ranks are slow together, and none tells its own work",),
        )
    middle = statistics.median_high([channel.ratio or 1.0 for channel in known.values()])
    standing_out = [number for number in slow if (known[number].ratio or 1.0) >= LIMIT * middle]
    if not standing_out:
        return None, Cause.UNKNOWN, ("no rank stands out of the others",)
    worst = max(standing_out, key=lambda number: known[number].ratio or 1.0)
    return worst, Cause.COMPUTE, _why(ranks, worst, known, standing_out, "an iteration of it")


def _rise(channel: Channel) -> float:
    """Seconds that one takes longer now."""
    return channel.healthy * max((channel.ratio or 1.0) - 1, 0.0)


def _why(
    ranks: Sequence[RankSeen], worst: int, channels: dict[int, Channel], standing_out: Sequence[int], what: str
) -> tuple[str, ...]:
    one = channels[worst]
    peers = [channel.ratio or 1.0 for number, channel in channels.items() if number != worst]
    others = [ranks[number].name for number in standing_out if number != worst]
    says = (
        f"{what} takes {_seconds(one.healthy * (one.ratio or 1.0))} against "
        f"{_seconds(one.healthy)} before; of its {len(peers)} peers {statistics.median(peers) - 1:+.0%}"
    )
    return (says, f"so do {', '.join(others)}, by less") if others else (says,)


def _seconds(value: float) -> str:
    return f"{value:.3g} s"
