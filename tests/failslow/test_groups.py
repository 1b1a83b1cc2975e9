"""Tests of finding series that move together, for any layout of their samples."""

from __future__ import annotations

import random
from array import array

import pytest

from healthd.failslow.groups import MAX_GANGS, find_pools
from healthd.failslow.model import Series

SAMPLES = 200


def correlated_ranks(seed: int, ranks: int) -> list[list[float]]:
    noise = random.Random(seed)
    common = [noise.gauss(1, 0.05) for _ in range(SAMPLES)]
    return [[value + noise.gauss(0, 0.005) for value in common] for _ in range(ranks)]


def make_series(values: list[list[float]], missing_share: float = 0.0) -> list[Series]:
    noise = random.Random(1)
    made = []
    for nth, value in enumerate(values):
        present = [at for at in range(SAMPLES) if noise.random() >= missing_share]
        made.append(Series(str(nth), [value[at] for at in present], array("q", present)))
    return made


@pytest.mark.parametrize("missing_share", [0.0, 0.1])
def test_two_gangs_are_separated_also_with_missing_samples(missing_share: float) -> None:
    ranks = [*correlated_ranks(1, 5), *correlated_ranks(2, 6)]
    found = find_pools(make_series(ranks, missing_share))
    assert [pool.members for pool in found] == [tuple(range(5)), tuple(range(5, 11))]
    assert all(pool.synchronous for pool in found)


def test_gang_without_common_times_is_compared_by_order() -> None:
    clocks = [array("d", [at * (1 + rank / 1000) for at in range(SAMPLES)]) for rank in range(5)]
    (found,) = find_pools([Series(str(nth), values, clocks[nth]) for nth, values in enumerate(correlated_ranks(1, 5))])
    assert found.synchronous


def test_independent_series_beyond_limit_are_one_pool() -> None:
    noise = random.Random(2)
    alone = [[noise.gauss(1, 0.05) for _ in range(SAMPLES)] for _ in range(MAX_GANGS + 40)]
    found = find_pools(make_series([*correlated_ranks(1, 4), *alone]))
    assert [(len(pool.members), pool.synchronous) for pool in found] == [(4, True), (len(alone), False)]


def test_gang_is_found_with_repeated_index() -> None:
    twice = array("d", [at - (at % 10 == 1) for at in range(SAMPLES)])
    (found,) = find_pools([Series(str(nth), values, twice) for nth, values in enumerate(correlated_ranks(1, 6))])
    assert found.synchronous
