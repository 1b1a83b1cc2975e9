"""Tests of failures by week: incidents, spikes, and the nodes that caused them."""

from __future__ import annotations

import math
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from healthd.fleet.statistics.weeks import (
    WEEK,
    Incident,
    concentrated_nodes,
    group_incidents,
    poisson_tail,
    spikes,
    week_start,
)

MONDAY = 1_795_996_800  # 2026-11-30, 00:00 UTC


def test_a_week_begins_on_monday_at_midnight():
    assert week_start(MONDAY) == week_start(MONDAY + WEEK - 1) == MONDAY
    assert week_start(MONDAY - 1) == MONDAY - WEEK
    assert week_start(4 * 86400) == 4 * 86400
    assert week_start(0) == -3 * 86400


def test_jobs_that_one_fault_ended_one_after_another_are_one_incident():
    of_node = [("c", "n1", "mount", time) for time in (0, 900, 1700, 2601)]
    assert group_incidents(of_node) == [Incident("c", "n1", "mount", 0, 3), Incident("c", "n1", "mount", 2601, 1)]
    assert len(group_incidents([("c", "n1", "mount", 0), ("c", "n2", "mount", 0), ("c", "n1", "disk", 0)])) == 3
    assert group_incidents([]) == []


@given(
    st.lists(st.tuples(st.sampled_from("ab"), st.sampled_from("xy"), st.sampled_from("pq"), st.integers(0, 9000))),
    st.randoms(use_true_random=False),
)
def test_the_order_of_failures_changes_no_incident_and_none_is_lost(failures: list, random: Random):
    found = group_incidents(failures)
    assert found == group_incidents(random.sample(failures, len(failures)))
    assert sum(one.jobs for one in found) == len(failures)


def happened(week: int, *nodes: str) -> list[Incident]:
    return [Incident("c", node, "ib_link", MONDAY + week * WEEK + 3600 * at, 1) for at, node in enumerate(nodes)]


HOURS = {MONDAY + week * WEEK: 1000.0 for week in range(10)}


def quiet() -> list[Incident]:
    return [one for week in range(1, 10) for one in happened(week, f"n{week}")]


def test_a_spike_of_few_nodes_is_named_with_its_nodes():
    spike = happened(0, "a", "a", "a", "a", "b", "b", "b", "c")
    (found,) = spikes([*quiet(), *spike], HOURS)
    assert (found.cause, found.week, found.incidents, found.expected) == ("ib_link", MONDAY, 8, 1.0)
    assert found.nodes == (("c", "a", 4),)


def test_a_spike_of_many_nodes_names_none():
    (found,) = spikes([*quiet(), *happened(0, *"abcdefgh")], HOURS)
    assert (found.incidents, found.nodes) == (8, ())


def test_a_week_as_the_others_and_one_with_more_gpu_time_do_not_stand_out():
    assert spikes(quiet(), HOURS) == []
    assert spikes([*quiet(), *happened(0, *"aaaaabbb")], {**HOURS, MONDAY: 8000.0}) == []
    busy = [one for week in range(1, 10) for one in happened(week, *(f"n{number}" for number in range(100)))]
    assert (
        spikes([*busy, *happened(0, *(f"n{number}" for number in range(150)))], HOURS) == []
    )  # less than twice as many
    assert spikes([*quiet(), *happened(0, *"aaaa")], HOURS) == []  # fewer than five incidents
    assert spikes(happened(0, *"aaaaaaaa"), {MONDAY: 5.0}) == []  # no other weeks to compare with
    assert spikes([], {}) == []


@pytest.mark.parametrize(
    ("nodes", "count"),
    [("aaaaaaaa", 1), ("aaaabbbb", 1), ("aaaabbcd", 1), ("aaabbbcc", 2), ("abcdefgh", 0), ("aabbccdd", 2), ("", 0)],
)
def test_few_nodes_hold_half_of_it_and_each_far_more_than_one(nodes, count):
    assert len(concentrated_nodes(happened(0, *nodes))) == count


@pytest.mark.parametrize(("count", "mean"), [(1, 0.5), (3, 2.0), (10, 4.0), (40, 30.0), (900, 800.0)])
def test_the_poisson_tail_is_that_of_its_terms(count, mean):
    terms = (math.exp(-mean + k * math.log(mean) - math.lgamma(k + 1)) for k in range(count, count + 2000))
    assert poisson_tail(count, mean) == pytest.approx(math.fsum(terms), rel=1e-6)


def test_the_poisson_tail_at_its_ends():
    assert poisson_tail(0, 3.0) == poisson_tail(0, 0.0) == 1.0
    assert poisson_tail(1, 0.0) == 0.0
