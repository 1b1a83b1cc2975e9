"""Finds the iterations in a stream of (operation, time): their number of operations and their durations.

All functions are pure.

FALCON (arXiv 2410.12588, 2.2 step 2): ACF_k is the autocorrelation of the sequence of operations, and the period is the
smallest k >= 1 with ACF_k >= 0.95. The duration of an iteration is the time from an operation to its next occurrence
one period later. This rule is sufficient if no operation is lost and an iteration contains no loop. This module differs
in these points:

- A lost operation shifts all operations after it. If 1 in 100 operations is lost, no long sequence agrees with itself
  at a fixed lag. This module therefore uses a *mark*: one operation, or a few consecutive operations. Each distance
  from a mark to its next occurrence is one vote, and a lost operation spoils only the votes next to it. Most of the
  stream must lie between marks at about the usual distance.
- The operations between two marks must be the same each time, in the same order. This is measured by the agreement of
  short runs of operations, which corresponds to the ACF but allows gaps. Operations are compared by name; the paper
  numbers them.
- If layers are loops within an iteration, the smallest k is the length of a layer. This module selects the outermost
  loop. A longer loop always replaces a loop that may be a layer (a few operations without repetition). It replaces any
  other loop (micro-batches) in three cases: it contains fewer than ten of these loops; its additional part takes time
  (3 % of one loop, beyond chance); or its additional part has more than one operation. A single operation that takes no
  time and occurs in every tenth loop logs a loss value.
- The selected period must still have at least 20 repetitions (L >= 20 k). If a longer period has fewer repetitions, the
  choice is doubtful, unless the longer period looks like an evaluation or a checkpoint: many loops, followed by a pause
  longer than one loop.

The choice is also doubtful if the additional part that decided it takes less than 10 % of the shorter loop, or if the
longer loop contains 16 or more loops that are not layers. If the choice is doubtful, the confidence is below 0.5, and
the other period is also reported.

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
from healthd.failslow.iteration_time import Chain, estimate_iteration_time, seconds_at

MIN_PERIODS = 20
MIN_REPEATS = 5  # minimum number of repetitions of a loop that can make a choice doubtful
SEARCHED_OPERATIONS = (
    40_000,
    400_000,
)  # numbers of newest operations to use: first twice the ring buffer of FALCON's hook, then more for long iterations
MARK_SIZES = (1, 2, 4, 8, 16)  # maximum number of operations in a mark
# maximum number of occurrences of a mark in an iteration, for marks of one or two operations
MAX_MARKS_PER_ITERATION = 8
MIN_REGULAR_SHARE = 0.6  # share of the stream that must lie between marks at the usual distance
LOSS_INTERVAL = 25  # 1 in this number of operations may be lost from a loop, and one more from a long loop
LONG_LOOP = 8  # number of operations
MIN_SAME_CONTENT = 0.7  # share of the runs of operations that consecutive loops must have in common
CONTENT_RUN = 3
MAX_COMPARED_LOOPS = 64  # number of loops whose contents are compared
MIN_ADDED_TIME = 0.03  # if the additional part takes at least this share of a loop's time, it belongs to the iteration
CLEAR_ADDED_TIME = 0.1
MIN_STANDARD_ERRORS = 3.0  # in standard errors
NEIGHBOURS = 4  # number of neighbouring loops on each side with which a loop is compared
MAX_LAYER = 24  # maximum number of operations
RARE_LOOPS = (
    # a single operation that takes no time is not part of an iteration if it occurs at most once in this number of
    # loops
    10
)
DOUBTFUL_LOOPS = 16  # the choice is doubtful if an iteration has at least this many loops that are not layers
MAX_LOOPS = 128
PHASE_LOOPS = 1.0  # a rare part that is longer than this number of loops is an evaluation or a checkpoint
DOUBTFUL_CONFIDENCE = 0.45  # maximum confidence
MAX_FILLED = 3  # maximum number of consecutive iterations with lost marks; a longer gap is another phase of the job
SIMILAR_DURATION = 1.25  # maximum factor by which a duration may differ from its neighbours'
MAX_RELATIVE_ERROR = 0.012  # share of an iteration's time: the maximum error in FALCON (2.2, step 2)


class PeriodNotFound(HealthdError):
    """The stream has no period.

    The message is the reason and continues a sentence that begins with the stream's name.
    """


class Period(NamedTuple):
    """The result for one stream.

    Attributes:
        operations: number of operations in an iteration.
        iteration_seconds: typical duration (iteration_time.py).
        relative_error: possible error of this duration, as a share.
        confidence: share of the stream that consists of such iterations, 0 to 1. It is below 0.5 if the alternative is
            about as good, or if relative_error is above 0.012.
        begin_seconds: time of each iteration's mark.
        seconds: duration of each iteration. Both lists have the same length.
        alternative: number of operations and seconds of the other possible period.
    """

    operations: int
    iteration_seconds: float
    confidence: float
    begin_seconds: tuple[float, ...]
    seconds: tuple[float, ...]
    relative_error: float = 0.0
    alternative: tuple[int, float] | None = None


class _Mark(NamedTuple):
    """A run of operations that repeats.

    Attributes:
        positions: where it occurs.
        size: number of operations in the run.
        per_iteration: number of occurrences in an iteration.
        operations: number of operations from one iteration to the next.
        regular_share: share of the stream with this distance.
    """

    positions: list[int]
    size: int
    per_iteration: int
    operations: int
    regular_share: float


class _Step(NamedTuple):
    """One pass through a loop: the position where it begins, and the position where the next pass begins."""

    begin: int
    end: int


class _Added(NamedTuple):
    """The part that a longer loop has in addition to the shorter loops in it.

    Attributes:
        seconds: median of the absolute differences from the usual duration, in loops.
        standard_error: standard error of this median (for normal values, 1.2533 deviations divided by the square root
            of their number).
        operations: median number of additional operations.
    """

    seconds: float
    standard_error: float
    operations: float


class _Choice(NamedTuple):
    mark: _Mark
    alternative: _Mark | None


def find_period(operations: Sequence[str], times: Sequence[float]) -> Period:
    """Find the period of a stream. Raises PeriodNotFound.

    Args:
        operations, times: sequences of the same length; times in seconds, ascending.
    """
    operations = list(operations)
    if len(operations) < 2 * MIN_PERIODS:
        raise PeriodNotFound(
            f"has {len(operations):,} operations with a time; a period needs at least {2 * MIN_PERIODS}"
        )
    if len(set(operations[-SEARCHED_OPERATIONS[0] :])) == 1:
        raise PeriodNotFound("has only one kind of operation, so it does not show where an iteration begins")
    choice = None
    for limit in SEARCHED_OPERATIONS:
        recent = operations[-limit:]
        loops = _find_loops(recent)
        choice = _choose(loops, recent, times[-limit:])
        are_frequent = all(loop.operations * MIN_PERIODS <= len(recent) for loop in loops)
        if (choice and choice.alternative is None and are_frequent) or len(recent) == len(operations):
            break
    if choice is None:
        raise PeriodNotFound(
            f"has no repeating pattern: no period up to {len(recent) // MIN_PERIODS:,} operations, a twentieth of its "
            "length"
        )
    return _make_period(operations, times, choice, len(operations) - len(recent))


def _find_loops(operations: Sequence[str]) -> list[_Mark]:
    """Return the best mark for each loop. The shortest loop comes first."""
    marks = sorted(_find_marks(operations), key=lambda mark: mark.operations)
    groups: list[list[_Mark]] = []
    for mark in marks:
        if groups and mark.operations - groups[-1][0].operations <= _tolerance(mark.operations):
            groups[-1].append(mark)
        else:
            groups.append([mark])
    best = (
        max(group, key=lambda mark: (round(mark.regular_share, 2), -mark.per_iteration, -mark.size, -mark.positions[0]))
        for group in groups
    )
    consistent = (_with_measured_length(mark) for mark in best if _has_same_content(operations, mark))
    return [mark for mark in consistent if not _is_repetition(operations, mark)]


def _with_measured_length(mark: _Mark) -> _Mark:
    """Return the mark and the measured length of its loop.

    If an operation occurs twice in succession, it has two different distances.
    """
    return mark._replace(operations=int(statistics.median(step.end - step.begin for step in _steps(mark))))


def _find_marks(operations: Sequence[str]) -> Iterator[_Mark]:
    number: dict[object, int] = {}
    codes = [number.setdefault(name, len(number)) for name in operations]
    for size in MARK_SIZES:
        positions_by_code: dict[int, list[int]] = {}
        for at, code in enumerate(codes):
            positions_by_code.setdefault(code, []).append(at)
        for positions in positions_by_code.values():
            for per_iteration in range(1, 1 + (MAX_MARKS_PER_ITERATION if size <= 2 else 1)):
                mark = _make_mark(positions, size, per_iteration, len(operations))
                if mark:
                    yield mark
                    break
        pairs: dict[tuple[int, int], int] = {}
        codes = [pairs.setdefault(pair, len(pairs)) for pair in zip(codes, codes[size:], strict=False)]


def _make_mark(positions: list[int], size: int, per_iteration: int, length: int) -> _Mark | None:
    """Return the mark, or None if its distances differ too much.

    The usual distance is the median: lost operations make some distances longer, and accidental ones make some shorter.
    """
    if len(positions) < MIN_REPEATS * per_iteration:
        return None
    steps = sorted(after - before for before, after in zip(positions, positions[per_iteration:], strict=False))
    total = sum(steps)
    below = 0
    usual = next(step for step in steps if (below := below + step) * 2 >= total)
    if usual <= per_iteration:
        return None  # the operation follows itself
    reach = _tolerance(usual)
    regular_share = sum(steps[bisect_left(steps, usual - reach) : bisect_right(steps, usual + reach)]) / (
        per_iteration * length
    )
    return _Mark(positions, size, per_iteration, usual, regular_share) if regular_share >= MIN_REGULAR_SHARE else None


def _tolerance(operations: int) -> int:
    """Return the number of operations that may be lost from a loop, and by which its length may therefore differ."""
    return operations // LOSS_INTERVAL + (operations >= LONG_LOOP)


def _steps(mark: _Mark) -> list[_Step]:
    """Return the steps between marks at the usual distance. Other occurrences are accidental."""
    positions, reach, steps = mark.positions, _tolerance(mark.operations), list[_Step]()
    at = 0
    while at < len(positions):
        goal = positions[at] + mark.operations
        after = bisect_left(positions, goal)
        near = min(positions[max(at + 1, after - 1) : after + 1], key=lambda position: abs(position - goal), default=-1)
        if near >= 0 and abs(near - goal) <= reach:
            steps.append(_Step(positions[at], near))
            at = bisect_left(positions, near)
        else:
            at += 1
    return steps


def _has_same_content(operations: Sequence[str], mark: _Mark) -> bool:
    """Return True if consecutive loops have the same runs of operations."""
    steps = _steps(mark)
    pairs = [(first, second) for first, second in pairwise(steps) if first.end == second.begin]
    shares = []
    for first, second in pairs[:: len(pairs) // MAX_COMPARED_LOOPS + 1]:
        first_content, second_content = _content(operations, first), _content(operations, second)
        shares.append((first_content & second_content).total() / max(first_content.total(), second_content.total()))
    return bool(shares) and statistics.median(shares) >= MIN_SAME_CONTENT


def _is_repetition(operations: Sequence[str], mark: _Mark) -> bool:
    """Return True if this loop consists of several equal, shorter loops."""
    length = mark.operations
    steps = [step for step in _steps(mark) if step.end - step.begin == length]
    steps = steps[:: len(steps) // MAX_COMPARED_LOOPS + 1]
    for part in (divisor for divisor in range(1, length // 2 + 1) if length % divisor == 0):
        same = sum(
            operations[step.begin : step.end - part] == operations[step.begin + part : step.end] for step in steps
        )
        if steps and 2 * same > len(steps):
            return True
    return False


def _content(operations: Sequence[str], step: _Step) -> Counter[tuple[str, ...]]:
    return Counter(tuple(operations[at : at + CONTENT_RUN]) for at in range(step.begin, step.end))


def _choose(loops: Sequence[_Mark], operations: Sequence[str], times: Sequence[float]) -> _Choice | None:
    """Return the outermost loop that takes more time than the loops inside it."""
    chosen: _Mark | None = None
    alternative: _Mark | None = None
    for loop in loops:
        is_frequent = loop.operations * MIN_PERIODS <= len(operations)
        if chosen is None:
            chosen = loop if is_frequent else None
            continue
        is_layer = _may_be_layer(operations, chosen)
        count = round(loop.operations / chosen.operations)
        added = _added_time(chosen, loop, times)
        doubtful = count > 1 and (added.seconds < max(CLEAR_ADDED_TIME, MIN_STANDARD_ERRORS * added.standard_error))
        if not is_layer and count > 1:
            doubtful = doubtful or count >= DOUBTFUL_LOOPS
            belongs = (
                added.seconds > max(MIN_ADDED_TIME, MIN_STANDARD_ERRORS * added.standard_error)
                or added.operations > 1
                or count < RARE_LOOPS
            )
            if not belongs:
                continue
        if is_frequent and (is_layer or count < MAX_LOOPS):
            chosen, alternative = loop, chosen if doubtful else None
        elif alternative is None and (is_frequent or is_layer or count < DOUBTFUL_LOOPS or added.seconds < PHASE_LOOPS):
            alternative = loop
    return _Choice(chosen, alternative) if chosen else None


def _may_be_layer(operations: Sequence[str], mark: _Mark) -> bool:
    """Return True if the loop may be a layer, because it is short and has no repetition."""
    if mark.operations > MAX_LAYER:
        return False
    steps = _steps(mark)
    different = (len(_content(operations, step)) for step in steps[:: len(steps) // MAX_COMPARED_LOOPS + 1])
    return 2 * statistics.median(different) > mark.operations


def _added_time(loop: _Mark, longer: _Mark, times: Sequence[float]) -> _Added:
    """Return the difference between loops that contain the longer loop's mark and their neighbours."""
    steps = _steps(loop)
    ends = sorted({position for step in steps for position in step})
    seconds, operations = list[float](), list[int]()
    for position in (step.begin for step in _steps(longer)):
        first = bisect_right(ends, position) - 1
        last = bisect_left(ends, position + longer.size)
        if first < NEIGHBOURS or last + NEIGHBOURS >= len(ends):
            continue
        neighbours = [*range(first - NEIGHBOURS, first), *range(last, last + NEIGHBOURS)]
        usual = statistics.median(times[ends[at + 1]] - times[ends[at]] for at in neighbours)
        operations.append(ends[last] - ends[first] - (last - first) * loop.operations)
        if usual > 0:
            seconds.append((times[ends[last]] - times[ends[first]]) / usual - (last - first))
    if not seconds:
        return _Added(0.0, 0.0, 0)
    middle = statistics.median(seconds)
    deviation = 1.4826 * statistics.median(abs(value - middle) for value in seconds)
    return _Added(abs(middle), 1.2533 * deviation / len(seconds) ** 0.5, statistics.median(operations))


def _make_period(operations: Sequence[str], times: Sequence[float], choice: _Choice, offset: int) -> Period:
    mark = _find_everywhere(operations, choice.mark, offset)
    chains = list(_chains(operations, times, mark))
    iterations = [
        (start, stop - start, end - begin)
        for chain in chains
        for begin, end in pairwise(chain.marks)
        if (stop := seconds_at(times, end)) > (start := seconds_at(times, begin))
    ]
    if len(iterations) < MIN_PERIODS // 2:
        raise PeriodNotFound(f"has a period of {mark.operations:,} operations, but its times do not advance")
    begins, seconds, operation_counts = zip(*iterations, strict=True)
    estimate = estimate_iteration_time(times, chains, mark.operations)
    confidence = min(1.0, sum(operation_counts) / (len(operations) - mark.operations))
    if choice.alternative or estimate.relative_error > MAX_RELATIVE_ERROR:
        confidence = min(confidence, DOUBTFUL_CONFIDENCE)
    alternative = None
    if choice.alternative:
        steps = [(step.begin + offset, step.end + offset) for step in _steps(choice.alternative)]
        alternative = (
            choice.alternative.operations,
            statistics.median(times[end] - times[begin] for begin, end in steps),
        )
    return Period(mark.operations, estimate.seconds, confidence, begins, seconds, estimate.relative_error, alternative)


def _chains(operations: Sequence[str], times: Sequence[float], mark: _Mark) -> Iterator[Chain]:
    """Yield chains of consecutive iterations, from mark to mark. A lost mark is replaced by its expected position."""
    steps = _steps(mark)
    marks, first = list[float](), 0
    for nth, step in enumerate(steps):
        marks += [step.end] if marks else [step.begin, step.end]
        following = steps[nth + 1] if nth + 1 < len(steps) else None
        if following and following.begin > step.end:
            marks += _fill_between(operations, times, step, following, mark.operations)
        if not following or following.begin != marks[-1]:
            yield Chain(marks, _count_matching(operations, steps[first], -1), _count_matching(operations, step, 1))
            marks, first = [], nth + 1


def _fill_between(
    operations: Sequence[str], times: Sequence[float], before: _Step, after: _Step, length: int
) -> list[float]:
    """Return the starts of the iterations in the gap between two steps, and the end of the last one, or [].

    The gap must have as many operations as a small number of loops, apart from lost operations. It must contain the
    same operations as before, and each loop must take as long as its neighbours. An evaluation may call the same
    operations, but it does not meet these conditions.
    """
    gap = after.begin - before.end
    count = round(gap / length)
    lost = abs(count * length - gap)
    if not 0 < count <= MAX_FILLED or lost > _tolerance(length):
        return []
    neighbours = [times[step.end] - times[step.begin] for step in (before, after)]
    if (
        not min(neighbours) / SIMILAR_DURATION
        <= (times[after.begin] - times[before.end]) / count
        <= max(neighbours) * SIMILAR_DURATION
    ):
        return []
    usual = Counter({run: number * count for run, number in _content(operations, before).items()})
    missing = (usual - _content(operations, _Step(before.end, after.begin))).total()
    if missing > max(CONTENT_RUN * lost, (1 - MIN_SAME_CONTENT) * usual.total()):
        return []
    return [*(before.end + gap * nth / count for nth in range(1, count)), after.begin]


def _count_matching(operations: Sequence[str], step: _Step, direction: int) -> int:
    """Return the number of operations after a step that continue an iteration, at most one whole iteration.

    If direction is -1, return the number of such operations before the step.
    """
    position, reference = (step.end, step.begin) if direction == 1 else (step.begin - 1, step.end - 1)
    limit = min(step.end - step.begin, len(operations) - 1 - position if direction == 1 else step.begin)
    return next(
        (at for at in range(limit) if operations[position + direction * at] != operations[reference + direction * at]),
        limit,
    )


def _find_everywhere(operations: Sequence[str], mark: _Mark, offset: int) -> _Mark:
    """Find the positions of a mark in the whole stream. The mark was found in the newest part of the stream."""
    if not offset:
        return mark
    begin = mark.positions[0] + offset
    run = operations[begin : begin + mark.size]
    positions = [
        at
        for at, name in enumerate(operations)
        if name == run[0] and (mark.size == 1 or operations[at : at + mark.size] == run)
    ]
    return mark._replace(positions=positions)
