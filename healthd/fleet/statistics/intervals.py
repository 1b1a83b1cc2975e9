"""How sure a rate is: intervals of counts over an exposure (node-days, GPU-hours), and of the ratio of two.

Counts of independent failures have exact intervals. Failures of nodes are seldom independent: few nodes make many of
them, and a job that is requeued into the same fault makes a loop. There the exact interval is too narrow (of counts
whose variance is 5 times their mean it holds the true rate in 6 of 10 histories, where it says 95 of 100), and a
bootstrap by node says how much wider it has to be.
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
SEED = 13  # of all draws here: the same counts have the same interval
BOOTSTRAPS, TESTS = 2000, 999
DRAWN_AT_ONCE = 4_000_000  # numbers: 32 MB
# The test decides at 20 %, not at 5 %: to bootstrap independent counts costs 2 % of width, to take dependent ones for
# independent costs a third of the coverage.
DISPERSED_BELOW = 0.2
# Incidents of several failures, of which no node is known: from this size on, as failures see it, they are no chance.
LOOP_SIZE = 1.2


@dataclass(frozen=True, slots=True)
class Spread:
    """Whom the failures befell: what the bootstrap draws from.

    counts, exposures  of each unit (a node): its failures, and its part of the exposure; in one order
    loose              incidents of no known unit: the failures of each (a requeue loop is one incident)
    loose_exposure     exposure of no known unit
    """

    counts: Sequence[int]
    exposures: Sequence[float]
    loose: Sequence[int] = ()
    loose_exposure: float = 0.0

    @property
    def count(self) -> int:
        return sum(self.counts) + sum(self.loose)

    @property
    def exposure(self) -> float:
        return math.fsum(self.exposures) + self.loose_exposure


@dataclass(frozen=True, slots=True)
class Estimate:
    """interval    of the rate; None: there is no exposure
    method      "poisson" or "bootstrap"
    dispersion  variance of the count / its mean, at least 1, as the bootstrap has it; None: not looked for
    p_value     of failures that fall on the units by their exposures alone and are as uneven as these; None: no unit
    why         a sentence on the method
    """

    interval: Interval | None
    method: str
    dispersion: float | None
    p_value: float | None
    why: str


def poisson_interval(count: float, exposure: float, level: float = LEVEL) -> Interval | None:
    """The exact (central) interval of count / exposure, for independent events. None without exposure.

    With no event at all: from 0 to the rate at which none is seen with probability (1 - level) / 2. `count` need not be
    whole: it may be an effective count.

    Source: F. Garwood, "Fiducial limits for the Poisson distribution", Biometrika 28 (1936); as quantiles of chi2,
    Ulm, Am. J. Epidemiol. 131 (1990).
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
    """The exact interval of (count / exposure) / (base_count / base_exposure). Its end is None where base_count is 0:
    no ratio is too large. None where an exposure is 0, or nothing happened at all.

    dispersion: variance / mean of the counts (`Estimate.dispersion`, the larger of the two): both counts are divided by
    it, as quasi-likelihood does (Wedderburn, Biometrika 61, 1974).

    Source: given both together the one count is binomial, whose share has Clopper and Pearson's interval (Biometrika
    26, 1934); Przyborowski and Wilenski, Biometrika 31 (1940).
    """
    if not (exposure > 0 and base_exposure > 0 and count + base_count > 0):
        return None
    of, base = count / max(dispersion, 1.0), base_count / max(dispersion, 1.0)
    tail = (1 - level) / 2
    low = float(stats.beta.ppf(tail, of, base + 1)) if of > 0 else 0.0
    high = float(stats.beta.ppf(1 - tail, of + 1, base)) if base > 0 else 1.0
    scale = base_exposure / exposure
    return scale * low / (1 - low), scale * high / (1 - high) if high < 1 else None


def rate_ratio_p_value(
    count: float, exposure: float, base_count: float, base_exposure: float, dispersion: float = 1.0
) -> float:
    """Two-sided, of two equal rates: it is below 1 - level where `rate_ratio_interval` leaves 1 out. 1 where nothing
    can be told. Source: the same; the smaller tail, doubled."""
    if not (exposure > 0 and base_exposure > 0 and count + base_count > 0):
        return 1.0
    of, base = count / max(dispersion, 1.0), base_count / max(dispersion, 1.0)
    expected = exposure / (exposure + base_exposure)
    as_many = float(stats.beta.cdf(expected, of, base + 1)) if of > 0 else 1.0
    as_few = float(stats.beta.sf(expected, of + 1, base)) if base > 0 else 1.0
    return min(1.0, 2 * min(as_many, as_few))


def share_ratio_interval(
    found: float, of: float, base_found: float, base_of: float, effect: float = 1.0, level: float = LEVEL
) -> tuple[float, float | None] | None:
    """The interval of (found / of) / (base_found / base_of), two shares of which each is at most 1. Its end is None
    where the base may have next to nothing: no ratio is too large. None where nothing can be told: a side has no
    cases, or on both sides none was found, or all.

    Of what is rarer, the found or the others, the sum of both sides is taken as given; then a binomial says how it
    falls on the sides, as of two Poisson counts (`rate_ratio_interval`), and each way to fall has its two shares. The
    variance is that of cases that cannot be found twice: (N - k) / (N - 1) times the binomial's, of k in N; the
    counts are divided by it. `effect`: the design effect (Kish, "Survey Sampling", 1965), by which cases that hang
    together count less, at least 1.

    Source: the hypergeometric variance, R. A. Fisher, J. R. Statist. Soc. 98 (1935), as a quasi-likelihood (Wedderburn,
    Biometrika 61, 1974) of the interval of Przyborowski and Wilenski, Biometrika 31 (1940). That it stands in for
    Fisher's own tail, which non-integer counts do not have, is ours.
    """
    if not _differ(found, of, base_found, base_of):
        return None
    rarer = found + base_found <= (of + base_of) / 2
    count, base_count = (found, base_found) if rarer else (max(0.0, of - found), max(0.0, base_of - base_found))
    variance = _variance(count + base_count, of + base_of, effect)
    tail, both = (1 - level) / 2, count + base_count
    low = float(stats.beta.ppf(tail, count / variance, base_count / variance + 1)) if count > 0 else 0.0
    high = float(stats.beta.ppf(1 - tail, count / variance + 1, base_count / variance)) if base_count > 0 else 1.0
    ends = []
    for part in (low, high):
        shares = [min(1.0, part * both / of), min(1.0, (1 - part) * both / base_of)]
        if not rarer:
            shares = [1 - one for one in shares]
        ends.append(shares[0] / shares[1] if shares[1] > 0 else None)
    if not rarer:
        ends.reverse()
    return ends[0] or 0.0, ends[1]


def share_ratio_p_value(found: float, of: float, base_found: float, base_of: float, effect: float = 1.0) -> float:
    """Two-sided, of two equal shares: it is below 1 - level where `share_ratio_interval` leaves 1 out. 1 where nothing
    can be told. Source: the same; the smaller tail, doubled."""
    if not _differ(found, of, base_found, base_of):
        return 1.0
    rarer = found + base_found <= (of + base_of) / 2
    count, base_count = (found, base_found) if rarer else (max(0.0, of - found), max(0.0, base_of - base_found))
    variance = _variance(count + base_count, of + base_of, effect)
    return rate_ratio_p_value(count / variance, of, base_count / variance, base_of)


def _differ(found: float, of: float, base_found: float, base_of: float) -> bool:
    """Whether two shares can differ at all."""
    return of > 0 and base_of > 0 and 0 < found + base_found < of + base_of


def _variance(count: float, of: float, effect: float) -> float:
    """Of how a sum of so many in `of` cases falls on two sides, as a part of the binomial one. Of fewer than two
    independent cases nothing is taken away."""
    effect = max(effect, 1.0)
    k, cases = count / effect, of / effect
    return effect * min(1.0, (cases - k) / (cases - 1)) if cases > 1 else effect


def bootstrap_rate(spread: Spread, level: float = LEVEL, seed: int = SEED) -> tuple[Interval | None, float]:
    """The interval of count / exposure with the spread that a bootstrap by unit finds, and the dispersion of the count.

    Units are drawn with replacement, each with all its failures and its exposure; an incident of no known unit comes a
    Poisson number of times. What is taken of it is the variance: an interval of the draws' own quantiles holds the true
    rate in only 79 to 93 of 100 such histories. The count counts as count / dispersion independent ones, in the exact
    interval; the dispersion was itself estimated, of as many units as failed, so that Student's quantile stands in for
    the normal one. If all was one unit's, that is nearly no information, and the interval says so.

    Source: Efron and Tibshirani, "An Introduction to the Bootstrap" (1993), chapter 8, for clusters; the effective
    count is that of Fay and Feuer, Statistics in Medicine 16 (1997); the widening for an estimated dispersion is ours.
    """
    count, exposure = spread.count, spread.exposure
    if not count or not exposure > 0:
        return poisson_interval(count, exposure, level), 1.0
    rates = _resampled(spread, seed)
    dispersion = max(1.0, float(np.var(rates, ddof=1)) * exposure**2 / count)
    failed = sum(1 for one in spread.counts if one) + len(spread.loose)
    quantile = (1 + level) / 2
    widened = float(stats.t.ppf(quantile, failed) / stats.norm.ppf(quantile)) ** 2
    effective = dispersion * widened
    return poisson_interval(count / effective, exposure / effective, level), dispersion


def rate_estimate(spread: Spread, level: float = LEVEL, seed: int = SEED) -> Estimate:
    """The interval of a rate: exact if the failures are as even as independent ones, else bootstrapped."""
    count, exposure = spread.count, spread.exposure
    if count < 2 or not exposure > 0:
        few = "no failure" if not count else "one failure"
        return Estimate(
            poisson_interval(count, exposure, level),
            *("poisson", None, None),
            f"exact Poisson: of {few} no dependence can be told",
        )
    p_value = dispersion_p_value(spread.counts, spread.exposures, seed)
    loops = size_as_seen(spread.loose)
    uneven = p_value is not None and p_value < DISPERSED_BELOW
    if not uneven and loops < LOOP_SIZE:
        even = (
            "of no failure the node is known" if p_value is None else f"nodes are as even as by chance, p {p_value:.2g}"
        )
        return Estimate(poisson_interval(count, exposure, level), "poisson", None, p_value, f"exact Poisson: {even}")
    interval, dispersion = bootstrap_rate(spread, level, seed)
    which = f"a few nodes have many, p {p_value:.2g}" if uneven else "failures came in loops"
    why = f"bootstrap by node: {which}; the variance is {dispersion:.2g} times the mean"
    return Estimate(interval, "bootstrap", dispersion, p_value, why)


def dispersion_p_value(counts: Sequence[int], exposures: Sequence[float], seed: int = SEED) -> float | None:
    """How likely independent failures, which fall on the units by their exposures, are as uneven as these counts: in
    pairs of failures on one unit. An exact test by draws, given the sum. None if there is nothing to test.

    Source: Potthoff and Whittinghill, Biometrika 53 (1966), the test of homogeneity against a Gamma mixture; by draws
    as Barnard, J. R. Statist. Soc. B 25 (1963), for the chi2 form is wrong where most units have none.
    """
    have = np.asarray(counts, dtype=np.int64)
    shares = np.asarray(exposures, dtype=np.float64)
    count, whole = int(have.sum()), float(shares.sum())
    if count < 2 or not whole > 0 or np.any((shares <= 0) & (have > 0)):
        return None
    units = len(have)
    pairs = int((have * (have - 1)).sum())
    until = np.cumsum(shares) / whole
    random = np.random.default_rng(seed)
    as_uneven = 1
    for size in _pieces(TESTS, max(units, count)):
        fell = np.minimum(np.searchsorted(until, random.random((size, count)), side="right"), units - 1)
        drawn = np.bincount((fell + units * np.arange(size)[:, None]).ravel(), minlength=size * units)
        drawn = drawn.reshape(size, units)
        as_uneven += int(((drawn * (drawn - 1)).sum(axis=1) >= pairs).sum())
    return as_uneven / (TESTS + 1)


def size_as_seen(incidents: Sequence[int]) -> float:
    """How many failures the incident of a failure has, on average over failures: 1 if each is alone, or there is none.
    It is variance / mean of a sum of independent incidents (compound Poisson)."""
    failures = sum(incidents)
    return sum(size * size for size in incidents) / failures if failures else 1.0


def _resampled(spread: Spread, seed: int) -> NDArray[np.float64]:
    """The rate of each draw; a draw without exposure is none."""
    random = np.random.default_rng(seed)
    counts = np.asarray(spread.counts, dtype=np.float64)
    exposures = np.asarray(spread.exposures, dtype=np.float64)
    loose = np.asarray(spread.loose, dtype=np.float64)
    units = len(counts)
    rates = []
    for size in _pieces(BOOTSTRAPS, units + len(loose)):
        failures, exposure = np.zeros(size), np.full(size, spread.loose_exposure)
        if units:
            drawn = random.integers(0, units, (size, units))
            failures += counts[drawn].sum(axis=1)
            exposure += exposures[drawn].sum(axis=1)
        if len(loose):
            failures += random.poisson(1.0, (size, len(loose))).astype(np.float64) @ loose
        rates.append(failures[exposure > 0] / exposure[exposure > 0])
    return np.concatenate(rates)


def _pieces(draws: int, units: int) -> list[int]:
    """So many draws in pieces of which each fits."""
    each = max(1, min(draws, DRAWN_AT_ONCE // max(units, 1)))
    return [each] * (draws // each) + ([draws % each] if draws % each else [])
