"""Failures by week: frequency of each cause, weeks that stand out, and whether a few nodes are responsible. Pure.

"The IB-link spike in summer 2024 came from a few nodes in a short time" (arXiv 2410.21680, Kokolis, Kuchnik et al.,
HPCA 2025): a rate that rises for the whole fleet points to a driver or a new check, a rise on three nodes to these
nodes.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

WEEK = 7 * 86400
MONDAY = 4 * 86400  # the epoch began on a Thursday
# Jobs that one fault ended one after another: the window of the attribution.
ONE_INCIDENT_SECONDS = 900
# A week stands out with at least this many incidents, this many times the number expected from all other weeks, and a
# chance probability below one in a thousand: a year has 52 weeks, each with a dozen causes.
LEAST, RISE, UNLIKELY = 5, 2.0, 0.001
# A few nodes are responsible if at most this many nodes have half of the incidents, with at least four incidents of
# the week for each of these nodes. Both are healthd's.
FEW, HALF, TIMES = 5, 0.5, 4


class Incident(NamedTuple):
    """A fault of a node at a time, epoch seconds. jobs: number of jobs it ended."""

    cluster: str
    node: str
    cause: str
    time: int
    jobs: int


@dataclass(frozen=True, slots=True)
class Spike:
    """A week that stands out.

    expected  incidents at the rate of the other weeks
    nodes     the fewest nodes with half of the incidents as (cluster, node, incidents), if they are few; else empty
    """

    cause: str
    week: int
    incidents: int
    expected: float
    nodes: tuple[tuple[str, str, int], ...]


def week_of(time: int) -> int:
    """Return the Monday, 00:00 UTC, at or before a time; epoch seconds."""
    return (time - MONDAY) // WEEK * WEEK + MONDAY


def incidents(failures: Iterable[tuple[str, str, str, int]]) -> list[Incident]:
    """Join failures (cluster, node, cause, time) into incidents, sorted by time.

    Failures of one cause on one node, each within 15 minutes of the previous one, are one incident. The order of the
    failures does not matter.
    """
    of_node: dict[tuple[str, str, str], list[int]] = defaultdict(list)
    for cluster, node, cause, time in failures:
        of_node[cluster, node, cause].append(time)
    found = []
    for (cluster, node, cause), times in of_node.items():
        first = last = min(times)
        jobs = 0
        for time in sorted(times):
            if time - last > ONE_INCIDENT_SECONDS:
                found.append(Incident(cluster, node, cause, first, jobs))
                first, jobs = time, 0
            last = time
            jobs += 1
        found.append(Incident(cluster, node, cause, first, jobs))
    return sorted(found, key=lambda one: (one.time, one.cluster, one.node, one.cause))


def spikes(happened: Sequence[Incident], gpu_hours: Mapping[int, float]) -> list[Spike]:
    """Return the weeks in which a cause stands out, sorted by cause and week. gpu_hours: of each week."""
    by_cause: dict[str, dict[int, list[Incident]]] = defaultdict(lambda: defaultdict(list))
    for one in happened:
        by_cause[one.cause][week_of(one.time)].append(one)
    whole = sum(gpu_hours.values())
    found = []
    for cause, weeks in sorted(by_cause.items()):
        total = sum(len(some) for some in weeks.values())
        for week, some in sorted(weeks.items()):
            elsewhere = whole - gpu_hours.get(week, 0.0)
            if len(some) < LEAST or elsewhere <= 0:
                continue
            expected = (total - len(some)) / elsewhere * gpu_hours.get(week, 0.0)
            if len(some) >= RISE * expected and at_least(len(some), expected) < UNLIKELY:
                found.append(Spike(cause, week, len(some), expected, few(some)))
    return found


def few(some: Sequence[Incident]) -> tuple[tuple[str, str, int], ...]:
    """Return the fewest nodes with half of these incidents, worst first; empty if they are not few."""
    counts = Counter((one.cluster, one.node) for one in some)
    held, nodes = 0, []
    for (cluster, node), count in sorted(counts.items(), key=lambda it: (-it[1], it[0])):
        if held >= HALF * len(some):
            break
        held += count
        nodes.append((cluster, node, count))
    return tuple(nodes) if len(nodes) <= min(FEW, len(some) / TIMES) else ()


def at_least(count: int, expected: float) -> float:
    """Return P(X >= count) of a Poisson distribution with mean `expected`: 1 minus the sum of its first terms."""
    if count <= 0:
        return 1.0
    if expected <= 0:
        return 0.0
    terms = (math.exp(k * math.log(expected) - expected - math.lgamma(k + 1)) for k in range(count))
    return max(0.0, 1.0 - math.fsum(terms))
