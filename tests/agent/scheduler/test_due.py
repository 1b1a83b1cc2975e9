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


def scheduled_run(check: str, uses: str = "", interval: float = 300.0) -> ScheduledRun:
    return ScheduledRun(RunName(check, ""), uses, interval, 10.0)


@given(NODES, INTERVALS)
def test_phase_is_constant_and_within_interval(node, interval):
    assert 0 <= phase(node, interval) < interval
    assert phase(node, interval) == phase(node, interval)


def test_node_phases_spread_over_interval():
    phases = sorted(phase(f"gpu-{number:03}", 300.0) for number in range(300))
    assert max(higher - lower for lower, higher in itertools.pairwise(phases)) < 15
    assert phases[-1] - phases[0] > 250


def test_due_at_is_zero_for_new_run():
    assert due_at(scheduled_run("mount"), None, "n") == 0.0


@given(NODES, INTERVALS, TIMES)
def test_due_at_is_about_an_interval_after_last_run(node, interval, last_run):
    due = due_at(scheduled_run("mount", interval=interval), last_run, node)
    assert 0.09 * interval <= due - last_run <= 1.11 * interval


@given(NODES, st.floats(10, 3600), TIMES)
def test_due_at_has_node_phase(node, interval, last_run):
    run = scheduled_run("mount", interval=interval)
    first_due = due_at(run, last_run, node)
    offset = (first_due - phase(node, interval)) / interval
    assert abs(offset - round(offset)) < 1e-6
    assert abs(due_at(run, first_due, node) - first_due - interval) < 1e-6 * interval


def test_runs_with_same_interval_stay_in_same_round():
    first, second = scheduled_run("gpu_ecc", "nvml"), scheduled_run("mount")
    round_start = due_at(first, 1000.0, "n")
    assert due_at(first, round_start, "n") == due_at(second, round_start + 4, "n")


def test_due_runs_puts_nvml_checks_first():
    scheduled = [
        scheduled_run("mount"),
        scheduled_run("gpu_ecc", "nvml"),
        scheduled_run("exec"),
        scheduled_run("gpu_count", "nvml"),
    ]
    assert [run.check for run in due_runs(scheduled, {}, {}, "n", 0.0)] == ["gpu_ecc", "gpu_count", "mount", "exec"]


def test_due_runs_waits_for_next_round():
    run = scheduled_run("mount")
    due = due_at(run, 1000.0, "n")
    assert due_runs([run], {run.name: 1000.0}, {}, "n", due - 1) == []
    assert due_runs([run], {run.name: 1000.0}, {}, "n", due) == [run]


def test_due_runs_includes_early_run_on_time():
    run = scheduled_run("mount")
    assert due_runs([run], {run.name: 1000.0}, {run.name: 1010.0}, "n", 1009.0) == []
    assert due_runs([run], {run.name: 1000.0}, {run.name: 1010.0}, "n", 1010.0) == [run]


def test_early_run_after_round_does_not_delay_round():
    run = scheduled_run("mount")
    due = due_at(run, 1000.0, "n")
    assert due_runs([run], {run.name: 1000.0}, {run.name: due + 100}, "n", due) == [run]


def test_with_repeats_adds_runs_beside_their_kind_once():
    a, b, first, second = (
        scheduled_run("a"),
        scheduled_run("b"),
        scheduled_run("gpu_1", "nvml"),
        scheduled_run("gpu_2", "nvml"),
    )
    all_runs = [a, b, first, second]
    assert with_repeats([second, a], all_runs, {first.name}) == [second, first, a]
    assert with_repeats([first, second, a], all_runs, {first.name}) == [first, second, a]
    assert with_repeats([], all_runs, {b.name, first.name}) == [first, b]
    assert with_repeats([a], all_runs, set()) == [a]


def test_next_due_without_runs_is_infinite():
    assert next_due([], {}, {}, "n") == float("inf")


RUNS = st.lists(st.tuples(st.floats(1, 3600), st.none() | st.floats(0, 1e6), st.none() | st.floats(0, 1e6)), max_size=6)


@given(RUNS, NODES)
def test_due_runs_agrees_with_next_due(runs, node):
    scheduled = [scheduled_run(f"c{number}", interval=interval) for number, (interval, _, _) in enumerate(runs)]
    last_runs = {
        run.name: last_run for run, (_, last_run, _) in zip(scheduled, runs, strict=True) if last_run is not None
    }
    early = {
        run.name: early_run for run, (_, _, early_run) in zip(scheduled, runs, strict=True) if early_run is not None
    }
    due = next_due(scheduled, last_runs, early, node)
    if due == float("inf"):
        assert scheduled == []
    else:
        assert due_runs(scheduled, last_runs, early, node, due)
        assert not due_runs(scheduled, last_runs, early, node, due - 1e-3 - abs(due) * 1e-9)
