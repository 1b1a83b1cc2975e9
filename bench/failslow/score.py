"""Score answers against the truth of the sets: found and missed faults, reports for healthy jobs, and blame."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from failslow.generate import Event, Made
from healthd.failslow.model import Cause, Diagnosis, Point

NEAR, ONSETS = 10, 0.95  # number of iterations, and the minimum share of onsets that must be within this number
FPR, FNR, DELAY_MEDIAN, DELAY_P95 = 0.01, 0.05, 10, 30
QUIET_CV = 0.05  # the targets apply to sets with noise up to this CV

COMPUTE = (Cause.COMPUTE, Cause.COMPUTE_CPU, Cause.COMPUTE_GPU)
COMMUNICATION = (Cause.COMMUNICATION, Cause.COMMUNICATION_INTER_NODE, Cause.COMMUNICATION_INTRA_NODE)


@dataclass(frozen=True, slots=True)
class Found:
    """Errors of the point for an event, in iterations; above 0 means later than the truth.

    relief: None if it has none.
    """

    event: Event
    onset: int
    delay: int
    relief: int | None

    @property
    def within(self) -> bool:
        """Return True if the onset is within ten iterations of the range with 8 to 12 % slowdown, without noise."""
        at = self.event.onset + self.onset
        return self.event.early - NEAR <= at <= self.event.late + NEAR


@dataclass(frozen=True, slots=True)
class Outcome:
    """Result of one set. stray: number of points outside events, or in series that are not slow.

    blamed: right, wrong, nobody.
    """

    made: Made
    alarmed: bool
    found: tuple[Found, ...]
    stray: int
    blamed: str
    is_cause_right: bool | None  # whether the class of the cause is right; only if the blame is correct

    def without_samples(self) -> Outcome:
        """Return a copy that is small enough to send to another process."""
        return replace(self, made=replace(self.made, series=(), at=()))

    @property
    def missed(self) -> bool:
        """Return True if any event was not found."""
        return len(self.found) < len(self.made.events)


def outcome(made: Made, answer: Diagnosis) -> Outcome:
    if len(answer.points) != len(made.series):
        raise ValueError(f"{made.name}: points of {len(answer.points)} series, not of {len(made.series)}")
    points_by_series = _points_by_series(made, answer)
    alarmed = any(answer.points) or bool(answer.suspects or answer.slow_jobs or answer.slow_throughout)
    found, matched = [], set[tuple[int, int]]()
    for event in made.events:
        firsts: list[tuple[int, int, int | None]] = []  # the first point of each series in the event
        for position, (series, points) in enumerate(zip(made.series, points_by_series, strict=True)):
            if not made.gang and series.name not in event.slow:
                continue
            at = made.at[position]
            matches = []
            for nth, point in enumerate(points):
                if event.begin - NEAR <= at[point.onset_index] < event.end:
                    matched.add((position, nth))
                    relief = None if point.relief_index is None else int(at[min(point.relief_index, len(at) - 1)])
                    matches.append((int(at[point.onset_index]), int(at[point.alarm_index]), relief))
            firsts += matches[:1]
        if firsts:
            onset = round(statistics.median(first[0] for first in firsts))
            alarm = round(statistics.median(first[1] for first in firsts))
            ends = [first[2] for first in firsts if first[2] is not None]
            relief = round(statistics.median(ends)) - event.relief if ends and event.relief is not None else None
            found.append(Found(event, onset - event.onset, alarm - event.onset, relief))
    stray = sum(map(len, points_by_series)) - len(matched)
    blamed, is_cause_right = _blamed(made, answer)
    return Outcome(made, alarmed, tuple(found), stray, blamed, is_cause_right)


def _points_by_series(made: Made, answer: Diagnosis) -> list[list[Point]]:
    """Return the points of each series. A slow job without points counts in the first series that it names."""
    all_points = [list(points) for points in answer.points]
    positions = {series.name: at for at, series in enumerate(made.series)}
    for slow in answer.slow_jobs:
        if not any(answer.points[positions[name]] for name in slow.series):
            all_points[positions[slow.series[0]]].append(slow.point)
    return all_points


def _blamed(made: Made, answer: Diagnosis) -> tuple[str, bool | None]:
    slow = frozenset[str]().union(*(event.slow for event in made.events))
    if not slow.issuperset(suspect.series for suspect in answer.slow_throughout):
        return "wrong", None
    if not answer.suspects:
        return "nobody", None
    names = frozenset[str]().union(*(event.names for event in made.events))
    for suspect in answer.suspects:
        if not ((suspect.series and slow.issuperset(suspect.series)) or suspect.subject in slow | names):
            return "wrong", None
    causes = {event.cause in COMPUTE for event in made.events}
    reported_causes = [suspect.cause for suspect in answer.suspects]
    # Workers that report only iteration times do not show whether computing or communicating is slow.
    is_right = not made.gang or all(
        (cause in COMPUTE and True in causes) or (cause in COMMUNICATION and False in causes)
        for cause in reported_causes
    )
    return "right", is_right


def interval(count: int, total: int) -> tuple[float, float]:
    """Return Clopper and Pearson's exact 95 % interval of a share."""
    from scipy.stats import beta

    low = float(beta.ppf(0.025, count, total - count + 1)) if count else 0.0
    return low, float(beta.ppf(0.975, count + 1, total - count)) if count < total else 1.0


def share(count: int, total: int) -> str:
    """Format a share and its interval as "1.2 % (0.1 to 4.3), 2 of 167"."""
    if not total:
        return "none"
    low, high = interval(count, total)
    return f"{100 * count / total:.1f} % ({100 * low:.1f} to {100 * high:.1f}), {count} of {total}"


# --- tables

Group = tuple[str, Callable[[Made], bool]]


def groups() -> list[tuple[str, list[Group]]]:
    from failslow.generate import CVS, HEALTHY, MINUTES, SHAPES

    def cause_is(cause: Cause) -> Callable[[Made], bool]:
        return lambda made: any(event.cause is cause for event in made.events)

    return [
        ("all", [("all", lambda made: True), ("CV <= 5 %", lambda made: made.cv <= QUIET_CV)]),
        ("noise", [(f"CV {cv:.0%}", lambda made, cv=cv: made.cv == cv) for cv in CVS]),
        ("job", [("gangs", lambda made: made.gang), ("workers", lambda made: not made.gang)]),
        ("duration", [(f"{n} min", lambda made, n=n: made.positive and made.minutes == n) for n in MINUTES]),
        ("cause", [(c.value.replace("_", " "), cause_is(c)) for c in (*COMPUTE[1:], *COMMUNICATION[1:])]),
        ("shape", [(name, lambda made, name=name: made.positive and made.about == name) for name in SHAPES]),
        (
            "height",
            [
                (f"{low:.0%} to {high:.0%}", lambda made, a=low, b=high: any(a <= e.height < b for e in made.events))
                for low, high in ((0.1, 0.2), (0.2, 0.3), (0.3, 0.45), (0.45, 0.61))
            ],
        ),
        (
            "healthy",
            [
                (name.replace("_", " "), lambda made, name=name: not made.positive and made.about == name)
                for name in HEALTHY
            ],
        ),
    ]


def table(outcomes: Sequence[Outcome]) -> list[tuple[str, str, str]]:
    """Return (group, FPR, FNR) of each group. A rate is "" if the group has no such sets."""
    rows = []
    for _, members in groups():
        for name, belongs in members:
            selected = [result for result in outcomes if belongs(result.made)]
            healthy, slow = ([result for result in selected if result.made.positive is kind] for kind in (False, True))
            fpr = share(sum(result.alarmed for result in healthy), len(healthy)) if healthy else ""
            fnr = share(sum(result.missed for result in slow), len(slow)) if slow else ""
            if healthy or slow:
                rows.append((name, fpr, fnr))
    return rows


def quantiles(values: Iterable[float]) -> str:
    """Format values as "median 3, p95 9, n=20"."""
    ordered = sorted(values)
    if not ordered:
        return "none"
    return f"median {statistics.median(ordered):.0f}, p95 {percentile(ordered, 0.95):.0f}, n={len(ordered)}"


def percentile(ordered: Sequence[float], part: float) -> float:
    """Return the nearest-rank percentile of sorted values, or infinity if there are none."""
    return ordered[max(0, math.ceil(part * len(ordered)) - 1)] if ordered else math.inf


def timing(outcomes: Sequence[Outcome]) -> list[tuple[str, str, str, str, str, str]]:
    """Return the timing errors by shape.

    Columns: shape, |onset error|, within 10 iterations, within 10 of the range with 8 to 12 % slowdown, alarm after the
    true onset, |relief error|.
    """
    rows = []
    all_found = [found for item in outcomes for found in item.found]
    for name, selected in (
        ("all", all_found),
        *(
            (shape, [item for item in all_found if item.event.shape == shape])
            for shape in ("step", "ramp", "staircase")
        ),
    ):
        rows.append(
            (
                name,
                quantiles(abs(item.onset) for item in selected),
                share(sum(abs(item.onset) <= NEAR for item in selected), len(selected)),
                share(sum(item.within for item in selected), len(selected)),
                quantiles(item.delay for item in selected),
                quantiles(abs(item.relief) for item in selected if item.relief is not None),
            )
        )
    return rows


def blame(outcomes: Sequence[Outcome]) -> list[tuple[str, int, int, int, int, str]]:
    """Return (kind of sets, number, blamed right, wrong, none, cause class right)."""
    rows = []
    for name, selected in (
        ("gangs with a culprit", [o for o in outcomes if o.made.gang and _nameable(o.made)]),
        ("gangs without", [o for o in outcomes if o.made.gang and o.made.positive and not _nameable(o.made)]),
        ("workers with a culprit", [o for o in outcomes if not o.made.gang and _nameable(o.made)]),
        (
            "workers without",
            [o for o in outcomes if not o.made.gang and o.made.positive and not _nameable(o.made)],
        ),
        ("healthy", [o for o in outcomes if not o.made.positive]),
    ):
        count = [sum(result.blamed == how for result in selected) for how in ("right", "wrong", "nobody")]
        causes_right = [result.is_cause_right for result in selected if result.is_cause_right is not None]
        rows.append((name, len(selected), count[0], count[1], count[2], share(sum(causes_right), len(causes_right))))
    return rows


def _nameable(made: Made) -> bool:
    return made.positive and all(event.nameable for event in made.events)


def aims(outcomes: Sequence[Outcome]) -> list[tuple[bool, str]]:
    """Return (met, sentence) of each target, for the sets with at most 5 % noise."""
    selected = [item for item in outcomes if item.made.cv <= QUIET_CV]
    healthy, slow = ([item for item in selected if item.made.positive is kind] for kind in (False, True))
    false_alarms, missed = sum(item.alarmed for item in healthy), sum(item.missed for item in slow)
    found = [item for o in selected for item in o.found]
    near = sum(item.within for item in found)
    delays = sorted(item.delay for item in found)
    median = statistics.median(delays) if delays else math.inf
    late = percentile(delays, 0.95)
    return [
        (
            false_alarms <= FPR * len(healthy),
            f"FPR at CV <= 5 %: {share(false_alarms, len(healthy))}, aim at most {FPR:.0%}",
        ),
        (missed <= FNR * len(slow), f"FNR at CV <= 5 %: {share(missed, len(slow))}, aim at most {FNR:.0%}"),
        (near >= ONSETS * len(found), f"onsets within {NEAR} iterations: {share(near, len(found))}, aim {ONSETS:.0%}"),
        (median <= DELAY_MEDIAN, f"alarm after the onset, median: {median:.0f} iterations, aim {DELAY_MEDIAN}"),
        (late <= DELAY_P95, f"alarm after the onset, p95: {late:.0f} iterations, aim {DELAY_P95}"),
    ]
