"""Choice of a remedy and its time: ski rental (arXiv 2410.12588, algorithm 1). Pure functions.

It is unknown how long a slowness will last. Acting at once is expensive if it ends by itself; waiting is expensive if
it does not. The planner compares the loss so far with the cost of each remedy, cheapest first. It applies a remedy when
the loss has reached its cost, and then continues with the next one. After a relief it starts again.

Loss and cost are GPU-seconds of the whole gang: all ranks wait for a slow rank, and none of a job's GPUs works while it
moves micro-batches or restarts.

Guarantees, with C the loss and the costs together, k the number of applied remedies, and "one iteration" the loss in
the iteration in which the loss reached a cost:

- one remedy that removes the slowness: C <= 2 x the smallest possible value + one iteration;
- several remedies, none of which makes it worse: C <= (1 + k) x (the smallest possible value + one iteration). When k
  were applied, the loss had reached the cost of each, so they cost at most k times the loss. The loss before the remedy
  of the best plan is at most its cost and one iteration, and after it no more than that of the best plan.

If `settles` is more than 0, that many iterations pass after a remedy to see its effect. "One iteration" is then that
many.

`replay` finds when the planner would have acted on a job with known times, and how much that would have saved. The
points are those of the detector, which uses no sample after its alarm. The causes are those of the whole file, and a
relief counts from its position, not from its detection. The savings assume that a remedy removed the slowness
completely when it was applied: its real effect is not known in advance.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Iterable, Mapping, Sequence
from statistics import median
from typing import NamedTuple

from healthd.failslow import windows
from healthd.failslow.model import Cause, Judgement, Point, Series


class Action(enum.Enum):
    """FALCON's strategies, S1 to S4."""

    IGNORE = "s1"
    MICRO_BATCHES = "s2"
    TOPOLOGY = "s3"
    RESTART = "s4"


class Overheads(NamedTuple):
    """Seconds for which the whole gang does not train while the remedy is applied.

    The paper gives "low", "about a minute" and "high". Values measured at the site are better.
    """

    s2: float = 5.0
    s3: float = 60.0
    s4: float = 600.0


class Look(NamedTuple):
    """One iteration of the gang.

    lost_seconds: its time minus a healthy one, summed over the iterations not yet reported (a slowness is detected some
    iterations after its onset). gpus: of the whole gang. whole_stage: the slow node runs a whole pipeline stage.
    """

    slow: bool
    lost_seconds: float = 0.0
    gpus: int = 1
    cause: Cause = Cause.UNKNOWN
    whole_stage: bool = False


class State(NamedTuple):
    """State of the ongoing slowness.

    lost: GPU-seconds since the onset. actions: in order. since: iterations since the last action. whole_stage: as in
    Observation.
    """

    cause: Cause = Cause.UNKNOWN
    lost: float = 0.0
    taken: tuple[Action, ...] = ()
    since: int = 0
    whole_stage: bool = False


class Due(NamedTuple):
    """The next remedy, and the loss in GPU-seconds from which it is worth its cost."""

    action: Action
    at: float


HEALTHY = State()

# From the paper's table: S2 mitigates only slow compute, S3 both, S4 removes both. For an unknown cause it is also
# unknown which part to relieve, so only a restart remains. Slowness caused by the job itself (longer sequences, an
# unequal pipeline) returns after a restart.
_COMPUTE = (Action.MICRO_BATCHES, Action.TOPOLOGY, Action.RESTART)
_COMMUNICATION = (Action.TOPOLOGY, Action.RESTART)
CANDIDATES = {
    Cause.COMPUTE: _COMPUTE,
    Cause.COMPUTE_GPU: _COMPUTE,
    Cause.COMPUTE_CPU: _COMPUTE,
    Cause.COMMUNICATION: _COMMUNICATION,
    Cause.COMMUNICATION_INTRA_NODE: _COMMUNICATION,
    Cause.COMMUNICATION_INTER_NODE: _COMMUNICATION,
    Cause.UNKNOWN: (Action.IGNORE, Action.RESTART),
    Cause.IMBALANCE: (Action.IGNORE,),
}


# Every data-parallel group passes through each stage. No other group is faster, and the stragglers already are in the
# smallest number of stages.
OF_NO_USE_FOR_A_WHOLE_STAGE = (Action.MICRO_BATCHES, Action.TOPOLOGY)


def overhead_seconds(action: Action, overheads: Overheads) -> float:
    costs = {Action.MICRO_BATCHES: overheads.s2, Action.TOPOLOGY: overheads.s3, Action.RESTART: overheads.s4}
    return costs.get(action, 0.0)


def due(state: State, gpus: int, overheads: Overheads) -> Due | None:
    """Return the next remedy for this cause and its loss, or None if only ignoring (S1) remains."""
    useless = OF_NO_USE_FOR_A_WHOLE_STAGE if state.whole_stage else ()
    left = [one for one in CANDIDATES[state.cause] if one not in (Action.IGNORE, *useless, *state.taken)]
    if not left:
        return None
    action = min(left, key=lambda one: overhead_seconds(one, overheads))
    return Due(action, overhead_seconds(action, overheads) * gpus)


def step(state: State, look: Look, overheads: Overheads, settles: int = 0) -> tuple[State, Action | None]:
    """Return the state after one more iteration, and the remedy to apply now.

    A remedy is applied at most once in a slowness, and not before the loss has reached its cost.
    """
    if not look.slow:
        return HEALTHY, None
    lost = state.lost + look.lost_seconds * look.gpus if math.isfinite(look.lost_seconds) else state.lost
    # A cause that becomes known later replaces "unknown" and is kept.
    cause = state.cause if look.cause is Cause.UNKNOWN else look.cause
    state = State(cause, max(lost, 0.0), state.taken, state.since + 1, look.whole_stage)
    following = due(state, look.gpus, overheads)
    waits = bool(state.taken) and state.since <= settles
    if following is None or state.lost < following.at or waits:
        return state, None
    return state._replace(taken=(*state.taken, following.action), since=0), following.action


# --- replay of a job's times

BEFORE = 400  # healthy samples
PAUSE = 10.0  # times a healthy iteration: a checkpoint or an evaluation, which counts as a normal iteration


class Taken(NamedTuple):
    """An applied remedy. position: in the span's series. lost, overhead, saved: GPU-seconds."""

    action: Action
    at: int
    lost: float
    overhead: float
    saved: float


class Stretch(NamedTuple):
    """A time in which the job or one of its parts was slow.

    onset, relief: positions in `series`; relief is None while it lasts. suspects: their names, "" for the job as a
    whole. state, next_action: at the end of the series.
    """

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
    """A suspect or a slow job. begin, alarm, end: positions in the clock's series. losses: seconds lost at each
    position.
    """

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
    """Replay the slow spans of a job.

    Args:
        gpus: of the whole gang.
        seconds: length of one unit of the times.
    """
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
    """Yield each suspect and slow job with the series from which its loss is computed.

    That is its own series if it has the point, otherwise a series that has it.
    """
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
    """Return the median of the healthy samples of a regime before an onset, or 0 if there are none."""
    count = len(one.value)
    slow = [(each.onset_index, count if each.relief_index is None else each.relief_index) for each in points]
    before = [
        one.value[at]
        for at in range(max(0, onset - BEFORE), onset)
        if (one.regimes is None or one.regimes[at] == regime) and not any(begin <= at < end for begin, end in slow)
    ]
    return median(before) if before else 0.0


def _together(told: Sequence[_Slow]) -> Iterable[list[_Slow]]:
    """Group spans that overlap: they are one slowness of the gang."""
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
    # All ranks wait for the slowest, so losses at the same time are not added.
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
