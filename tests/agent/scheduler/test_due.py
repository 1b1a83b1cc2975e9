"""Tests of the schedule: rounds at the node's own phase, GPU checks first, and early runs."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from healthd.agent.scheduler.due import ScheduledRun, due_at, due_runs, next_due, phase, with_repeats
from healthd.common.model import RunName

NODES = st.text(min_size=1, max_size=12)
INTERVALS = st.floats(0.5, 7 * 86400.0)
TIMES = st.floats(0, 1e7)


def a_run(check: str, uses: str = "", interval: float = 300.0) -> ScheduledRun:
    return ScheduledRun(RunName(check, ""), uses, interval, 10.0)


@given(NODES, INTERVALS)
def test_a_nodes_phase_lies_within_the_interval_and_is_the_same_each_time(node, interval):
    assert 0 <= phase(node, interval) < interval
    assert phase(node, interval) == phase(node, interval)


def test_the_nodes_of_a_cluster_are_spread_over_the_interval():
    phases = sorted(phase(f"gpu-{number:03}", 300.0) for number in range(300))
    assert max(later - earlier for earlier, later in itertools.pairwise(phases)) < 15
    assert phases[-1] - phases[0] > 250


def test_what_never_ran_is_due_at_once():
    assert due_at(a_run("mount"), None, "n") == 0.0


@given(NODES, INTERVALS, TIMES)
def test_the_next_run_is_a_tenth_of_an_interval_to_one_and_a_tenth_after_the_last(node, interval, last_run):
    at = due_at(a_run("mount", interval=interval), last_run, node)
    assert 0.09 * interval <= at - last_run <= 1.11 * interval


@given(NODES, st.floats(10, 3600), TIMES)
def test_the_runs_of_a_node_come_at_its_phase(node, interval, last_run):
    one = a_run("mount", interval=interval)
    first = due_at(one, last_run, node)
    offset = (first - phase(node, interval)) / interval
    assert abs(offset - round(offset)) < 1e-6
    assert abs(due_at(one, first, node) - first - interval) < 1e-6 * interval


def test_checks_of_one_interval_stay_in_one_round_although_they_run_one_after_another():
    first, second = a_run("gpu_ecc", "nvml"), a_run("mount")
    begun = due_at(first, 1000.0, "n")
    assert due_at(first, begun, "n") == due_at(second, begun + 4, "n")


def test_checks_of_the_driver_come_first_and_otherwise_the_order_holds():
    scheduled = [
        a_run("mount"),
        a_run("gpu_ecc", "nvml"),
        a_run("exec"),
        a_run("gpu_count", "nvml"),
    ]
    assert [j.check for j in due_runs(scheduled, {}, {}, "n", 0.0)] == ["gpu_ecc", "gpu_count", "mount", "exec"]


def test_what_ran_is_not_due_before_its_round():
    one = a_run("mount")
    at = due_at(one, 1000.0, "n")
    assert due_runs([one], {one.name: 1000.0}, {}, "n", at - 1) == []
    assert due_runs([one], {one.name: 1000.0}, {}, "n", at) == [one]


def test_what_is_wanted_early_is_due_then():
    one = a_run("mount")
    assert due_runs([one], {one.name: 1000.0}, {one.name: 1010.0}, "n", 1009.0) == []
    assert due_runs([one], {one.name: 1000.0}, {one.name: 1010.0}, "n", 1010.0) == [one]


def test_a_wish_for_later_does_not_put_off_the_round():
    one = a_run("mount")
    at = due_at(one, 1000.0, "n")
    assert due_runs([one], {one.name: 1000.0}, {one.name: at + 100}, "n", at) == [one]


def test_what_is_wanted_once_more_comes_with_its_like_and_never_twice():
    a, b, first, second = a_run("a"), a_run("b"), a_run("gpu_1", "nvml"), a_run("gpu_2", "nvml")
    every = [a, b, first, second]
    assert with_repeats([second, a], every, {first.name}) == [second, first, a]
    assert with_repeats([first, second, a], every, {first.name}) == [first, second, a]
    assert with_repeats([], every, {b.name, first.name}) == [first, b]
    assert with_repeats([a], every, set()) == [a]


def test_with_nothing_to_run_nothing_is_ever_due():
    assert next_due([], {}, {}, "n") == float("inf")


RUNS = st.lists(st.tuples(st.floats(1, 3600), st.none() | st.floats(0, 1e6), st.none() | st.floats(0, 1e6)), max_size=6)


@given(RUNS, NODES)
def test_something_is_due_when_next_due_says_so_and_not_before(runs, node):
    scheduled = [a_run(f"c{number}", interval=interval) for number, (interval, _, _) in enumerate(runs)]
    last = {j.name: ran for j, (_, ran, _) in zip(scheduled, runs, strict=True) if ran is not None}
    early = {j.name: wish for j, (_, _, wish) in zip(scheduled, runs, strict=True) if wish is not None}
    at = next_due(scheduled, last, early, node)
    if at == float("inf"):
        assert scheduled == []
    else:
        assert due_runs(scheduled, last, early, node, at)
        assert not due_runs(scheduled, last, early, node, at - 1e-3 - abs(at) * 1e-9)
