"""Chooses a remedy and the time to apply it: ski rental (arXiv 2410.12588, algorithm 1). All functions are pure.

It is unknown how long slowness will last. Acting at once is a waste if the slowness ends by itself, but waiting is a
waste if it lasts. The planner therefore compares the loss so far with the cost of each remedy, cheapest first. When the
loss has reached the cost of a remedy, it applies this remedy and continues with the next one. After a relief, it starts
again.

Loss and cost are GPU-seconds of the whole gang: all ranks wait for a slow rank, and no GPU of the job works while the
job moves micro-batches or restarts.

The planner has the following guarantees. C is the total of the loss and the costs of applied remedies. k is the number
of applied remedies. "One iteration" is the loss in the iteration in which the loss reached a cost.

- If there is one remedy and it removes the slowness: C <= 2 x the smallest possible C + one iteration.
- If there are several remedies and none makes the slowness worse: C <= (1 + k) x (the smallest possible C + one
  iteration). Each of the k remedies was applied when the loss had reached its cost, so together they cost at most k
  times the loss. Until the planner applies the remedy of the best possible plan, the loss is at most this remedy's cost
  and one iteration. Afterwards, the loss is at most that of the best plan.

If `settles` is more than 0, healthd waits for this number of iterations after a remedy, to observe its effect. "One
iteration" then means this number of iterations.

`replay` finds when the planner would have acted on a job with known times, and computes the savings. Onsets come from
the detector, which uses no sample after its alarm. But the causes are those found in the whole file, and a relief is
dated by its position, not by its later detection. The real effect of a remedy is not known in advance, so the savings
assume that it removed the slowness completely and at once.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Iterable, Mapping, Sequence
from statistics import median
from typing import NamedTuple

from healthd.failslow import windows
from healthd.failslow.model import Cause, Diagnosis, Point, Series


class Action(enum.Enum):
    """FALCON's strategies S1 to S4."""

    IGNORE = "s1"
    MICRO_BATCHES = "s2"
    TOPOLOGY = "s3"
    RESTART = "s4"


class Overheads(NamedTuple):
    """The time in seconds that each remedy costs the gang. No rank trains while a remedy is applied.

    The paper gives "low", "about a minute" and "high". Values measured at the site are better.
    """

    s2: float = 5.0
    s3: float = 60.0
    s4: float = 600.0


class Observation(NamedTuple):
    """One iteration of the gang.

    Attributes:
        lost_seconds: its time minus the time of a healthy iteration. Slowness is detected some iterations after its
            onset, so the first observation contains the sum over all iterations that were not reported before.
        gpus: number of GPUs in the whole gang.
        whole_stage: True if the slow node runs a whole pipeline stage.
    """

    slow: bool
    lost_seconds: float = 0.0
    gpus: int = 1
    cause: Cause = Cause.UNKNOWN
    whole_stage: bool = False


class State(NamedTuple):
    """The state of the ongoing slowness.

    Attributes:
        lost: GPU-seconds since the onset.
        actions: applied actions, in order.
        since: iterations since the last action.
        whole_stage: as in Observation.
    """

    cause: Cause = Cause.UNKNOWN
    lost: float = 0.0
    actions: tuple[Action, ...] = ()
    since: int = 0
    whole_stage: bool = False


class NextAction(NamedTuple):
    """The next remedy, and the loss in GPU-seconds at which it is worth its cost."""

    action: Action
    lost_gpu_seconds: float


HEALTHY = State()

# From the paper's table: S2 mitigates only slow compute, S3 mitigates slow compute and slow communication, and S4
# removes both. If the cause is unknown, S2 and S3 cannot be applied, so only a restart remains. If the job itself
# causes the slowness (longer sequences, an unequal pipeline), a restart does not help, because the slowness returns.
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


# If a whole stage is slow, all data-parallel groups are equally slow, because each of them passes through this stage.
# The stragglers are already in the smallest number of stages. S2 and S3 therefore cannot help.
USELESS_FOR_WHOLE_STAGE = (Action.MICRO_BATCHES, Action.TOPOLOGY)


def overhead_seconds(action: Action, overheads: Overheads) -> float:
    costs = {Action.MICRO_BATCHES: overheads.s2, Action.TOPOLOGY: overheads.s3, Action.RESTART: overheads.s4}
    return costs.get(action, 0.0)


def find_next_action(state: State, gpus: int, overheads: Overheads) -> NextAction | None:
    """Return the next remedy for this cause and the loss at which it is applied, or None if none is left except S1
    (ignore)."""
    useless = USELESS_FOR_WHOLE_STAGE if state.whole_stage else ()
    candidates = [
        candidate for candidate in CANDIDATES[state.cause] if candidate not in (Action.IGNORE, *useless, *state.actions)
    ]
    if not candidates:
        return None
    action = min(candidates, key=lambda candidate: overhead_seconds(candidate, overheads))
    return NextAction(action, overhead_seconds(action, overheads) * gpus)


def advance(
    state: State, observation: Observation, overheads: Overheads, settles: int = 0
) -> tuple[State, Action | None]:
    """Return the state after one more iteration, and the remedy to apply now.

    A remedy is applied at most once per slow period, and not before the loss has reached its cost.
    """
    if not observation.slow:
        return HEALTHY, None
    lost = (
        state.lost + observation.lost_seconds * observation.gpus
        if math.isfinite(observation.lost_seconds)
        else state.lost
    )
    # If the cause becomes known later, it replaces "unknown" and is then kept.
    cause = state.cause if observation.cause is Cause.UNKNOWN else observation.cause
    state = State(cause, max(lost, 0.0), state.actions, state.since + 1, observation.whole_stage)
    following = find_next_action(state, observation.gpus, overheads)
    is_settling = bool(state.actions) and state.since <= settles
    if following is None or state.lost < following.lost_gpu_seconds or is_settling:
        return state, None
    return state._replace(actions=(*state.actions, following.action), since=0), following.action


# --- replay of a job's times

HEALTHY_SAMPLES = 400  # maximum number of healthy samples before an onset
# an iteration that takes this many times as long as a healthy one is a checkpoint or an evaluation and counts as normal
PAUSE_RATIO = 10.0


class AppliedAction(NamedTuple):
    """A remedy that was applied.

    Attributes:
        position: position in the span's series.
        lost, overhead, saved: GPU-seconds.
    """

    action: Action
    position: int
    lost: float
    overhead: float
    saved: float


class SlowSpan(NamedTuple):
    """A period in which the whole job, or one of its ranks or nodes, was slow.

    Attributes:
        onset, relief: positions in `series`; relief is None while it lasts.
        suspects: names of the suspects, "" for the job as a whole.
        state, next_action: values at the end of the series.
    """

    series: Series
    onset: int
    relief: int | None
    suspects: tuple[str, ...]
    cause: Cause
    lost: float  # GPU-seconds
    actions: tuple[AppliedAction, ...]
    state: State
    next_action: NextAction | None


class _SlowSeries(NamedTuple):
    """A suspect or a slow job.

    Attributes:
        begin, alarm, end: positions in the clock's series.
        losses: seconds lost at each position.
    """

    suspect: str
    cause: Cause
    whole_stage: bool
    begin: int
    alarm: int
    end: int
    lasts: bool
    losses: Mapping[int, float]


def replay(
    series: Sequence[Series],
    diagnosis: Diagnosis,
    gpus: int,
    overheads: Overheads,
    seconds: float = 1.0,
    settles: int = 0,
) -> tuple[SlowSpan, ...]:
    """Replay a job's slow spans.

    Args:
        gpus: number of GPUs in the whole gang.
        seconds: length of one unit of the times.
    """
    found = list(_find_slow_series(series, diagnosis))
    if not found:
        return ()
    clock = max((item for item, *_ in found), key=lambda item: len(item.value))
    slow_series = sorted(
        (_on_clock(clock, *item) for item in found), key=lambda item: (item.begin, item.end, item.suspect)
    )
    slow_series = [item for item in slow_series if item.begin < item.end]
    return tuple(
        _plan_span(clock, group, gpus, overheads, seconds, settles) for group in _group_overlapping(slow_series)
    )


def _find_slow_series(
    series: Sequence[Series], diagnosis: Diagnosis
) -> Iterable[tuple[Series, Sequence[Point], Point, str, Cause, bool]]:
    """Yield each suspect and each slow job, with the series from which its loss is computed.

    This is the suspect's own series if it contains the point, otherwise another series with the point.
    """
    owners = list(zip(series, diagnosis.points, strict=True))
    named = [(item.point, item.series, item.subject, item.cause, item.whole_stage) for item in diagnosis.suspects]
    named += [(item.point, item.series, "", item.cause, item.whole_stage) for item in diagnosis.slow_jobs]
    for point, names, suspect, cause, whole_stage in named:
        if point is None:
            continue
        matching = [(item, points) for item, points in owners if point in points]
        if matching:
            item, points = next((pair for pair in matching if pair[0].name in names), matching[0])
            yield item, points, point, suspect, cause, whole_stage


def _on_clock(
    clock: Series, series: Series, points: Sequence[Point], point: Point, suspect: str, cause: Cause, whole_stage: bool
) -> _SlowSeries:
    count = len(series.value)
    end = count if point.relief_index is None else point.relief_index

    def clock_position(position: int) -> int:
        if position >= count:
            return len(clock.value)
        return position if series is clock else windows.position(series, position, clock)

    losses: dict[int, float] = {}
    healthy_times: dict[str, float] = {}
    for position in range(point.onset_index, end):
        regime = series.regimes[position] if series.regimes is not None else ""
        if regime not in healthy_times:
            healthy_times[regime] = _healthy_time(series, points, point.onset_index, regime)
        healthy_time = healthy_times[regime]
        lost = series.value[position] - healthy_time if healthy_time else 0.0
        if healthy_time and series.value[position] > PAUSE_RATIO * healthy_time:
            lost = healthy_time * point.slowdown
        slot = clock_position(position)
        losses[slot] = losses.get(slot, 0.0) + lost
    begin, alarm = clock_position(point.onset_index), clock_position(point.alarm_index)
    return _SlowSeries(
        suspect, cause, whole_stage, begin, alarm, clock_position(end), point.relief_index is None, losses
    )


def _healthy_time(series: Series, points: Sequence[Point], onset: int, regime: str) -> float:
    """Return the median of a regime's healthy samples before an onset, or 0 if there are none."""
    count = len(series.value)
    slow = [
        (slow_point.onset_index, count if slow_point.relief_index is None else slow_point.relief_index)
        for slow_point in points
    ]
    before = [
        series.value[at]
        for at in range(max(0, onset - HEALTHY_SAMPLES), onset)
        if (series.regimes is None or series.regimes[at] == regime)
        and not any(begin <= at < end for begin, end in slow)
    ]
    return median(before) if before else 0.0


def _group_overlapping(slow_series: Sequence[_SlowSeries]) -> Iterable[list[_SlowSeries]]:
    """Group overlapping spans, which form one slow period of the gang."""
    group: list[_SlowSeries] = []
    for item in slow_series:
        if group and item.begin >= max(member.end for member in group):
            yield group
            group = []
        group.append(item)
    if group:
        yield group


def _plan_span(
    clock: Series, group: Sequence[_SlowSeries], gpus: int, overheads: Overheads, seconds: float, settles: int
) -> SlowSpan:
    begin, end = group[0].begin, max(item.end for item in group)
    # All ranks wait for the slowest, so simultaneous losses are not added: only the largest counts.
    losses = [max(item.losses.get(at, 0.0) for item in group) * seconds for at in range(begin, end)]
    alarm = min(min(item.alarm for item in group), end - 1)
    state, applied = HEALTHY, []
    for at in range(alarm, end):
        active = [item for item in group if item.alarm <= at < item.end] or [min(group, key=lambda item: item.alarm)]
        worst = max(active, key=lambda item: item.losses.get(at, 0.0))
        lost = sum(losses[: at - begin + 1]) if at == alarm else losses[at - begin]
        observation = Observation(True, lost, gpus, worst.cause, worst.whole_stage)
        state, action = advance(state, observation, overheads, settles)
        if action is not None:
            applied.append((action, at, state.lost))
    actions = []
    for action, at, before in applied:
        overhead = overhead_seconds(action, overheads) * gpus
        after = sum(losses[at - begin + 1 :]) * gpus
        actions.append(AppliedAction(action, at, before, overhead, after - overhead))
    return SlowSpan(
        clock,
        begin,
        None if any(item.lasts for item in group) else end,
        tuple(sorted({item.suspect for item in group} - {""})),
        state.cause,
        sum(losses) * gpus,
        tuple(actions),
        state,
        find_next_action(state, gpus, overheads),
    )
