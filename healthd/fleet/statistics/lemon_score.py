"""Computes how much more often a node fails than the rest of the fleet. All functions are pure.

A node that fails twice in four weeks may be unlucky: among 2,000 nodes that fail once in half a year, this happens to
twenty. Each node's rate is therefore an empirical-Bayes posterior (Robbins 1956). Failures are Poisson, and the
exposure is the time in service.

The prior is the fleet's own distribution of rates. It may have any shape (the non-parametric mixture of Laird, JASA
1978, by EM), because a single gamma distribution cannot express that most nodes are alike and a few are very different.
If a fleet has a few hundred nodes and a few failures each month, its data shows little of this spread. Data from other
fleets is therefore added, as PRIOR_NODES nodes, of which 24 in 2,000 are lemons (Kokolis, Kuchnik et al., HPCA 2025,
arXiv 2410.21680). Nodes with equal time in service are ranked by their failures, whatever the prior is.

Failures in the window count fully. Earlier failures count with the weight HISTORY_WEIGHT * exp(-age / MEMORY_DAYS) (a
power prior, Ibrahim and Chen, Statistical Science 2000), because a node that has been failing for a year is more likely
a lemon. HISTORY_WEIGHT and MEMORY_DAYS were chosen on LANL's failures before 2004 (LA-UR-05-7318, systems 8, 18, 19 and
20), where all values from 0.5 to 1 and from 270 to 730 days work about equally well.
"""

from __future__ import annotations

import bisect
import math
import statistics
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from healthd.fleet.statistics.weeks import poisson_tail

DAY = 86400
WINDOW_DAYS = 28  # "28-day snapshot", Kokolis, Kuchnik et al. (HPCA 2025, arXiv 2410.21680)
# If a failure follows another within this time, it is the same unrepaired fault, or a second record of the same fault.
GAP_SECONDS, GAP_AFTER_END_SECONDS = DAY // 2, 3600
HISTORY_WEIGHT, MEMORY_DAYS = 0.5, 365.0
# Possible rates of a node relative to the fleet's mean, in steps of 12 %.
RATE_FACTORS = tuple(0.1 * 1.12**step for step in range(58))
# In other fleets, most nodes fail 0.5 to 2 times as often as the mean. 24 in 2,000 nodes (HPCA 2025) fail many times as
# often.
PRIOR_NODES, USUAL_RATES, LEMON_RATES, PRIOR_LEMON_SHARE = 200.0, (0.5, 2.0), (3.0, 30.0), 24 / 2000
MAX_EVENTS = 1 << 20  # per node
# limits for EM: the maximum number of rounds, and the change in the shares at which it stops
EM_ROUNDS, EM_TOLERANCE = 500, 1e-7

Spell = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Observation:
    """An event seen on a node between start_time and end_time (epoch seconds; equal for a momentary event).

    `weight` is the probability that it is the node's own failure, 0 to 1.
    """

    start_time: int
    end_time: int
    weight: float


@dataclass(frozen=True, slots=True)
class Incident:
    """One event on one node: the observations that `merge_incidents` joined."""

    start_time: int
    end_time: int
    weight: float


@dataclass(frozen=True, slots=True)
class Record:
    """A node's incidents, and the periods in which it was in service (epoch seconds)."""

    incidents: Sequence[Incident]
    in_service: Sequence[Spell]


@dataclass(frozen=True, slots=True)
class DiscountedCounts:
    """A node's discounted history.

    Attributes:
        failures: sum of the discounted weights.
        days: days in service, discounted in the same way.
    """

    failures: float
    days: float


@dataclass(frozen=True, slots=True)
class FleetPrior:
    """The fleet's prior.

    Attributes:
        rate: mean failures per node-day.
        shares: for each of RATE_FACTORS, the share of nodes whose rate is that multiple of the mean.
    """

    rate: float
    shares: tuple[float, ...]


def merge_incidents(observations: Iterable[Observation]) -> list[Incident]:
    """Join observations of the same event into incidents.

    Two observations are joined if the later one begins at most GAP_SECONDS after the start of the earlier one, or at
    most GAP_AFTER_END_SECONDS after its end. The incident's weight is the largest of the joined weights.
    """
    found: list[Incident] = []
    until = 0
    for observation in sorted(
        observations, key=lambda observation: (observation.start_time, observation.end_time, observation.weight)
    ):
        end = max(observation.start_time, observation.end_time)
        if found and observation.start_time <= until:
            last = found[-1]
            found[-1] = Incident(last.start_time, max(last.end_time, end), max(last.weight, observation.weight))
        else:
            found.append(Incident(observation.start_time, end, observation.weight))
        until = max(observation.start_time + GAP_SECONDS, found[-1].end_time + GAP_AFTER_END_SECONDS)
    return found


def discounted_counts(record: Record, window: Spell) -> DiscountedCounts:
    """Return a node's discounted history at the end of the window [from, to). Events after the window are ignored."""
    begin, end = window
    failures = [
        incident.weight * _discount(begin - incident.start_time)
        for incident in record.incidents
        if incident.start_time < end
    ]
    days = [_discounted_days(start, min(until, end), begin) for start, until in record.in_service if start < end]
    return DiscountedCounts(math.fsum(sorted(failures)), math.fsum(sorted(days)))


def _discount(seconds_before: float) -> float:
    return 1.0 if seconds_before <= 0 else HISTORY_WEIGHT * math.exp(-seconds_before / DAY / MEMORY_DAYS)


def _discounted_days(start: int, until: int, begin: int) -> float:
    """Return the integral of _discount over [start, until)."""
    within = max(until - max(start, begin), 0) / DAY
    oldest, newest = (begin - start) / DAY, max(begin - until, 0) / DAY
    if oldest <= newest:
        return within
    return within + HISTORY_WEIGHT * MEMORY_DAYS * (math.exp(-newest / MEMORY_DAYS) - math.exp(-oldest / MEMORY_DAYS))


def fit_prior(nodes: Iterable[DiscountedCounts]) -> FleetPrior | None:
    """Fit the prior to this fleet and other fleets: the mean rate, and the most likely share for each of RATE_FACTORS.

    Return None if no node failed or none was in service.
    """
    counts_and_days = sorted((item.failures, item.days) for item in nodes if item.days > 0)
    failures, days = math.fsum(count for count, _ in counts_and_days), math.fsum(time for _, time in counts_and_days)
    if not failures or not days:
        return None
    rate = failures / days
    distinct = Counter(counts_and_days)  # most GPUs have no failure and the same days as others
    likely = _likelihoods([DiscountedCounts(*item) for item in distinct], rate)
    times = np.array(list(distinct.values()))[:, None]
    prior_counts = PRIOR_NODES * (
        (1 - PRIOR_LEMON_SHARE) * _uniform_shares(USUAL_RATES) + PRIOR_LEMON_SHARE * _uniform_shares(LEMON_RATES)
    )
    shares = np.full(len(RATE_FACTORS), 1 / len(RATE_FACTORS))  # all positive, because EM never changes a 0
    for _ in range(EM_ROUNDS):
        posteriors = likely * shares
        sums = (times * (posteriors / posteriors.sum(axis=1, keepdims=True))).sum(axis=0) + prior_counts
        before, shares = shares, sums / sums.sum()
        if np.abs(shares - before).max() < EM_TOLERANCE:
            break
    return FleetPrior(rate, tuple(float(share) for share in shares))


def _uniform_shares(bounds: tuple[float, float]) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    """Return equal shares for the factors between the bounds, and 0 for all others."""
    low, high = bounds
    selected = (np.array(RATE_FACTORS) > low) & (np.array(RATE_FACTORS) <= high)
    return np.asarray(selected / selected.sum())


def score(node: DiscountedCounts, fleet: FleetPrior) -> float:
    """Return the node's expected rate relative to the fleet's mean. It is the mean of the posterior."""
    return float(_posterior(node, fleet) @ np.array(RATE_FACTORS))


def probability(node: DiscountedCounts, fleet: FleetPrior, factor: float) -> float:
    """Return the posterior probability that the node's rate is more than `factor` times the fleet's mean."""
    return float(_posterior(node, fleet)[np.array(RATE_FACTORS) > factor].sum())


def share_named(
    nodes: Sequence[DiscountedCounts], fleet: FleetPrior, window_days: float, times: float, min_probability: float
) -> float:
    """Return the expected share of this fleet's lemons that are named, 0 to 1.

    Assumptions: a lemon is in service for as long as the median node, its rate is one of the lemon rates, and its
    events are Poisson. It is named if it has an event in the window and if the probability that its rate exceeds
    `times` is at least `min_probability`.
    """
    days = statistics.median(node.days for node in nodes)
    within = min(window_days, days)
    needed = _events_needed(days, fleet, times, min_probability)
    lemons = [(part, rate * fleet.rate) for part, rate in zip(_uniform_shares(LEMON_RATES), RATE_FACTORS, strict=True)]
    return math.fsum(
        float(part)
        * (poisson_tail(needed, rate * days) - math.exp(-rate * within) * poisson_tail(needed, rate * (days - within)))
        for part, rate in lemons
    )


def _events_needed(days: float, fleet: FleetPrior, times: float, min_probability: float) -> int:
    """Return the smallest number of events with which a node's rate exceeds `times` with at least `min_probability`."""

    def enough(events: int) -> bool:
        return probability(DiscountedCounts(float(events), days), fleet, times) >= min_probability

    upper = 1
    while not enough(upper) and upper < MAX_EVENTS:
        upper *= 2
    return bisect.bisect_left(range(upper), True, key=enough)


def _posterior(node: DiscountedCounts, fleet: FleetPrior) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    weights = _likelihoods([node], fleet.rate)[0] * np.array(fleet.shares)
    return np.asarray(weights / weights.sum())


def _likelihoods(nodes: Sequence[DiscountedCounts], rate: float) -> np.ndarray[tuple[int, int], np.dtype[np.float64]]:
    """Return an array [node, rate factor] with the Poisson likelihoods of the counts, relative to the largest."""
    counts = np.array([node.failures for node in nodes])[:, None]
    means = np.array([node.days for node in nodes])[:, None] * rate * np.array(RATE_FACTORS)[None, :]
    logs = counts * np.log(np.array(RATE_FACTORS))[None, :] - means
    return np.asarray(np.exp(logs - logs.max(axis=1, keepdims=True)))
