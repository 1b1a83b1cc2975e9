"""Tests of the fleet limit in a small simulated fleet: the real decisions of many nodes with a modelled slurmctld."""

from __future__ import annotations

import random
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytestmark = pytest.mark.one_python

BENCH = str(Path(__file__).parents[2] / "bench")
if BENCH not in sys.path:
    sys.path.append(BENCH)

from fleet import Fleet, dead_file_server, hardware_faults  # noqa: E402
from modelled_slurmctld import Slurmctld  # noqa: E402

from healthd.agent.settings.config import FleetLimits  # noqa: E402
from healthd.agent.slurm.fleet_limit import limit_for  # noqa: E402

LIMITS = FleetLimits()
HOUR = 3600.0


def nodes_with_counted_drain(fleet: Fleet) -> set[str]:
    """Return the nodes that have a drain which was counted."""
    return {name for name, node in fleet.nodes.items() if node.memory.reason and not node.memory.awaits_count}


def fleet_of(nodes: int, limits: FleetLimits = LIMITS, away: tuple[float, float] = (0, 0)) -> tuple[Fleet, Slurmctld]:
    random.seed(7)
    names = [f"n{index:04d}" for index in range(nodes)]
    slurmctld = Slurmctld(names, away=(1.8e9 + away[0], 1.8e9 + away[1]))
    return Fleet(names, slurmctld, limits), slurmctld


def test_dead_file_server_drains_up_to_limit_and_all_resume() -> None:
    fleet, slurmctld = fleet_of(300)
    fleet.add_fault(dead_file_server(fleet.nodes, 0, HOUR))
    fleet.run(HOUR)
    assert len(nodes_with_counted_drain(fleet)) == len(slurmctld.drained) == 30
    assert slurmctld.peak <= 1.2 * 30
    assert sum(node.hold_count > 0 for node in fleet.nodes.values()) == 270
    fleet.run(HOUR + 700)
    assert slurmctld.drained == {}
    assert all(node.memory.hold is None for node in fleet.nodes.values())
    requests = sum(slurmctld.requests.values())
    fleet.run(12 * HOUR)
    assert sum(slurmctld.requests.values()) == requests, "a healthy fleet sends no requests"


def test_hardware_faults_are_drained_at_once() -> None:
    fleet, slurmctld = fleet_of(300)
    fleet.add_fault(hardware_faults(sorted(fleet.nodes)[::100], 10, HOUR))
    fleet.run(11)
    assert set(slurmctld.drained) == {"n0000", "n0100", "n0200"}


def test_hardware_faults_are_drained_while_limit_is_reached() -> None:
    fleet, slurmctld = fleet_of(300)
    wave = sorted(fleet.nodes)[::30]
    fleet.add_fault(dead_file_server(fleet.nodes, 0, HOUR))
    fleet.add_fault(hardware_faults(wave, 1800, 5 * HOUR))
    fleet.run(1799)
    assert len(slurmctld.drained) == 30
    fleet.run(1802)
    assert set(slurmctld.drained) >= set(wave)
    assert len(slurmctld.drained) <= 30 + len(wave)
    fleet.run(3 * HOUR)
    assert set(slurmctld.drained) == set(wave)


def test_bug_resembling_hardware_fault_stops_at_second_limit() -> None:
    fleet, slurmctld = fleet_of(300)
    fleet.add_fault(hardware_faults(fleet.nodes, 10, HOUR))
    fleet.run(HOUR - 1)
    assert len(nodes_with_counted_drain(fleet)) == len(slurmctld.drained) <= 90


def test_freed_places_are_taken_by_waiting_nodes() -> None:
    fleet, slurmctld = fleet_of(300)
    fleet.add_fault(dead_file_server(fleet.nodes, 0, 12 * HOUR))
    fleet.run(HOUR)
    first = set(slurmctld.drained)
    for name in sorted(first)[:10]:  # an operator takes over these drains
        slurmctld.run(("scontrol", "update", f"NodeName={name}", "State=DRAIN", "Reason=mine"), fleet.now)
    fleet.run(HOUR + 1.3 * HOUR)
    ours = {name for name, node in slurmctld.drained.items() if node.reason.startswith("healthd: ")}
    assert len(ours) == 30
    assert len(ours - first) == 10


def test_requests_are_spread_after_slurmctld_returns() -> None:
    fleet, slurmctld = fleet_of(300, away=(100, 1900))
    fleet.add_fault(dead_file_server(fleet.nodes, 0, 2 * HOUR))
    fleet.run(2 * HOUR)
    assert len(nodes_with_counted_drain(fleet)) == 30
    assert max(slurmctld.tables.values()) <= 30


@settings(max_examples=25, deadline=None)
@given(
    nodes=st.integers(1, 80),
    percent=st.sampled_from([0.0, 5.0, 10.0, 33.0]),
    min_nodes=st.integers(0, 4),
    jitter=st.sampled_from([0.0, 1.0, 1800.0]),
    start=st.floats(0, 300),
    own_faults=st.sets(st.integers(0, 79), max_size=6),
    away=st.tuples(st.floats(0, 900), st.floats(0, 900)).map(sorted),
)
def test_drains_for_shared_cause_never_exceed_limit(
    nodes: int, percent: float, min_nodes: int, jitter: float, start: float, own_faults: set[int], away: list[float]
) -> None:
    limits = FleetLimits(percent, min_nodes, 100.0, nodes, jitter)
    fleet, slurmctld = fleet_of(nodes, limits, (away[0], away[1]))
    names = sorted(fleet.nodes)
    broken = {names[index] for index in own_faults if index < nodes}
    fleet.add_fault(dead_file_server(names, start, 3 * HOUR))
    fleet.add_fault(hardware_faults(broken, start + 200, 9 * HOUR))
    limit = limit_for(nodes, limits, own_hardware=False)
    for moment in range(60, int(3 * HOUR), 60):
        fleet.run(moment)
        assert len(nodes_with_counted_drain(fleet) - broken) <= limit
    assert broken <= set(slurmctld.drained)
    assert len(set(slurmctld.drained) - broken) >= min(limit, nodes) - len(broken)
    fleet.run(3 * HOUR + 1500)
    assert set(slurmctld.drained) == broken


@pytest.mark.parametrize("nodes", [3, 4])
def test_simultaneous_faults_of_three_nodes_leave_two_drained(nodes: int) -> None:
    fleet, slurmctld = fleet_of(nodes, FleetLimits(jitter_seconds=0.0))
    fleet.add_fault(dead_file_server(fleet.nodes, 0, 3 * HOUR))
    fleet.run(2 * HOUR)
    assert len(slurmctld.drained) == 2
