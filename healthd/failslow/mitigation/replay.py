"""When the planner would have acted on a job whose times are known, and what that would have saved. Pure.

The points are those of the detector, which knows no sample after its alarm; the causes are those of the whole file, and
a relief counts from where it was, not from when it was known. What a remedy saves is told as if it had removed the
slowness when it was applied: how much of it one removes nobody knows beforehand.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from statistics import median
from typing import NamedTuple

from healthd.failslow import windows
from healthd.failslow.mitigation.planner import (
    HEALTHY,
    Action,
    Due,
    Look,
    Overheads,
    State,
    due,
    overhead_seconds,
    step,
)
from healthd.failslow.model import Cause, Judgement, Point, Series

BEFORE = 400  # samples of what is healthy
PAUSE = 10.0  # times a healthy iteration: a checkpoint or an evaluation, which counts as an iteration like the others


class Taken(NamedTuple):
    """One remedy. at: the position in the stretch's series; lost, overhead and saved in GPU-seconds."""

    action: Action
    at: int
    lost: float
    overhead: float
    saved: float


class Stretch(NamedTuple):
    """A time in which somebody or the job was slow. onset, relief: positions in `series`; relief is None while it
    lasts. who: the names of those who are told, "" = the job as a whole. now and due: what stands at the end, and what
    is next."""

    series: Series
    onset: int
    relief: int | None
    who: tuple[str, ...]
    cause: Cause
    lost: float  # GPU-seconds
    taken: tuple[Taken, ...]
    state: State
    due: Due | None


class _Slow(NamedTuple):
    """One suspect, or a job that is slow. begin, alarm, end: positions in the clock's series; losses: seconds of each
    position in between."""

    who: str
    cause: Cause
    whole_stage: bool
    begin: int
    alarm: int
    end: int
    lasts: bool
    losses: Mapping[int, float]


def replayed(
    series: Sequence[Series],
    judgement: Judgement,
    gpus: int,
    overheads: Overheads,
    seconds: float = 1.0,
    settles: int = 0,
) -> tuple[Stretch, ...]:
    """gpus: of the whole gang; seconds: of one unit of the times."""
    found = list(_slow(series, judgement))
    if not found:
        return ()
    clock = max((one for one, *_ in found), key=lambda one: len(one.value))
    told = sorted((_on_clock(clock, *one) for one in found), key=lambda one: (one.begin, one.end, one.who))
    told = [one for one in told if one.begin < one.end]
    return tuple(_stretch(clock, some, gpus, overheads, seconds, settles) for some in _together(told))


def _slow(
    series: Sequence[Series], judgement: Judgement
) -> Iterable[tuple[Series, Sequence[Point], Point, str, Cause, bool]]:
    """Whose times the loss is read from: its own, where it has that point, else those of who has."""
    owners = list(zip(series, judgement.points, strict=True))
    named = [(one.point, one.series, one.subject, one.cause, one.whole_stage) for one in judgement.suspects]
    named += [(one.point, one.series, "", one.cause, one.whole_stage) for one in judgement.job_slow]
    for point, names, who, cause, whole_stage in named:
        if point is None:
            continue
        having = [(one, points) for one, points in owners if point in points]
        if having:
            one, points = next((some for some in having if some[0].name in names), having[0])
            yield one, points, point, who, cause, whole_stage


def _on_clock(
    clock: Series, one: Series, points: Sequence[Point], point: Point, who: str, cause: Cause, whole_stage: bool
) -> _Slow:
    count = len(one.value)
    end = count if point.relief_index is None else point.relief_index

    def at(position: int) -> int:
        if position >= count:
            return len(clock.value)
        return position if one is clock else windows.position(one, position, clock)

    losses: dict[int, float] = {}
    healthy: dict[str, float] = {}
    for position in range(point.onset_index, end):
        regime = one.regimes[position] if one.regimes is not None else ""
        if regime not in healthy:
            healthy[regime] = _healthy(one, points, point.onset_index, regime)
        rest = healthy[regime]
        lost = one.value[position] - rest if rest else 0.0
        if rest and one.value[position] > PAUSE * rest:
            lost = rest * point.slowdown
        slot = at(position)
        losses[slot] = losses.get(slot, 0.0) + lost
    begin, alarm = at(point.onset_index), at(point.alarm_index)
    return _Slow(who, cause, whole_stage, begin, alarm, at(end), point.relief_index is None, losses)


def _healthy(one: Series, points: Sequence[Point], onset: int, regime: str) -> float:
    """The median of the samples of a regime before an onset, in which nothing was slow; 0 = there is none."""
    count = len(one.value)
    slow = [(each.onset_index, count if each.relief_index is None else each.relief_index) for each in points]
    before = [
        one.value[at]
        for at in range(max(0, onset - BEFORE), onset)
        if (one.regimes is None or one.regimes[at] == regime) and not any(begin <= at < end for begin, end in slow)
    ]
    return median(before) if before else 0.0


def _together(told: Sequence[_Slow]) -> Iterable[list[_Slow]]:
    """Those that overlap are one slowness of the gang."""
    some: list[_Slow] = []
    for one in told:
        if some and one.begin >= max(other.end for other in some):
            yield some
            some = []
        some.append(one)
    if some:
        yield some


def _stretch(
    clock: Series, some: Sequence[_Slow], gpus: int, overheads: Overheads, seconds: float, settles: int
) -> Stretch:
    begin, end = some[0].begin, max(one.end for one in some)
    # All wait for the slowest, so that the losses of two at one time are not added.
    losses = [max(one.losses.get(at, 0.0) for one in some) * seconds for at in range(begin, end)]
    known = min(min(one.alarm for one in some), end - 1)
    state, applied = HEALTHY, []
    for at in range(known, end):
        standing = [one for one in some if one.alarm <= at < one.end] or [min(some, key=lambda one: one.alarm)]
        worst = max(standing, key=lambda one: one.losses.get(at, 0.0))
        lost = sum(losses[: at - begin + 1]) if at == known else losses[at - begin]
        look = Look(True, lost, gpus, worst.cause, worst.whole_stage)
        state, action = step(state, look, overheads, settles)
        if action is not None:
            applied.append((action, at, state.lost))
    taken = []
    for action, at, before in applied:
        overhead = overhead_seconds(action, overheads) * gpus
        after = sum(losses[at - begin + 1 :]) * gpus
        taken.append(Taken(action, at, before, overhead, after - overhead))
    return Stretch(
        clock,
        begin,
        None if any(one.lasts for one in some) else end,
        tuple(sorted({one.who for one in some} - {""})),
        state.cause,
        sum(losses) * gpus,
        tuple(taken),
        state,
        due(state, gpus, overheads),
    )
