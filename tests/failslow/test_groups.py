"""Tests of finding series that move together, for any layout of their samples."""

from __future__ import annotations

import random
from array import array

import pytest

from healthd.failslow.groups import MAX_GANGS, find_pools
from healthd.failslow.model import Series

SAMPLES = 200


def gang(seed: int, ranks: int) -> list[list[float]]:
    noise = random.Random(seed)
    common = [noise.gauss(1, 0.05) for _ in range(SAMPLES)]
    return [[one + noise.gauss(0, 0.005) for one in common] for _ in range(ranks)]


def series(values: list[list[float]], lacking: float = 0.0) -> list[Series]:
    noise = random.Random(1)
    made = []
    for nth, value in enumerate(values):
        kept = [at for at in range(SAMPLES) if noise.random() >= lacking]
        made.append(Series(str(nth), [value[at] for at in kept], array("q", kept)))
    return made


@pytest.mark.parametrize("lacking", [0.0, 0.1])
def test_two_gangs_of_one_file_are_told_apart_also_where_samples_are_lacking(lacking: float) -> None:
    ranks = [*gang(1, 5), *gang(2, 6)]
    found = find_pools(series(ranks, lacking))
    assert [one.members for one in found] == [tuple(range(5)), tuple(range(5, 11))]
    assert all(one.synchronous for one in found)


def test_a_gang_whose_ranks_have_no_time_in_common_is_compared_by_its_samples_order() -> None:
    clocks = [array("d", [at * (1 + rank / 1000) for at in range(SAMPLES)]) for rank in range(5)]
    (found,) = find_pools([Series(str(nth), one, clocks[nth]) for nth, one in enumerate(gang(1, 5))])
    assert found.synchronous


def test_of_more_rhythms_than_are_compared_all_that_move_alone_are_one_pool() -> None:
    noise = random.Random(2)
    alone = [[noise.gauss(1, 0.05) for _ in range(SAMPLES)] for _ in range(MAX_GANGS + 40)]
    found = find_pools(series([*gang(1, 4), *alone]))
    assert [(len(one.members), one.synchronous) for one in found] == [(4, True), (len(alone), False)]


def test_a_gang_is_one_also_where_samples_have_one_place() -> None:
    twice = array("d", [at - (at % 10 == 1) for at in range(SAMPLES)])
    (found,) = find_pools([Series(str(nth), one, twice) for nth, one in enumerate(gang(1, 6))])
    assert found.synchronous
