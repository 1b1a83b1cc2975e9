"""Tests of the planner: no remedy before its time, and a bounded cost compared with full knowledge."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from itertools import combinations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from healthd.failslow.mitigation.planner import (
    CANDIDATES,
    HEALTHY,
    Action,
    NextAction,
    Observation,
    Overheads,
    State,
    advance,
    find_next_action,
    overhead_seconds,
)
from healthd.failslow.model import Cause

pytestmark = pytest.mark.one_python

COMPUTE = Cause.COMPUTE_GPU
COSTS = st.builds(Overheads, *[st.floats(0.0, 1000.0)] * 3)
LOSSES = st.lists(st.floats(0.0, 50.0), max_size=200)


def slow_observation(lost: float, cause: Cause = COMPUTE, gpus: int = 8) -> Observation:
    return Observation(True, lost, gpus, cause)


def run_planner(
    observations: Iterable[Observation], costs: Overheads, settles: int = 0
) -> list[tuple[int, Action, float]]:
    """Return (iteration, remedy, lost seconds) for each applied remedy."""
    state, applied = HEALTHY, []
    for at, observation in enumerate(observations):
        state, action = advance(state, observation, costs, settles)
        if action is not None:
            applied.append((at, action, state.lost))
    return applied


def test_remedies_follow_order_of_cost_when_loss_reaches_it() -> None:
    applied = run_planner([slow_observation(1.0)] * 1000, Overheads(5, 60, 600))
    assert applied == [
        (4, Action.MICRO_BATCHES, 5 * 8),
        (59, Action.TOPOLOGY, 60 * 8),
        (599, Action.RESTART, 600 * 8),
    ]


def test_no_remedy_follows_last_one() -> None:
    state = State(COMPUTE, 1e9, CANDIDATES[COMPUTE])
    assert find_next_action(state, 8, Overheads()) is None
    assert advance(state, slow_observation(1e6), Overheads())[1] is None


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.tuples(st.booleans(), st.floats(-5, 50), st.sampled_from(list(Cause))), max_size=200),
    COSTS,
    st.integers(0, 5),
    st.integers(1, 1024),
)
def test_no_remedy_is_applied_before_loss_reaches_cost(
    trace: list[tuple[bool, float, Cause]], costs: Overheads, settles: int, gpus: int
) -> None:
    state, lost = HEALTHY, 0.0
    taken: list[Action] = []
    for is_slow, seconds, cause in trace:
        state, action = advance(state, Observation(is_slow, seconds, gpus, cause), costs, settles)
        lost = max(0.0, lost + seconds * gpus) if is_slow else 0.0
        taken = taken if is_slow else []
        if action is not None:
            assert lost >= overhead_seconds(action, costs) * gpus
            assert action in CANDIDATES[state.cause]
            assert action not in taken
            assert action is not Action.IGNORE
            taken.append(action)


@settings(max_examples=400, deadline=None)
@given(LOSSES, st.floats(0.001, 1000.0))
def test_single_remedy_costs_at_most_twice_best_plus_one_iteration(losses: list[float], cost: float) -> None:
    """The best plan knows the whole trace and acts at once or never. For an unknown cause the only remedy is S4."""
    spent, iteration = 0.0, 0.0
    state = HEALTHY
    for lost in losses:
        spent += lost
        iteration = lost
        state, action = advance(state, slow_observation(lost, Cause.UNKNOWN, 1), Overheads(s4=cost))
        if action is not None:
            assert action is Action.RESTART
            spent += cost
            break  # the slowness is removed
    best = min(sum(losses), cost)
    assert spent <= 2 * best + iteration + 1e-6


def cost_of_remedies(
    losses: Sequence[float], remedies: Iterable[Action], costs: Overheads, leaves: dict[Action, float]
) -> float:
    """Return the total cost when these remedies are taken at the onset."""
    remedies = list(remedies)
    share = min([1.0, *(leaves[remedy] for remedy in remedies)])
    return sum(overhead_seconds(remedy, costs) for remedy in remedies) + share * sum(losses)


@settings(max_examples=400, deadline=None)
@given(LOSSES, COSTS, st.lists(st.floats(0.0, 1.0), min_size=3, max_size=3), st.sampled_from((0, 0, 3)))
def test_several_remedies_cost_is_bounded_by_best(
    losses: list[float], costs: Overheads, shares: list[float], settles: int
) -> None:
    """`leaves` has the share of the slowness that a remedy leaves. The best plan applies any remedies at the onset."""
    leaves = dict(zip(CANDIDATES[COMPUTE], shares, strict=True))
    state, spent, share, iterations = HEALTHY, 0.0, 1.0, [0.0]
    for lost in losses:
        iterations.append(lost * share)
        spent += lost * share
        state, action = advance(state, slow_observation(lost * share, COMPUTE, 1), costs, settles)
        if action is not None:
            spent += overhead_seconds(action, costs)
            share = min(share, leaves[action])
    best = min(
        cost_of_remedies(losses, chosen, costs, leaves)
        for count in range(4)
        for chosen in combinations(CANDIDATES[COMPUTE], count)
    )
    overshoot = max(iterations) * (1 + settles * len(state.actions))
    assert spent <= (1 + len(state.actions)) * (best + overshoot) + 1e-6


def test_relief_resets_plan() -> None:
    state = State(COMPUTE, 79.0, (Action.MICRO_BATCHES,), 3)
    assert advance(state, Observation(False), Overheads()) == (HEALTHY, None)
    applied = run_planner(
        [*[slow_observation(1.0)] * 4, Observation(False), *[slow_observation(1.0)] * 5], Overheads(5, 60, 600)
    )
    assert [(at, action) for at, action, _ in applied] == [(9, Action.MICRO_BATCHES)]


def test_slow_communication_gets_no_micro_batches() -> None:
    applied = run_planner([slow_observation(1.0, Cause.COMMUNICATION_INTER_NODE)] * 700, Overheads(5, 60, 600))
    assert [action for _, action, _ in applied] == [Action.TOPOLOGY, Action.RESTART]


def test_imbalance_is_always_ignored() -> None:
    assert run_planner([slow_observation(100.0, Cause.IMBALANCE)] * 700, Overheads()) == []
    assert find_next_action(State(Cause.IMBALANCE), 8, Overheads()) is None


def test_cause_found_later_enables_its_remedies() -> None:
    observations = [*[slow_observation(1.0, Cause.UNKNOWN)] * 10, slow_observation(1.0)]
    assert run_planner(observations, Overheads(5, 60, 600)) == [(10, Action.MICRO_BATCHES, 11 * 8)]


def test_known_cause_is_kept_after_unknown_observation() -> None:
    state, _ = advance(State(COMPUTE, 1.0), slow_observation(1.0, Cause.UNKNOWN), Overheads())
    assert state.cause is COMPUTE


def test_remedy_is_followed_by_settling_iterations() -> None:
    applied = run_planner([slow_observation(1000.0)] * 100, Overheads(), settles=20)
    assert [(at, action) for at, action, _ in applied] == [
        (0, Action.MICRO_BATCHES),
        (21, Action.TOPOLOGY),
        (42, Action.RESTART),
    ]


def test_due_time_is_independent_of_number_of_gpus() -> None:
    """More GPUs lose more and cost more, so the due time of a remedy does not depend on their number."""
    for gpus in (1, 8, 16_384):
        applied = run_planner([slow_observation(1.0, gpus=gpus)] * 100, Overheads(5, 60, 600))
        assert [at for at, _, _ in applied] == [4, 59]
    assert find_next_action(State(COMPUTE), 1024, Overheads(s2=5)) == NextAction(Action.MICRO_BATCHES, 5120)


def test_cheaper_topology_change_comes_first() -> None:
    applied = run_planner([slow_observation(1.0)] * 30, Overheads(s2=20, s3=10, s4=600))
    assert [action for _, action, _ in applied] == [Action.TOPOLOGY, Action.MICRO_BATCHES]


@pytest.mark.parametrize("lost", [math.nan, math.inf, -math.inf, -1e308])
def test_invalid_loss_applies_nothing(lost: float) -> None:
    assert run_planner([slow_observation(lost)] * 5, Overheads(5, 60, 600)) == []


def test_whole_slow_stage_allows_only_restart() -> None:
    observations = [slow_observation(1.0)._replace(whole_stage=True)] * 1000
    assert run_planner(observations, Overheads(5, 60, 600)) == [(599, Action.RESTART, 600 * 8)]
