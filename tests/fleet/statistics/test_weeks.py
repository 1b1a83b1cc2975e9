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


def test_week_start_is_monday_midnight():
    assert week_start(MONDAY) == week_start(MONDAY + WEEK - 1) == MONDAY
    assert week_start(MONDAY - 1) == MONDAY - WEEK
    assert week_start(4 * 86400) == 4 * 86400
    assert week_start(0) == -3 * 86400


def test_group_incidents_joins_failures_of_one_fault():
    failures_of_node = [("c", "n1", "mount", time) for time in (0, 900, 1700, 2601)]
    assert group_incidents(failures_of_node) == [
        Incident("c", "n1", "mount", 0, 3),
        Incident("c", "n1", "mount", 2601, 1),
    ]
    assert len(group_incidents([("c", "n1", "mount", 0), ("c", "n2", "mount", 0), ("c", "n1", "disk", 0)])) == 3
    assert group_incidents([]) == []


@given(
    st.lists(st.tuples(st.sampled_from("ab"), st.sampled_from("xy"), st.sampled_from("pq"), st.integers(0, 9000))),
    st.randoms(use_true_random=False),
)
def test_group_incidents_ignores_order_and_keeps_all_jobs(failures: list, random: Random):
    found = group_incidents(failures)
    assert found == group_incidents(random.sample(failures, len(failures)))
    assert sum(incident.jobs for incident in found) == len(failures)


def incidents_in_week(week: int, *nodes: str) -> list[Incident]:
    return [Incident("c", node, "ib_link", MONDAY + week * WEEK + 3600 * at, 1) for at, node in enumerate(nodes)]


HOURS = {MONDAY + week * WEEK: 1000.0 for week in range(10)}


def quiet_weeks() -> list[Incident]:
    return [incident for week in range(1, 10) for incident in incidents_in_week(week, f"n{week}")]


def test_spike_of_few_nodes_names_them():
    spike = incidents_in_week(0, "a", "a", "a", "a", "b", "b", "b", "c")
    (found,) = spikes([*quiet_weeks(), *spike], HOURS)
    assert (found.cause, found.week, found.incidents, found.expected) == ("ib_link", MONDAY, 8, 1.0)
    assert found.nodes == (("c", "a", 4),)


def test_spike_of_many_nodes_names_none():
    (found,) = spikes([*quiet_weeks(), *incidents_in_week(0, *"abcdefgh")], HOURS)
    assert (found.incidents, found.nodes) == (8, ())


def test_usual_or_busier_week_is_no_spike():
    assert spikes(quiet_weeks(), HOURS) == []
    assert spikes([*quiet_weeks(), *incidents_in_week(0, *"aaaaabbb")], {**HOURS, MONDAY: 8000.0}) == []
    busy = [
        incident
        for week in range(1, 10)
        for incident in incidents_in_week(week, *(f"n{number}" for number in range(100)))
    ]
    assert (
        spikes([*busy, *incidents_in_week(0, *(f"n{number}" for number in range(150)))], HOURS) == []
    )  # less than twice as many
    assert spikes([*quiet_weeks(), *incidents_in_week(0, *"aaaa")], HOURS) == []  # fewer than five incidents
    assert spikes(incidents_in_week(0, *"aaaaaaaa"), {MONDAY: 5.0}) == []  # no other weeks to compare with
    assert spikes([], {}) == []


@pytest.mark.parametrize(
    ("nodes", "count"),
    [("aaaaaaaa", 1), ("aaaabbbb", 1), ("aaaabbcd", 1), ("aaabbbcc", 2), ("abcdefgh", 0), ("aabbccdd", 2), ("", 0)],
)
def test_concentrated_nodes_hold_half_of_incidents(nodes, count):
    assert len(concentrated_nodes(incidents_in_week(0, *nodes))) == count


@pytest.mark.parametrize(("count", "mean"), [(1, 0.5), (3, 2.0), (10, 4.0), (40, 30.0), (900, 800.0)])
def test_poisson_tail_matches_sum_of_terms(count, mean):
    terms = (math.exp(-mean + k * math.log(mean) - math.lgamma(k + 1)) for k in range(count, count + 2000))
    assert poisson_tail(count, mean) == pytest.approx(math.fsum(terms), rel=1e-6)


def test_poisson_tail_at_zero():
    assert poisson_tail(0, 3.0) == poisson_tail(0, 0.0) == 1.0
    assert poisson_tail(1, 0.0) == 0.0
