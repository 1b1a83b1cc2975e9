"""Tests of intervals of rates: tables, consistency, and very few events."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

pytestmark = pytest.mark.one_python

try:  # only .venv has scipy; the marked tests run nowhere else
    from healthd.fleet.statistics import intervals
    from healthd.fleet.statistics.intervals import Spread
except ModuleNotFoundError as error:
    if error.name not in ("numpy", "scipy"):
        raise

COUNTS = st.integers(0, 5000)
EXPOSURES = st.floats(1e-3, 1e9)
LEVELS = st.floats(0.5, 0.999)


@pytest.mark.parametrize(
    ("count", "low", "high"),
    [(0, 0.0, 3.689), (1, 0.0253, 5.572), (5, 1.623, 11.668), (10, 4.795, 18.390), (100, 81.364, 121.627)],
)
def test_poisson_interval_matches_tables(count, low, high):
    assert intervals.poisson_interval(count, 1.0) == pytest.approx((low, high), abs=1e-3)


@given(COUNTS, EXPOSURES, LEVELS)
def test_poisson_interval_contains_rate_and_scales_with_exposure(count, exposure, level):
    low, high = intervals.poisson_interval(count, exposure, level)
    assert 0 <= low <= count / exposure < high
    assert intervals.poisson_interval(count, 2 * exposure, level) == pytest.approx((low / 2, high / 2))


@given(COUNTS, EXPOSURES, LEVELS, LEVELS)
def test_higher_level_is_never_narrower(count, exposure, level, other):
    narrow = intervals.poisson_interval(count, exposure, min(level, other))
    wide = intervals.poisson_interval(count, exposure, max(level, other))
    assert wide[0] <= narrow[0]
    assert narrow[1] <= wide[1]


def test_no_exposure_gives_no_interval():
    assert intervals.poisson_interval(3, 0.0) is None
    assert intervals.rate_ratio_interval(3, 0.0, 1, 1.0) is None
    assert intervals.rate_ratio_interval(0, 1.0, 0, 1.0) is None
    assert intervals.rate_estimate(Spread((), ())).interval is None


@given(COUNTS, EXPOSURES, COUNTS, EXPOSURES)
def test_inverse_ratio_has_inverse_interval(count, exposure, base_count, base_exposure):
    found = intervals.rate_ratio_interval(count, exposure, base_count, base_exposure)
    turned = intervals.rate_ratio_interval(base_count, base_exposure, count, exposure)
    if not count + base_count:
        assert found is None
        assert turned is None
        return
    low, high = found
    assert (turned[0], low) == pytest.approx(
        (0.0 if high is None else 1 / high, 0.0 if turned[1] is None else 1 / turned[1])
    )
    if count and base_count:
        assert low < (count / exposure) / (base_count / base_exposure) < high


@given(st.integers(0, 300), st.integers(0, 300), st.floats(0.01, 100))
def test_p_value_agrees_with_ratio_interval(count, base_count, exposure):
    found = intervals.rate_ratio_interval(count, exposure, base_count, 1.0)
    p_value = intervals.rate_ratio_p_value(count, exposure, base_count, 1.0)
    assert 0 <= p_value <= 1
    if found is not None and abs(p_value - 0.05) > 1e-9:
        low, high = found
        assert (low > 1 or (high is not None and high < 1)) == (p_value < 0.05)


def test_dispersion_widens_ratio_interval():
    plain = intervals.rate_ratio_interval(40, 1.0, 20, 1.0)
    dispersed = intervals.rate_ratio_interval(40, 1.0, 20, 1.0, dispersion=4.0)
    assert dispersed[0] < plain[0] < 2 < plain[1] < dispersed[1]
    assert intervals.rate_ratio_p_value(40, 1.0, 20, 1.0) < 0.05
    assert intervals.rate_ratio_p_value(40, 1.0, 20, 1.0, dispersion=4.0) > 0.05


def test_even_failures_have_poisson_interval():
    even = Spread([1, 0, 2, 1, 0, 1, 2, 1], [1.0] * 8)
    estimate = intervals.rate_estimate(even)
    assert (estimate.method, estimate.interval) == ("poisson", intervals.poisson_interval(8, 8.0))


def test_failures_of_few_nodes_widen_interval():
    uneven = Spread([12, 9, 0, 15] + [0] * 96, [1.0] * 100)
    estimate = intervals.rate_estimate(uneven)
    assert estimate.method == "bootstrap"
    assert estimate.dispersion == pytest.approx(12.1, rel=0.15)  # by hand: sum of squares / sum, minus 1 %
    exact = intervals.poisson_interval(36, 100.0)
    assert estimate.interval[0] < exact[0]
    assert estimate.interval[1] > exact[1]


def test_requeue_loop_without_node_is_one_incident():
    loop = Spread([0] * 50, [1.0] * 50, unplaced=[35, 1, 1])
    alone = Spread([0] * 50, [1.0] * 50, unplaced=[1] * 37)
    assert intervals.rate_estimate(loop).method == "bootstrap"
    assert intervals.rate_estimate(alone).method == "poisson"
    assert intervals.rate_estimate(loop).dispersion == pytest.approx(intervals.mean_incident_size([35, 1, 1]), rel=0.1)


@pytest.mark.parametrize("spread_of", ["all on one", "one", "none"])
def test_bootstrap_is_never_narrower_than_poisson_interval(spread_of):
    counts = {"all on one": [9] + [0] * 29, "one": [1] + [0] * 29, "none": [0] * 30}[spread_of]
    low, high = intervals.rate_estimate(Spread(counts, [1.0] * 30)).interval
    exact = intervals.poisson_interval(sum(counts), 30.0)
    assert low <= exact[0]
    assert high >= exact[1]


@given(
    st.lists(st.tuples(st.integers(0, 20), st.floats(0.1, 10)), min_size=1, max_size=20),
    st.lists(st.integers(1, 9), max_size=4),
)
def test_rate_estimate_contains_rate_and_is_deterministic(units, loose):
    spread = Spread([count for count, _ in units], [exposure for _, exposure in units], loose)
    estimate = intervals.rate_estimate(spread)
    low, high = estimate.interval
    assert low <= spread.count / spread.exposure < high
    assert intervals.rate_estimate(spread) == estimate
