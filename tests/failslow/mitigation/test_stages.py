"""Tests of S3: which ranks exchange positions, against brute force."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from itertools import combinations
from math import ceil

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from healthd.failslow.mitigation.stages import MAX_LINKS, MAX_RANKS, InvalidTopology, RankPosition, Topology, rearrange

pytestmark = pytest.mark.one_python


def job(stages: int, dp: int, tp: int = 1) -> dict[int, RankPosition]:
    """Return positions as Megatron numbers ranks: tensor-parallel first, then data-parallel, then stages."""
    return {
        (stage * dp + group) * tp + rank: RankPosition(stage, group, rank)
        for stage in range(stages)
        for group in range(dp)
        for rank in range(tp)
    }


@st.composite
def jobs(draw: st.DrawFn) -> tuple[dict[int, RankPosition], set[int]]:
    places = job(draw(st.integers(1, 5)), draw(st.integers(1, 4)), draw(st.sampled_from((1, 2))))
    return places, draw(st.sets(st.sampled_from(sorted(places)), max_size=len(places)))


def slow_groups(places: Mapping[int, RankPosition], stragglers: Collection[int]) -> set[tuple[int, int]]:
    return {places[rank][:2] for rank in stragglers}


def swapped(places: Mapping[int, RankPosition], told: Topology) -> dict[int, RankPosition]:
    after = dict(places)
    for swap in told.swaps:
        for a, b in zip(swap.a, swap.b, strict=True):
            after[a], after[b] = after[b], after[a]
    return after


@settings(max_examples=300, deadline=None)
@given(jobs())
def test_every_place_is_taken_once_and_the_swaps_lead_there(made: tuple[dict[int, RankPosition], set[int]]) -> None:
    places, stragglers = made
    told = rearrange(places, stragglers)
    assert sorted(told.positions.values()) == sorted(places.values())
    assert told.positions == swapped(places, told)


@settings(max_examples=300, deadline=None)
@given(jobs())
def test_ranks_of_a_tensor_parallel_group_stay_together(made: tuple[dict[int, RankPosition], set[int]]) -> None:
    places, stragglers = made
    told = rearrange(places, stragglers)
    for rank, place in places.items():
        together = [other for other, its in places.items() if its[:2] == place[:2]]
        assert {told.positions[other][:2] for other in together} == {told.positions[rank][:2]}
        assert told.positions[rank].tp == place.tp


@settings(max_examples=300, deadline=None)
@given(jobs())
def test_no_more_stages_hold_stragglers_than_must_and_interior_ones_first(
    made: tuple[dict[int, RankPosition], set[int]],
) -> None:
    places, stragglers = made
    told = rearrange(places, stragglers)
    stages, width = (1 + max(place[of] for place in places.values()) for of in (0, 1))
    after = {stage for stage, _ in slow_groups(told.positions, stragglers)}
    must = ceil(len(slow_groups(places, stragglers)) / width)
    assert after == set(told.stages)
    assert len(after) == must
    outer = after & {0, stages - 1}
    assert len(outer) == max(0, must - max(0, stages - 2))


@settings(max_examples=150, deadline=None)
@given(jobs())
def test_there_is_no_way_with_fewer_moves(made: tuple[dict[int, RankPosition], set[int]]) -> None:
    """Try every choice of the fewest stages with the most interior ones; one move brings one slow group there."""
    places, stragglers = made
    told = rearrange(places, stragglers)
    stages, width = (1 + max(place[of] for place in places.values()) for of in (0, 1))
    slow = slow_groups(places, stragglers)
    must = ceil(len(slow) / width)
    inner = set(range(1, stages - 1))
    choices = [
        set(some) for some in combinations(range(stages), must) if len(set(some) & inner) == min(must, len(inner))
    ]
    fewest = min(sum(stage not in choice for stage, _ in slow) for choice in choices)
    assert len(told.swaps) == fewest


def test_where_a_group_is_one_gpu_the_number_of_stages_is_the_papers() -> None:
    """ceil(stragglers / GPUs of a stage): arXiv 2410.12588, S3."""
    for count in range(1, 13):
        told = rearrange(job(6, 2), range(count))
        assert len(told.stages) == ceil(count / 2)


def test_stragglers_in_two_stages_are_packed_into_one_interior_stage() -> None:
    told = rearrange(job(4, 2), {0, 5})  # stages 0 and 2
    assert told.stages == (2,)
    assert [(swap.a, swap.b, swap.reason) for swap in told.swaps] == [((0,), (4,), "straggler")]
    assert told.limitations == ("stage 2 of 4 stays slow: packing limits the damage to them",)


def test_where_nothing_is_slow_nobody_moves() -> None:
    told = rearrange(job(4, 2, 2), ())
    assert (told.stages, told.swaps, told.limitations) == ((), (), ())


def test_a_slow_link_carries_pipeline_traffic_rather_than_gradients() -> None:
    places = job(4, 2)
    told = rearrange(places, (), {(2, 3)})  # both in stage 1
    assert len(told.swaps) == 1
    a, b = told.positions[2], told.positions[3]
    assert a.stage != b.stage


@settings(max_examples=150, deadline=None)
@given(st.integers(2, 4), st.integers(2, 3), st.data())
def test_one_move_is_found_where_one_is_enough_for_the_links(stages: int, dp: int, data: st.DataObject) -> None:
    places = job(stages, dp)
    pairs = st.tuples(st.sampled_from(sorted(places)), st.sampled_from(sorted(places)))
    links = data.draw(st.sets(pairs.filter(lambda pair: pair[0] != pair[1]), max_size=3))

    def gradients(now: Mapping[int, RankPosition]) -> int:
        return len({frozenset(link) for link in links if now[link[0]].stage == now[link[1]].stage})

    told = rearrange(places, (), links)
    assert gradients(told.positions) <= gradients(places)
    assert told.positions == swapped(places, told)
    one_is_enough = any(
        gradients({**places, a: places[b], b: places[a]}) == 0 for a, b in combinations(sorted(places), 2)
    )
    if not gradients(places):
        assert not told.swaps
    elif one_is_enough:
        assert len(told.swaps) == 1


@settings(max_examples=150, deadline=None)
@given(jobs(), st.data())
def test_moves_for_links_leave_the_stragglers_packed(
    made: tuple[dict[int, RankPosition], set[int]], data: st.DataObject
) -> None:
    places, stragglers = made
    ranks = st.sampled_from(sorted(places))
    links = data.draw(st.sets(st.tuples(ranks, ranks), max_size=4))
    told = rearrange(places, stragglers, links)
    assert {stage for stage, _ in slow_groups(told.positions, stragglers)} == set(told.stages)


def test_a_link_within_a_tensor_parallel_group_is_told_to_remain() -> None:
    told = rearrange(job(2, 2, 2), (), {(0, 1)})
    assert told.swaps == ()
    assert told.limitations == ("the link of ranks 0 and 1 lies within a tensor-parallel group",)


@pytest.mark.parametrize(
    ("places", "stragglers", "links", "says"),
    [
        ({}, (), (), "no rank given"),
        (
            {0: RankPosition(0, 0, 0), 1: RankPosition(1, 1, 0)},
            (),
            (),
            "2 ranks do not fill 2 stages x 2 data-parallel groups",
        ),
        ({0: RankPosition(0, 0, 0), 1: RankPosition(0, 0, 0)}, (), (), "2 ranks do not fill 1 stages"),
        ({0: RankPosition(-1, 0, 0)}, (), (), "1 ranks do not fill"),
        (job(2, 2), {9}, (), "rank 9 has no position in the job"),
        (job(2, 2), (), {(0, 7)}, "rank 7 has no position in the job"),
        (job(1, MAX_RANKS + 1), (), (), "the maximum is 65,536"),
        (job(30, 30), (), {(0, rank) for rank in range(1, MAX_LINKS + 2)}, "257 slow links are too many"),
    ],
)
def test_what_is_no_job_is_refused_with_a_sentence(
    places: dict[int, RankPosition], stragglers: set[int], links: set[tuple[int, int]], says: str
) -> None:
    with pytest.raises(InvalidTopology, match=says):
        rearrange(places, stragglers, links)
