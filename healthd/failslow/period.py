"""Number of operations in an iteration and duration of each iteration, from a stream (operation, time) alone. Pure
functions.

FALCON (arXiv 2410.12588, 2.2 step 2): the period is the smallest k >= 1 with ACF_k >= 0.95, the autocorrelation of the
sequence of operations. The duration of an iteration is the time of an operation minus that of its occurrence one period
earlier. This rule is sufficient if nothing is lost and an iteration contains no loop. This module differs in these
points:

- A lost entry shifts all entries after it. With 1 in 100 lost, no long sequence agrees with itself at a fixed lag. Here
  an operation, or a few consecutive ones, is a *mark*. The distances to its next occurrences are one vote each, and a
  lost entry spoils only the votes next to it. Most of the stream must lie in distances like the usual one.
- The content between two marks must be the same, in the same order, from one time to the next. This is measured by the
  agreement of its short runs of operations, which is the ACF of a stream that may have gaps. Operations are compared by
  name; the paper numbers them.
- The smallest k is that of a layer if layers are loops within an iteration. This module selects the outermost loop. A
  longer loop replaces one that may be a layer (a few operations without repetition). It replaces any other loop
  (micro-batches) if it has fewer than ten of them, or if its additional part takes time (3 % of one loop, beyond
  chance) or has more than one operation. A single operation at every tenth loop that takes no time is a logged loss.
- L >= 20 k remains required for the selected period. A longer period with fewer repetitions makes the choice doubtful,
  unless it looks like an evaluation or a checkpoint: many loops, followed by a pause longer than one of them.

The choice is also doubtful if the deciding part took less than 10 % of the shorter loop, or if the longer loop contains
16 loops or more that are not layers. The confidence is then below 0.5, and the other period is reported too.

If the mark of an iteration was lost, the iteration begins at the position expected from its neighbours.
"""

from __future__ import annotations

import statistics
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple

from healthd.common.errors import HealthdError
from healthd.failslow.iteration_time import Chain, seconds_at, usual

LEAST_PERIODS = 20
LEAST_SEEN = 5  # repetitions of a loop that can make a choice doubtful
LOOKED_AT = (40_000, 400_000)  # newest operations: twice the ring of FALCON's hook, then more for long iterations
RUNS = (1, 2, 4, 8, 16)  # operations in a mark
MOST_EACH = 8  # marks in one iteration, for marks of one or two operations
REGULAR = 0.6  # of the stream, between marks at the usual distance
SHARE_LOST = 25  # one operation in this many may be lost from a loop, and one more from a long loop
LONG_ENOUGH = 8  # operations
SAME_CONTENT = 0.7  # of the runs of operations in consecutive loops
RUN_OF_CONTENT = 3
MOST_LOOKED_AT = 64  # loops whose content is compared
ADDS = 0.03  # of a loop's time: the additional part then belongs to the iteration
ADDS_CLEARLY = 0.1
BEYOND_CHANCE = 3.0  # standard errors
NEIGHBOURS = 4  # loops on each side for the comparison
LAYER = 24  # maximum number of operations
RARE = 10  # loops: a single operation that takes no time and is at least this rare is not part of an iteration
MANY = 16  # loops in an iteration, if they are not layers
TOO_MANY = 128
PHASE = 1.0  # loops: a longer and rare part is an evaluation or a checkpoint
DOUBTFUL = 0.45  # maximum confidence
MOST_MENDED = 3  # consecutive iterations with lost marks; more are another phase
ALIKE = 1.25  # factor above or below the duration of the neighbours
SURE_WITHIN = 0.012  # of an iteration's time: the maximum error of FALCON (2.2, step 2)


class NoPeriod(HealthdError):
    """A stream without a period. The message is the reason, in words that follow the name of the stream."""


class Period(NamedTuple):
    """Result for one stream.

    operations: in one iteration, as observed. iteration_seconds: typical duration (iteration_time.py). relative_error:
    its possible error as a share. confidence: share of the stream in such iterations, 0 to 1; below 0.5 if the
    alternative is about as good, or relative_error is above 0.012. begin_seconds: begin of each iteration, by its mark.
    seconds: duration of each; both have the same length. alternative: operations and seconds of the other possible
    period.
    """

    operations: int
    iteration_seconds: float
    confidence: float
    begin_seconds: tuple[float, ...]
    seconds: tuple[float, ...]
    within: float = 0.0
    other: tuple[int, float] | None = None


class _Mark(NamedTuple):
    """A run of operations that repeats.

    positions: where it occurs. size: its number of operations. per_iteration: occurrences in an iteration. operations:
    distance to the same mark in the next iteration. regular_share: share of the stream with that distance.
    """

    places: list[int]
    size: int
    each: int
    operations: int
    regular: float


class _Step(NamedTuple):
    """One pass through a loop: the positions at which it and the next one begin."""

    begin: int
    end: int


class _Added(NamedTuple):
    """Additional part of a longer loop.

    seconds: median absolute difference from the usual duration, in loops. standard_error: of that median (for normal
    values 1.2533 deviations divided by the square root of their number). operations: median number.
    """

    seconds: float
    chance: float
    operations: float


class _Choice(NamedTuple):
    mark: _Mark
    other: _Mark | None


def period(operations: Sequence[str], times: Sequence[float]) -> Period:
    """Find the period of a stream. Raises PeriodNotFound.

    Args:
        operations, times: of the same length; times in seconds, ascending.
    """
    operations = list(operations)
    if len(operations) < 2 * LEAST_PERIODS:
        raise NoPeriod(f"has {len(operations):,} operations with a time; a period needs at least {2 * LEAST_PERIODS}")
    if len(set(operations[-LOOKED_AT[0] :])) == 1:
        raise NoPeriod("has only one kind of operation, so the begin of an iteration is not visible")
    chosen = None
    for most in LOOKED_AT:
        seen = operations[-most:]
        loops = _loops(seen)
        chosen = _chosen(loops, seen, times[-most:])
        often = all(one.operations * LEAST_PERIODS <= len(seen) for one in loops)
        if (chosen and chosen.other is None and often) or len(seen) == len(operations):
            break
    if chosen is None:
        raise NoPeriod(
            f"has no repeating pattern: no period up to {len(seen) // LEAST_PERIODS:,} operations, a twentieth of its "
            "length"
        )
    return _iterations(operations, times, chosen, len(operations) - len(seen))


def _loops(operations: Sequence[str]) -> list[_Mark]:
    """Return the best mark of each loop, the shortest loop first."""
    marks = sorted(_marks(operations), key=lambda one: one.operations)
    groups: list[list[_Mark]] = []
    for one in marks:
        if groups and one.operations - groups[-1][0].operations <= _reach(one.operations):
            groups[-1].append(one)
        else:
            groups.append([one])
    best = (
        max(group, key=lambda one: (round(one.regular, 2), -one.each, -one.size, -one.places[0])) for group in groups
    )
    same = (_measured(one) for one in best if _same_content(operations, one))
    return [one for one in same if not _repeats(operations, one)]


def _measured(mark: _Mark) -> _Mark:
    """Return the mark with the measured length of its loop.

    An operation that comes twice in a row has two distances.
    """
    return mark._replace(operations=int(statistics.median(step.end - step.begin for step in _steps(mark))))


def _marks(operations: Sequence[str]) -> Iterator[_Mark]:
    number: dict[object, int] = {}
    codes = [number.setdefault(name, len(number)) for name in operations]
    for size in RUNS:
        places: dict[int, list[int]] = {}
        for at, code in enumerate(codes):
            places.setdefault(code, []).append(at)
        for some in places.values():
            for each in range(1, 1 + (MOST_EACH if size <= 2 else 1)):
                mark = _mark(some, size, each, len(operations))
                if mark:
                    yield mark
                    break
        pairs: dict[tuple[int, int], int] = {}
        codes = [pairs.setdefault(pair, len(pairs)) for pair in zip(codes, codes[size:], strict=False)]


def _mark(places: list[int], size: int, each: int, length: int) -> _Mark | None:
    """Return the mark, or None if its distances differ.

    The usual distance is the one in the middle of the stream, because lost or accidental operations make some distances
    longer or shorter.
    """
    if len(places) < LEAST_SEEN * each:
        return None
    steps = sorted(after - before for before, after in zip(places, places[each:], strict=False))
    whole = sum(steps)
    below = 0
    usual = next(step for step in steps if (below := below + step) * 2 >= whole)
    if usual <= each:
        return None  # the operation follows itself
    reach = _reach(usual)
    regular = sum(steps[bisect_left(steps, usual - reach) : bisect_right(steps, usual + reach)]) / (each * length)
    return _Mark(places, size, each, usual, regular) if regular >= REGULAR else None


def _reach(operations: int) -> int:
    """Return by how many lost operations the length of a loop may differ."""
    return operations // SHARE_LOST + (operations >= LONG_ENOUGH)


def _steps(mark: _Mark) -> list[_Step]:
    """Return the steps between marks at the usual distance. Other occurrences are accidental."""
    places, reach, steps = mark.places, _reach(mark.operations), list[_Step]()
    at = 0
    while at < len(places):
        goal = places[at] + mark.operations
        after = bisect_left(places, goal)
        near = min(places[max(at + 1, after - 1) : after + 1], key=lambda place: abs(place - goal), default=-1)
        if near >= 0 and abs(near - goal) <= reach:
            steps.append(_Step(places[at], near))
            at = bisect_left(places, near)
        else:
            at += 1
    return steps


def _same_content(operations: Sequence[str], mark: _Mark) -> bool:
    """Return True if consecutive loops have the same runs of operations."""
    steps = _steps(mark)
    follow = [(one, other) for one, other in pairwise(steps) if one.end == other.begin]
    shares = []
    for one, other in follow[:: len(follow) // MOST_LOOKED_AT + 1]:
        here, there = _content(operations, one), _content(operations, other)
        shares.append((here & there).total() / max(here.total(), there.total()))
    return bool(shares) and statistics.median(shares) >= SAME_CONTENT


def _repeats(operations: Sequence[str], mark: _Mark) -> bool:
    """Return True if this loop consists of several equal shorter loops."""
    length = mark.operations
    steps = [step for step in _steps(mark) if step.end - step.begin == length]
    steps = steps[:: len(steps) // MOST_LOOKED_AT + 1]
    for part in (one for one in range(1, length // 2 + 1) if length % one == 0):
        same = sum(
            operations[step.begin : step.end - part] == operations[step.begin + part : step.end] for step in steps
        )
        if steps and 2 * same > len(steps):
            return True
    return False


def _content(operations: Sequence[str], step: _Step) -> Counter[tuple[str, ...]]:
    return Counter(tuple(operations[at : at + RUN_OF_CONTENT]) for at in range(step.begin, step.end))


def _chosen(loops: Sequence[_Mark], operations: Sequence[str], times: Sequence[float]) -> _Choice | None:
    """Return the outermost loop that takes more time than the loops in it."""
    chosen: _Mark | None = None
    other: _Mark | None = None
    for one in loops:
        often = one.operations * LEAST_PERIODS <= len(operations)
        if chosen is None:
            chosen = one if often else None
            continue
        layer = _may_be_a_layer(operations, chosen)
        count = round(one.operations / chosen.operations)
        added = _added(chosen, one, times)
        doubtful = count > 1 and (added.seconds < max(ADDS_CLEARLY, BEYOND_CHANCE * added.chance))
        if not layer and count > 1:
            doubtful = doubtful or count >= MANY
            belongs = added.seconds > max(ADDS, BEYOND_CHANCE * added.chance) or added.operations > 1 or count < RARE
            if not belongs:
                continue
        if often and (layer or count < TOO_MANY):
            chosen, other = one, chosen if doubtful else None
        elif other is None and (often or layer or count < MANY or added.seconds < PHASE):
            other = one
    return _Choice(chosen, other) if chosen else None


def _may_be_a_layer(operations: Sequence[str], mark: _Mark) -> bool:
    """Return True for a short loop without repetition."""
    if mark.operations > LAYER:
        return False
    steps = _steps(mark)
    different = (len(_content(operations, step)) for step in steps[:: len(steps) // MOST_LOOKED_AT + 1])
    return 2 * statistics.median(different) > mark.operations


def _added(loop: _Mark, longer: _Mark, times: Sequence[float]) -> _Added:
    """Return how loops that contain the mark of the longer loop differ from their neighbours."""
    steps = _steps(loop)
    ends = sorted({place for step in steps for place in step})
    seconds, operations = list[float](), list[int]()
    for place in (step.begin for step in _steps(longer)):
        first = bisect_right(ends, place) - 1
        last = bisect_left(ends, place + longer.size)
        if first < NEIGHBOURS or last + NEIGHBOURS >= len(ends):
            continue
        beside = [*range(first - NEIGHBOURS, first), *range(last, last + NEIGHBOURS)]
        usual = statistics.median(times[ends[at + 1]] - times[ends[at]] for at in beside)
        operations.append(ends[last] - ends[first] - (last - first) * loop.operations)
        if usual > 0:
            seconds.append((times[ends[last]] - times[ends[first]]) / usual - (last - first))
    if not seconds:
        return _Added(0.0, 0.0, 0)
    middle = statistics.median(seconds)
    deviation = 1.4826 * statistics.median(abs(one - middle) for one in seconds)
    return _Added(abs(middle), 1.2533 * deviation / len(seconds) ** 0.5, statistics.median(operations))


def _iterations(operations: Sequence[str], times: Sequence[float], chosen: _Choice, offset: int) -> Period:
    mark = _everywhere(operations, chosen.mark, offset)
    chains = list(_chains(operations, times, mark))
    iterations = [
        (start, stop - start, end - begin)
        for chain in chains
        for begin, end in pairwise(chain.marks)
        if (stop := seconds_at(times, end)) > (start := seconds_at(times, begin))
    ]
    if len(iterations) < LEAST_PERIODS // 2:
        raise NoPeriod(f"has a period of {mark.operations:,} operations, but their times do not advance by it")
    begins, seconds, seen = zip(*iterations, strict=True)
    usually = usual(times, chains, mark.operations)
    confidence = min(1.0, sum(seen) / (len(operations) - mark.operations))
    if chosen.other or usually.within > SURE_WITHIN:
        confidence = min(confidence, DOUBTFUL)
    other = None
    if chosen.other:
        steps = [(step.begin + offset, step.end + offset) for step in _steps(chosen.other)]
        other = chosen.other.operations, statistics.median(times[end] - times[begin] for begin, end in steps)
    return Period(mark.operations, usually.seconds, confidence, begins, seconds, usually.within, other)


def _chains(operations: Sequence[str], times: Sequence[float], mark: _Mark) -> Iterator[Chain]:
    """Yield the consecutive iterations from mark to mark. A lost mark is replaced by its expected position."""
    steps = _steps(mark)
    marks, first = list[float](), 0
    for nth, step in enumerate(steps):
        marks += [step.end] if marks else [step.begin, step.end]
        following = steps[nth + 1] if nth + 1 < len(steps) else None
        if following and following.begin > step.end:
            marks += _between(operations, times, step, following, mark.operations)
        if not following or following.begin != marks[-1]:
            yield Chain(marks, _goes_on(operations, steps[first], -1), _goes_on(operations, step, 1))
            marks, first = [], nth + 1


def _between(
    operations: Sequence[str], times: Sequence[float], before: _Step, after: _Step, length: int
) -> list[float]:
    """Return the begins of the iterations between two steps, including the end of the last one, or [].

    The gap must have the number of operations of a few loops, except for lost ones. It must contain the same operations
    as before and take as long as its neighbours. An evaluation does not meet these conditions, although it may call the
    same operations.
    """
    there = after.begin - before.end
    count = round(there / length)
    lost = abs(count * length - there)
    if not 0 < count <= MOST_MENDED or lost > _reach(length):
        return []
    beside = [times[step.end] - times[step.begin] for step in (before, after)]
    if not min(beside) / ALIKE <= (times[after.begin] - times[before.end]) / count <= max(beside) * ALIKE:
        return []
    usual = Counter({run: number * count for run, number in _content(operations, before).items()})
    lacking = (usual - _content(operations, _Step(before.end, after.begin))).total()
    if lacking > max(RUN_OF_CONTENT * lost, (1 - SAME_CONTENT) * usual.total()):
        return []
    return [*(before.end + there * nth / count for nth in range(1, count)), after.begin]


def _goes_on(operations: Sequence[str], step: _Step, by: int) -> int:
    """Return how many operations after a step (before it, if direction is -1) continue an iteration, at most one
    iteration.
    """
    here, there = (step.end, step.begin) if by == 1 else (step.begin - 1, step.end - 1)
    most = min(step.end - step.begin, len(operations) - 1 - here if by == 1 else step.begin)
    return next((at for at in range(most) if operations[here + by * at] != operations[there + by * at]), most)


def _everywhere(operations: Sequence[str], mark: _Mark, offset: int) -> _Mark:
    """Return the mark with its positions in the whole stream, if it was found in the newest part."""
    if not offset:
        return mark
    begin = mark.places[0] + offset
    run = operations[begin : begin + mark.size]
    places = [
        at
        for at, name in enumerate(operations)
        if name == run[0] and (mark.size == 1 or operations[at : at + mark.size] == run)
    ]
    return mark._replace(places=places)
