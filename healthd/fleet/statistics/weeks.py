"""Counts failures by week and cause, and finds weeks that stand out and the few nodes responsible for them.

All functions are pure.

If the failure rate rises on the whole fleet, the likely cause is a driver or a new check. If it rises on three nodes,
the likely cause is these nodes: "The IB-link spike in summer 2024 came from a few nodes in a short time" (arXiv
2410.21680, Kokolis, Kuchnik et al., HPCA 2025).
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

WEEK = 7 * 86400
FIRST_MONDAY = 4 * 86400  # the epoch began on a Thursday
# If one fault ends several jobs, maximum time between the ends of two successive jobs. It equals the attribution
# window.
INCIDENT_GAP_SECONDS = 900
# A week stands out if it has at least this many incidents, at least this many times the number expected from all other
# weeks, and a chance probability below one in a thousand. The probability is this low because a year has 52 weeks, each
# with a dozen causes.
MIN_INCIDENTS, MIN_RISE, MAX_CHANCE = 5, 2.0, 0.001
# A few nodes are responsible if at most this many nodes have half of the week's incidents, and if the week has at least
# four incidents for each of these nodes. Both rules are healthd's.
MAX_SPIKE_NODES, SPIKE_NODES_SHARE, MIN_INCIDENTS_PER_NODE = 5, 0.5, 4


class Incident(NamedTuple):
    """A fault on a node at a time (epoch seconds). `jobs` is the number of jobs that it ended."""

    cluster: str
    node: str
    cause: str
    time: int
    jobs: int


@dataclass(frozen=True, slots=True)
class Spike:
    """A week that stands out.

    Attributes:
        expected: incidents expected from the rate in the other weeks.
        nodes: the nodes that have half of the incidents, as (cluster, node, incidents); empty if there are too many.
    """

    cause: str
    week: int
    incidents: int
    expected: float
    nodes: tuple[tuple[str, str, int], ...]


def week_start(time: int) -> int:
    """Return the Monday, 00:00 UTC, at or before a time, in epoch seconds."""
    return (time - FIRST_MONDAY) // WEEK * WEEK + FIRST_MONDAY


def group_incidents(failures: Iterable[tuple[str, str, str, int]]) -> list[Incident]:
    """Join failures (cluster, node, cause, time) into incidents, sorted by time.

    Failures with the same cause on the same node, each within 15 minutes of the previous one, are one incident. The
    order of the failures does not matter.
    """
    times_by_node: dict[tuple[str, str, str], list[int]] = defaultdict(list)
    for cluster, node, cause, time in failures:
        times_by_node[cluster, node, cause].append(time)
    found = []
    for (cluster, node, cause), times in times_by_node.items():
        first = last = min(times)
        jobs = 0
        for time in sorted(times):
            if time - last > INCIDENT_GAP_SECONDS:
                found.append(Incident(cluster, node, cause, first, jobs))
                first, jobs = time, 0
            last = time
            jobs += 1
        found.append(Incident(cluster, node, cause, first, jobs))
    return sorted(found, key=lambda incident: (incident.time, incident.cluster, incident.node, incident.cause))


def spikes(all_incidents: Sequence[Incident], gpu_hours: Mapping[int, float]) -> list[Spike]:
    """Return the weeks in which a cause stands out, sorted by cause and week.

    Args:
        gpu_hours: GPU-hours in each week.
    """
    by_cause: dict[str, dict[int, list[Incident]]] = defaultdict(lambda: defaultdict(list))
    for incident in all_incidents:
        by_cause[incident.cause][week_start(incident.time)].append(incident)
    total_gpu_hours = sum(gpu_hours.values())
    found = []
    for cause, weeks in sorted(by_cause.items()):
        total = sum(len(week_incidents) for week_incidents in weeks.values())
        for week, week_incidents in sorted(weeks.items()):
            other_gpu_hours = total_gpu_hours - gpu_hours.get(week, 0.0)
            if len(week_incidents) < MIN_INCIDENTS or other_gpu_hours <= 0:
                continue
            expected = (total - len(week_incidents)) / other_gpu_hours * gpu_hours.get(week, 0.0)
            if len(week_incidents) >= MIN_RISE * expected and poisson_tail(len(week_incidents), expected) < MAX_CHANCE:
                found.append(Spike(cause, week, len(week_incidents), expected, concentrated_nodes(week_incidents)))
    return found


def concentrated_nodes(week_incidents: Sequence[Incident]) -> tuple[tuple[str, str, int], ...]:
    """Return the smallest set of nodes with half of these incidents, worst node first, or () if these are more than a
    few nodes."""
    counts = Counter((incident.cluster, incident.node) for incident in week_incidents)
    covered, nodes = 0, []
    for (cluster, node), count in sorted(counts.items(), key=lambda item: (-item[1], item[0])):
        if covered >= SPIKE_NODES_SHARE * len(week_incidents):
            break
        covered += count
        nodes.append((cluster, node, count))
    return tuple(nodes) if len(nodes) <= min(MAX_SPIKE_NODES, len(week_incidents) / MIN_INCIDENTS_PER_NODE) else ()


def poisson_tail(count: int, expected: float) -> float:
    """Return P(X >= count) for a Poisson distribution with mean `expected`: 1 minus the sum of its first terms."""
    if count <= 0:
        return 1.0
    if expected <= 0:
        return 0.0
    terms = (math.exp(k * math.log(expected) - expected - math.lgamma(k + 1)) for k in range(count))
    return max(0.0, 1.0 - math.fsum(terms))
