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


def positions_of_job(stages: int, dp: int, tp: int = 1) -> dict[int, RankPosition]:
    """Return positions as Megatron numbers ranks: tensor-parallel first, then data-parallel, then stages."""
    return {
        (stage * dp + group) * tp + rank: RankPosition(stage, group, rank)
        for stage in range(stages)
        for group in range(dp)
        for rank in range(tp)
    }


@st.composite
def jobs_with_stragglers(draw: st.DrawFn) -> tuple[dict[int, RankPosition], set[int]]:
    places = positions_of_job(draw(st.integers(1, 5)), draw(st.integers(1, 4)), draw(st.sampled_from((1, 2))))
    return places, draw(st.sets(st.sampled_from(sorted(places)), max_size=len(places)))


def slow_groups(places: Mapping[int, RankPosition], stragglers: Collection[int]) -> set[tuple[int, int]]:
    return {places[rank][:2] for rank in stragglers}


def apply_swaps(places: Mapping[int, RankPosition], topology: Topology) -> dict[int, RankPosition]:
    after = dict(places)
    for swap in topology.swaps:
        for a, b in zip(swap.a, swap.b, strict=True):
            after[a], after[b] = after[b], after[a]
    return after


@settings(max_examples=300, deadline=None)
@given(jobs_with_stragglers())
def test_positions_are_permuted_by_swaps(drawn_job: tuple[dict[int, RankPosition], set[int]]) -> None:
    places, stragglers = drawn_job
    topology = rearrange(places, stragglers)
    assert sorted(topology.positions.values()) == sorted(places.values())
    assert topology.positions == apply_swaps(places, topology)


@settings(max_examples=300, deadline=None)
@given(jobs_with_stragglers())
def test_tensor_parallel_groups_stay_together(drawn_job: tuple[dict[int, RankPosition], set[int]]) -> None:
    places, stragglers = drawn_job
    topology = rearrange(places, stragglers)
    for rank, place in places.items():
        together = [other_rank for other_rank, position in places.items() if position[:2] == place[:2]]
        assert {topology.positions[other_rank][:2] for other_rank in together} == {topology.positions[rank][:2]}
        assert topology.positions[rank].tp == place.tp


@settings(max_examples=300, deadline=None)
@given(jobs_with_stragglers())
def test_stragglers_fill_fewest_stages_and_interior_first(
    drawn_job: tuple[dict[int, RankPosition], set[int]],
) -> None:
    places, stragglers = drawn_job
    topology = rearrange(places, stragglers)
    stages, width = (1 + max(place[axis] for place in places.values()) for axis in (0, 1))
    after = {stage for stage, _ in slow_groups(topology.positions, stragglers)}
    fewest_stages = ceil(len(slow_groups(places, stragglers)) / width)
    assert after == set(topology.stages)
    assert len(after) == fewest_stages
    outer = after & {0, stages - 1}
    assert len(outer) == max(0, fewest_stages - max(0, stages - 2))


@settings(max_examples=150, deadline=None)
@given(jobs_with_stragglers())
def test_number_of_swaps_is_minimal(drawn_job: tuple[dict[int, RankPosition], set[int]]) -> None:
    """Try every choice of the fewest stages with the most interior ones; one move brings one slow group there."""
    places, stragglers = drawn_job
    topology = rearrange(places, stragglers)
    stages, width = (1 + max(place[axis] for place in places.values()) for axis in (0, 1))
    slow = slow_groups(places, stragglers)
    fewest_stages = ceil(len(slow) / width)
    inner = set(range(1, stages - 1))
    choices = [
        set(chosen)
        for chosen in combinations(range(stages), fewest_stages)
        if len(set(chosen) & inner) == min(fewest_stages, len(inner))
    ]
    fewest = min(sum(stage not in choice for stage, _ in slow) for choice in choices)
    assert len(topology.swaps) == fewest


def test_number_of_stages_matches_paper_for_single_gpus() -> None:
    """ceil(stragglers / GPUs of a stage): arXiv 2410.12588, S3."""
    for count in range(1, 13):
        topology = rearrange(positions_of_job(6, 2), range(count))
        assert len(topology.stages) == ceil(count / 2)


def test_stragglers_of_two_stages_move_to_interior_stage() -> None:
    topology = rearrange(positions_of_job(4, 2), {0, 5})  # stages 0 and 2
    assert topology.stages == (2,)
    assert [(swap.a, swap.b, swap.reason) for swap in topology.swaps] == [((0,), (4,), "straggler")]
    (limitation,) = topology.limitations
    assert limitation.startswith("stage 2 of 4 ")


def test_no_rank_moves_without_stragglers() -> None:
    topology = rearrange(positions_of_job(4, 2, 2), ())
    assert (topology.stages, topology.swaps, topology.limitations) == ((), (), ())


def test_slow_link_carries_pipeline_traffic() -> None:
    places = positions_of_job(4, 2)
    topology = rearrange(places, (), {(2, 3)})  # both in stage 1
    assert len(topology.swaps) == 1
    a, b = topology.positions[2], topology.positions[3]
    assert a.stage != b.stage


@settings(max_examples=150, deadline=None)
@given(st.integers(2, 4), st.integers(2, 3), st.data())
def test_single_swap_is_found_if_sufficient_for_links(stages: int, dp: int, data: st.DataObject) -> None:
    places = positions_of_job(stages, dp)
    pairs = st.tuples(st.sampled_from(sorted(places)), st.sampled_from(sorted(places)))
    links = data.draw(st.sets(pairs.filter(lambda pair: pair[0] != pair[1]), max_size=3))

    def gradients(current: Mapping[int, RankPosition]) -> int:
        return len({frozenset(link) for link in links if current[link[0]].stage == current[link[1]].stage})

    topology = rearrange(places, (), links)
    assert gradients(topology.positions) <= gradients(places)
    assert topology.positions == apply_swaps(places, topology)
    is_one_swap_enough = any(
        gradients({**places, a: places[b], b: places[a]}) == 0 for a, b in combinations(sorted(places), 2)
    )
    if not gradients(places):
        assert not topology.swaps
    elif is_one_swap_enough:
        assert len(topology.swaps) == 1


@settings(max_examples=150, deadline=None)
@given(jobs_with_stragglers(), st.data())
def test_swaps_for_links_keep_stragglers_packed(
    drawn_job: tuple[dict[int, RankPosition], set[int]], data: st.DataObject
) -> None:
    places, stragglers = drawn_job
    ranks = st.sampled_from(sorted(places))
    links = data.draw(st.sets(st.tuples(ranks, ranks), max_size=4))
    topology = rearrange(places, stragglers, links)
    assert {stage for stage, _ in slow_groups(topology.positions, stragglers)} == set(topology.stages)


def test_link_within_tensor_parallel_group_is_limitation() -> None:
    topology = rearrange(positions_of_job(2, 2, 2), (), {(0, 1)})
    assert topology.swaps == ()
    (limitation,) = topology.limitations
    assert ("ranks 0 and 1" in limitation, "tensor-parallel" in limitation) == (True, True)


@pytest.mark.parametrize(
    ("places", "stragglers", "links", "message"),
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
        (positions_of_job(2, 2), {9}, (), "rank 9 has no position in the job"),
        (positions_of_job(2, 2), (), {(0, 7)}, "rank 7 has no position in the job"),
        (positions_of_job(1, MAX_RANKS + 1), (), (), "the maximum is 65,536"),
        (positions_of_job(30, 30), (), {(0, rank) for rank in range(1, MAX_LINKS + 2)}, "257 slow links are too many"),
    ],
)
def test_invalid_job_is_rejected(
    places: dict[int, RankPosition], stragglers: set[int], links: set[tuple[int, int]], message: str
) -> None:
    with pytest.raises(InvalidTopology, match=message):
        rearrange(places, stragglers, links)
