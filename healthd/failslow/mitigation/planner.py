"""Which remedy is worth its cost, and when: ski rental (arXiv 2410.12588, algorithm 1). Pure.

Nobody knows how long a slowness will last. To act at once is dear if it ends by itself, to wait is dear if it does not.
So what was lost so far is held against what each remedy costs, the cheapest first: it is applied when the loss has
reached its cost, and then the next. A relief begins all anew.

Loss and cost are GPU-seconds of the whole gang: where one rank is slow all wait, and while a job moves micro-batches or
restarts none of its GPUs works.

What that guarantees, with C the loss and the costs together, k the remedies that were applied, and one iteration the
loss of the one in which the loss reached a cost:

- one remedy, which removes the slowness: C <= 2 x the least that anybody could have had + one iteration;
- several, of which none makes it worse: C <= (1 + k) x (the least + one iteration). When k were applied the loss had
  reached the cost of each, so that they cost at most k times the loss; and the loss before the one that the best plan
  takes is at most its cost and one iteration, and after it no more than the best plan has.

Where `settles` is more than 0 that many iterations are let pass after a remedy, to see what it did: then "one
iteration" is so many.

`replayed` finds when the planner would have acted on a job whose times are known, and what that would have saved. The
points are those of the detector, which knows no sample after its alarm; the causes are those of the whole file, and a
relief counts from where it was, not from when it was detected. The savings assume that a remedy removed the slowness
when it was applied: how much of it a remedy removes is not known beforehand.
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
    """Seconds that the whole gang does not train while it is carried out. The paper says "low", "about a minute" and
    "high": what a site has measured is better."""

    s2: float = 5.0
    s3: float = 60.0
    s4: float = 600.0


class Look(NamedTuple):
    """One iteration of the gang. lost_seconds: its time less that of a healthy one, of all iterations that were not
    told of yet (a slowness is known some iterations after it began). gpus: of the whole gang. whole_stage: one node
    that runs a whole pipeline stage is slow."""

    slow: bool
    lost_seconds: float = 0.0
    gpus: int = 1
    cause: Cause = Cause.UNKNOWN
    whole_stage: bool = False


class State(NamedTuple):
    """What is known of the slowness that stands. lost: GPU-seconds since its onset; taken: in their order; since:
    iterations since the last of them; whole_stage: as of a Look."""

    cause: Cause = Cause.UNKNOWN
    lost: float = 0.0
    taken: tuple[Action, ...] = ()
    since: int = 0
    whole_stage: bool = False


class Due(NamedTuple):
    """The next remedy, and the loss in GPU-seconds at which it is worth its cost."""

    action: Action
    at: float


HEALTHY = State()

# By what the paper's table says of each: S2 mitigates slow compute only, S3 both, S4 removes both. Of what nobody knows
# the cause nobody knows which part to spare, so that only a new start is left. What the job does to itself (longer
# sequences, an unequal pipeline) it has again after a restart.
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


# Every data-parallel group passes through each stage, so no other group is quicker, and the stragglers are in the
# fewest stages already.
OF_NO_USE_FOR_A_WHOLE_STAGE = (Action.MICRO_BATCHES, Action.TOPOLOGY)


def overhead_seconds(action: Action, overheads: Overheads) -> float:
    costs = {Action.MICRO_BATCHES: overheads.s2, Action.TOPOLOGY: overheads.s3, Action.RESTART: overheads.s4}
    return costs.get(action, 0.0)


def due(state: State, gpus: int, overheads: Overheads) -> Due | None:
    """What comes next for this cause, and at which loss; None if nothing is left but to ignore it (S1)."""
    useless = OF_NO_USE_FOR_A_WHOLE_STAGE if state.whole_stage else ()
    left = [one for one in CANDIDATES[state.cause] if one not in (Action.IGNORE, *useless, *state.taken)]
    if not left:
        return None
    action = min(left, key=lambda one: overhead_seconds(one, overheads))
    return Due(action, overhead_seconds(action, overheads) * gpus)


def step(state: State, look: Look, overheads: Overheads, settles: int = 0) -> tuple[State, Action | None]:
    """The state after one more iteration, and the remedy to apply now. Before a loss reaches the cost of a remedy it is
    not applied, and each at most once in a slowness."""
    if not look.slow:
        return HEALTHY, None
    lost = state.lost + look.lost_seconds * look.gpus if math.isfinite(look.lost_seconds) else state.lost
    # A cause that is known later is a better word than "unknown", and is kept.
    cause = state.cause if look.cause is Cause.UNKNOWN else look.cause
    state = State(cause, max(lost, 0.0), state.taken, state.since + 1, look.whole_stage)
    following = due(state, look.gpus, overheads)
    waits = bool(state.taken) and state.since <= settles
    if following is None or state.lost < following.at or waits:
        return state, None
    return state._replace(taken=(*state.taken, following.action), since=0), following.action


# --- the times of a job, replayed

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
