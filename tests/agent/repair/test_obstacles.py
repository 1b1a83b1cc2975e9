"""States that prevent a repair step: a step would then harm a job or disturb a person."""

from __future__ import annotations

import pytest
from life import FEWER, RESET, XID, Node
from msgspec.structs import replace

from healthd.agent.repair.obstacles import obstacles
from healthd.common.model import Ack, ConditionState, DrainRecord, Mode, NodeState, Severity, Verdict
from healthd.common.repair_plan import Obstacle

REASON = "healthd: gpu_ecc/uncorrected 0000:1b:00.0: 1 uncorrected error"
OWN = DrainRecord(reason=REASON)
IDLE = NodeState("n1", frozenset({"IDLE", "DRAIN"}), REASON)


def verdict(*findings: object) -> Verdict:
    return Node().run(*(findings or (RESET,))).judge()  # type: ignore[arg-type]


def found(
    judged: Verdict | None = None,
    record: DrainRecord = OWN,
    node: NodeState | None = IDLE,
    mode: Mode = Mode.ACT,
    is_paused: bool = False,
) -> set[Obstacle]:
    return set(obstacles(judged or verdict(), record, node, mode, is_paused))


@pytest.mark.parametrize("mode", [Mode.DRAIN, Mode.ACT])
def test_idle_node_with_own_drain_has_no_obstacle(mode: Mode) -> None:
    assert found(mode=mode) == set()


def test_observe_does_not_require_slurm() -> None:
    assert found(mode=Mode.OBSERVE, node=None) == {Obstacle.OBSERVE}


def test_pause_is_an_obstacle() -> None:
    assert found(is_paused=True) == {Obstacle.PAUSED}


def test_shared_cause_is_an_obstacle() -> None:
    assert found(verdict(RESET, replace(FEWER, shared_cause=True))) == {Obstacle.SHARED_CAUSE}


def test_acknowledged_fault_is_an_obstacle() -> None:
    node = Node().run(RESET, check="gpu_ecc").run(XID, check="gpu_xid")
    key = XID.key
    ack = Ack(node.now + 1e6, "known", "root", Severity.CRITICAL)
    node.conditions[key] = replace(node.conditions[key], state=ConditionState.ACKNOWLEDGED, ack=ack)
    assert found(node.judge()) == {Obstacle.ACKNOWLEDGED}


def test_acknowledged_warning_is_no_obstacle() -> None:
    warning = replace(XID, severity=Severity.WARNING)
    node = Node().run(RESET, check="gpu_ecc").run(warning, check="gpu_xid")
    node.conditions[XID.key] = replace(node.conditions[XID.key], state=ConditionState.ACKNOWLEDGED)
    assert found(node.judge()) == set()


def test_unknown_state_in_slurm_is_an_obstacle() -> None:
    assert found(node=None) == {Obstacle.SLURM_UNKNOWN}


def test_node_in_service_is_an_obstacle() -> None:
    assert found(record=DrainRecord(), node=NodeState("n1", frozenset({"MIXED"}))) == {Obstacle.NOT_DRAINED}


@pytest.mark.parametrize("reason", ["under test", "healthd: mount/missing /data: not mounted"])
def test_drain_of_another_owner_is_an_obstacle(reason: str) -> None:
    node = replace(IDLE, reason=reason, reason_user="operator")
    assert found(record=DrainRecord(), node=node) == {Obstacle.FOREIGN_DRAIN}
    assert found(node=node) == {Obstacle.FOREIGN_DRAIN}


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ({"MIXED", "DRAIN"}, {Obstacle.JOBS}),
        ({"ALLOCATED", "DRAIN"}, {Obstacle.JOBS}),
        ({"IDLE", "DRAIN", "COMPLETING"}, {Obstacle.JOBS}),
        ({"IDLE", "DRAIN", "NOT_RESPONDING"}, {Obstacle.NOT_RESPONDING}),
        ({"DOWN", "DRAIN"}, {Obstacle.DOWN}),
        ({"IDLE", "DRAIN", "MAINTENANCE"}, {Obstacle.MAINTENANCE}),
        ({"IDLE", "DRAIN", "REBOOT_REQUESTED"}, {Obstacle.POWER}),
        ({"IDLE", "DRAIN", "POWERING_DOWN"}, {Obstacle.POWER}),
    ],
)
def test_state_in_slurm_is_an_obstacle(flags: set[str], expected: set[Obstacle]) -> None:
    assert found(node=replace(IDLE, flags=frozenset(flags))) == expected
