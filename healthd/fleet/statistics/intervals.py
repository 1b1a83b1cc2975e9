"""Confidence intervals for rates (events per node-day or GPU-hour), and for ratios of rates.

Counts of independent failures have exact intervals. But node failures are seldom independent: a few nodes cause many
failures, and a job may be requeued into the same fault over and over. The exact interval is then too narrow. For
example, if the variance of the counts is 5 times their mean, the interval contains the true rate in only 60 of 100
histories, instead of 95. A bootstrap over nodes determines how much wider the interval must be.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy import stats

Interval = tuple[float, float]

LEVEL = 0.95
SEED = 13  # seed for all draws in this module, so that equal counts have equal intervals
BOOTSTRAPS, TESTS = 2000, 999
MAX_DRAWN_NUMBERS = 4_000_000  # numbers in one batch of draws (32 MB)
# The test for dependence uses a level of 20 %, not 5 %. Bootstrapping independent counts makes the interval only 2 %
# wider, but treating dependent counts as independent loses a third of the coverage.
DISPERSION_P_VALUE = 0.2
# Incidents without a known node: if their mean size, weighted by failures, is at least this, it is not due to chance.
MIN_LOOP_SIZE = 1.2


@dataclass(frozen=True, slots=True)
class Spread:
    """How the failures are distributed over units. The bootstrap draws from this.

    Attributes:
        counts, exposures: failures and exposure of each unit (a node), in the same order.
        unplaced: for each incident whose unit is unknown, its number of failures (a requeue loop is one incident).
        unplaced_exposure: exposure whose unit is unknown.
    """

    counts: Sequence[int]
    exposures: Sequence[float]
    unplaced: Sequence[int] = ()
    unplaced_exposure: float = 0.0

    @property
    def count(self) -> int:
        return sum(self.counts) + sum(self.unplaced)

    @property
    def exposure(self) -> float:
        return math.fsum(self.exposures) + self.unplaced_exposure


@dataclass(frozen=True, slots=True)
class Estimate:
    """The interval for a rate, and how it was computed.

    Attributes:
        interval: interval for the rate, None if there is no exposure.
        method: "poisson" or "bootstrap".
        dispersion: variance of the count divided by its mean, from the bootstrap, at least 1; None if not computed.
        p_value: probability that independent failures would be at least as uneven over the units; None without units.
        explanation: a sentence with the reason for the method.
    """

    interval: Interval | None
    method: str
    dispersion: float | None
    p_value: float | None
    explanation: str


def poisson_interval(count: float, exposure: float, level: float = LEVEL) -> Interval | None:
    """Return the exact (central) interval for count / exposure of independent events, or None if the exposure is 0.

    If the count is 0, the interval extends from 0 to the rate at which the probability of no event is (1 - level) / 2.
    `count` may be fractional (an effective count).

    Source: F. Garwood, "Fiducial limits for the Poisson distribution", Biometrika 28 (1936); as quantiles of chi2, Ulm,
    Am. J. Epidemiol. 131 (1990).
    """
    if not exposure > 0:
        return None
    tail = (1 - level) / 2
    low = float(stats.chi2.ppf(tail, 2 * count)) / 2 if count > 0 else 0.0
    high = float(stats.chi2.ppf(1 - tail, 2 * count + 2)) / 2
    return low / exposure, high / exposure


def rate_ratio_interval(
    count: float,
    exposure: float,
    base_count: float,
    base_exposure: float,
    level: float = LEVEL,
    dispersion: float = 1.0,
) -> tuple[float, float | None] | None:
    """Return the exact interval for (count / exposure) / (base_count / base_exposure).

    The interval's upper end is None (unbounded) if base_count is 0. Return None if an exposure is 0 or both counts are
    0.

    Source: given the sum of both counts, each count is binomial (Przyborowski and Wilenski, Biometrika 31, 1940). Its
    share of the sum has Clopper and Pearson's interval (Biometrika 26, 1934).

    Args:
        dispersion: variance / mean of the counts (the larger `Estimate.dispersion` of the two). Both counts are divided
            by the dispersion, as in quasi-likelihood (Wedderburn, Biometrika 61, 1974).
    """
    if not (exposure > 0 and base_exposure > 0 and count + base_count > 0):
        return None
    scaled_count, base = count / max(dispersion, 1.0), base_count / max(dispersion, 1.0)
    tail = (1 - level) / 2
    low = float(stats.beta.ppf(tail, scaled_count, base + 1)) if scaled_count > 0 else 0.0
    high = float(stats.beta.ppf(1 - tail, scaled_count + 1, base)) if base > 0 else 1.0
    scale = base_exposure / exposure
    return scale * low / (1 - low), scale * high / (1 - high) if high < 1 else None


def rate_ratio_p_value(
    count: float, exposure: float, base_count: float, base_exposure: float, dispersion: float = 1.0
) -> float:
    """Return the two-sided p-value of the hypothesis that both rates are equal, or 1 if this cannot be tested.

    The p-value is below 1 - level if `rate_ratio_interval` excludes 1. It is twice the smaller tail of the same
    distribution as there.
    """
    if not (exposure > 0 and base_exposure > 0 and count + base_count > 0):
        return 1.0
    scaled_count, base = count / max(dispersion, 1.0), base_count / max(dispersion, 1.0)
    expected = exposure / (exposure + base_exposure)
    upper_tail = float(stats.beta.cdf(expected, scaled_count, base + 1)) if scaled_count > 0 else 1.0
    lower_tail = float(stats.beta.sf(expected, scaled_count + 1, base)) if base > 0 else 1.0
    return min(1.0, 2 * min(upper_tail, lower_tail))


def share_ratio_interval(
    found: float, total: float, base_found: float, base_total: float, effect: float = 1.0, level: float = LEVEL
) -> tuple[float, float | None] | None:
    """Return the interval for the ratio of two shares, (found / of) / (base_found / base_of).

    The interval's upper end is None (unbounded) if the base share may be almost 0. Return None if there is no interval:
    a side has no cases, or nothing was found on either side, or all cases were found on both sides.

    The method counts the rarer outcome, "found" or "not found", and takes its sum over both sides as given. A binomial
    distribution then describes how this sum is split between the sides, as for two Poisson counts
    (`rate_ratio_interval`). Each split gives two shares. The counts are divided by the relative variance of sampling
    without replacement, which is (N - k) / (N - 1) times the binomial variance for k in N.

    Sources: the hypergeometric variance is from R. A. Fisher, J. R. Statist. Soc. 98 (1935); the quasi-likelihood from
    Wedderburn, Biometrika 61 (1974); the interval from Przyborowski and Wilenski, Biometrika 31 (1940). Fisher's own
    tail is not defined for fractional counts. Replacing it in this way is healthd's own method.

    Args:
        effect: the design effect (Kish, "Survey Sampling", 1965) for cases that depend on each other, at least 1.
    """
    if not _can_differ(found, total, base_found, base_total):
        return None
    rarer = found + base_found <= (total + base_total) / 2
    count, base_count = (found, base_found) if rarer else (max(0.0, total - found), max(0.0, base_total - base_found))
    variance = _relative_variance(count + base_count, total + base_total, effect)
    tail, found_total = (1 - level) / 2, count + base_count
    low = float(stats.beta.ppf(tail, count / variance, base_count / variance + 1)) if count > 0 else 0.0
    high = float(stats.beta.ppf(1 - tail, count / variance + 1, base_count / variance)) if base_count > 0 else 1.0
    ends = []
    for fraction in (low, high):
        shares = [min(1.0, fraction * found_total / total), min(1.0, (1 - fraction) * found_total / base_total)]
        if not rarer:
            shares = [1 - value for value in shares]
        ends.append(shares[0] / shares[1] if shares[1] > 0 else None)
    if not rarer:
        ends.reverse()
    return ends[0] or 0.0, ends[1]


def share_ratio_p_value(found: float, total: float, base_found: float, base_total: float, effect: float = 1.0) -> float:
    """Return the two-sided p-value of the hypothesis that both shares are equal, or 1 if this cannot be tested.

    The p-value is below 1 - level if `share_ratio_interval` excludes 1. It is twice the smaller tail of the same
    distribution as there.
    """
    if not _can_differ(found, total, base_found, base_total):
        return 1.0
    rarer = found + base_found <= (total + base_total) / 2
    count, base_count = (found, base_found) if rarer else (max(0.0, total - found), max(0.0, base_total - base_found))
    variance = _relative_variance(count + base_count, total + base_total, effect)
    return rate_ratio_p_value(count / variance, total, base_count / variance, base_total)


def _can_differ(found: float, total: float, base_found: float, base_total: float) -> bool:
    """Return True if two shares can differ at all."""
    return total > 0 and base_total > 0 and 0 < found + base_found < total + base_total


def _relative_variance(count: float, total: float, effect: float) -> float:
    """Return the variance of the split of `count` cases between two sides, relative to the binomial variance.

    With fewer than two independent cases in `total`, the variance is not reduced.
    """
    effect = max(effect, 1.0)
    effective_count, effective_total = count / effect, total / effect
    return (
        effect * min(1.0, (effective_total - effective_count) / (effective_total - 1))
        if effective_total > 1
        else effect
    )


def bootstrap_rate(spread: Spread, level: float = LEVEL, seed: int = SEED) -> tuple[Interval | None, float]:
    """Return the interval for count / exposure, widened by a bootstrap over units, and the count's dispersion.

    Units are drawn with replacement, each with all its failures and its exposure. In a draw, each incident whose unit
    is unknown occurs a Poisson number of times. Only the variance of the draws is used: an interval from their
    quantiles would contain the true rate in only 79 to 93 of 100 such histories. The exact interval is then computed
    for count / dispersion independent events. The dispersion is itself only estimated, from the units that failed, so
    Student's quantile replaces the normal one. If all failures are on one unit, there is almost no information, and the
    interval is very wide.

    Source: Efron and Tibshirani, "An Introduction to the Bootstrap" (1993), chapter 8, for clusters; the effective
    count is that of Fay and Feuer, Statistics in Medicine 16 (1997); the widening for an estimated dispersion is
    healthd's own.
    """
    count, exposure = spread.count, spread.exposure
    if not count or not exposure > 0:
        return poisson_interval(count, exposure, level), 1.0
    rates = _bootstrapped_rates(spread, seed)
    dispersion = max(1.0, float(np.var(rates, ddof=1)) * exposure**2 / count)
    failed = sum(1 for unit_count in spread.counts if unit_count) + len(spread.unplaced)
    quantile = (1 + level) / 2
    widened = float(stats.t.ppf(quantile, failed) / stats.norm.ppf(quantile)) ** 2
    effective = dispersion * widened
    return poisson_interval(count / effective, exposure / effective, level), dispersion


def rate_estimate(spread: Spread, level: float = LEVEL, seed: int = SEED) -> Estimate:
    """Return the interval for a rate.

    The interval is exact if the failures are spread as evenly as independent failures. Otherwise, it is bootstrapped.
    """
    count, exposure = spread.count, spread.exposure
    if count < 2 or not exposure > 0:
        count_text = "no failure" if not count else "one failure"
        return Estimate(
            poisson_interval(count, exposure, level),
            *("poisson", None, None),
            f"exact Poisson interval: with {count_text}, dependence cannot be tested",
        )
    p_value = dispersion_p_value(spread.counts, spread.exposures, seed)
    loops = mean_incident_size(spread.unplaced)
    uneven = p_value is not None and p_value < DISPERSION_P_VALUE
    if not uneven and loops < MIN_LOOP_SIZE:
        evenness = (
            "no failure has a known node"
            if p_value is None
            else f"failures are spread over the nodes as expected by chance, p {p_value:.2g}"
        )
        return Estimate(
            poisson_interval(count, exposure, level), "poisson", None, p_value, f"exact Poisson: {evenness}"
        )
    interval, dispersion = bootstrap_rate(spread, level, seed)
    reason = f"a few nodes have many failures, p {p_value:.2g}" if uneven else "failures came in loops"
    explanation = f"bootstrap by node: {reason}; the variance is {dispersion:.2g} times the mean"
    return Estimate(interval, "bootstrap", dispersion, p_value, explanation)


def dispersion_p_value(counts: Sequence[int], exposures: Sequence[float], seed: int = SEED) -> float | None:
    """Return the probability that independent failures would be at least as uneven over the units as these counts.

    Return None if this cannot be tested. Independent failures fall on units in proportion to the units' exposures. The
    unevenness is the number of pairs of failures on the same unit. The test is exact (by random draws, given the sum).

    Source: Potthoff and Whittinghill, Biometrika 53 (1966), the test of homogeneity against a Gamma mixture. The draws
    are from Barnard, J. R. Statist. Soc. B 25 (1963), because the chi2 form is wrong if most units have no failure.
    """
    observed = np.asarray(counts, dtype=np.int64)
    shares = np.asarray(exposures, dtype=np.float64)
    count, total_exposure = int(observed.sum()), float(shares.sum())
    if count < 2 or not total_exposure > 0 or np.any((shares <= 0) & (observed > 0)):
        return None
    units = len(observed)
    pairs = int((observed * (observed - 1)).sum())
    boundaries = np.cumsum(shares) / total_exposure
    random = np.random.default_rng(seed)
    exceeding = 1
    for size in _batches(TESTS, max(units, count)):
        drawn_units = np.minimum(np.searchsorted(boundaries, random.random((size, count)), side="right"), units - 1)
        drawn = np.bincount((drawn_units + units * np.arange(size)[:, None]).ravel(), minlength=size * units)
        drawn = drawn.reshape(size, units)
        exceeding += int(((drawn * (drawn - 1)).sum(axis=1) >= pairs).sum())
    return exceeding / (TESTS + 1)


def mean_incident_size(incidents: Sequence[int]) -> float:
    """Return the mean size of incidents, weighted by failures.

    The result is 1 if each incident has one failure, or if there are none. For independent incidents, it equals
    variance / mean of the number of failures (compound Poisson).
    """
    failures = sum(incidents)
    return sum(size * size for size in incidents) / failures if failures else 1.0


def _bootstrapped_rates(spread: Spread, seed: int) -> NDArray[np.float64]:
    """Return the rate in each draw. Draws without exposure are skipped."""
    random = np.random.default_rng(seed)
    counts = np.asarray(spread.counts, dtype=np.float64)
    exposures = np.asarray(spread.exposures, dtype=np.float64)
    unplaced = np.asarray(spread.unplaced, dtype=np.float64)
    units = len(counts)
    rates = []
    for size in _batches(BOOTSTRAPS, units + len(unplaced)):
        failures, exposure = np.zeros(size), np.full(size, spread.unplaced_exposure)
        if units:
            drawn = random.integers(0, units, (size, units))
            failures += counts[drawn].sum(axis=1)
            exposure += exposures[drawn].sum(axis=1)
        if len(unplaced):
            failures += random.poisson(1.0, (size, len(unplaced))).astype(np.float64) @ unplaced
        rates.append(failures[exposure > 0] / exposure[exposure > 0])
    return np.concatenate(rates)


def _batches(draws: int, units: int) -> list[int]:
    """Split the draws into batches that fit in memory, and return the batch sizes."""
    batch = max(1, min(draws, MAX_DRAWN_NUMBERS // max(units, 1)))
    return [batch] * (draws // batch) + ([draws % batch] if draws % batch else [])
