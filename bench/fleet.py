"""Simulate a fleet of healthds on one clock. Each node makes healthd's real decisions, against a given slurmctld.

The decisions are made by `reconcile` with policy.py and fleet_limit.py, with the delays of `SlurmDriver`, in order of
time. Only the node itself is modelled: a condition opens at the node's first round after the fault begins, and ends at
the second round after the fault has ended, as with the mount check.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Generator, Iterable
from dataclasses import dataclass, field
from typing import Protocol

from msgspec.structs import replace

from healthd.agent.scheduler.due import phase
from healthd.agent.settings.config import FleetLimits, Settings
from healthd.agent.slurm import fleet_limit
from healthd.agent.slurm.driver import SlurmDriver
from healthd.agent.slurm.policy import Policy, needs_no_query
from healthd.agent.slurm.reconcile import ReconcileReport, SaveRecord, reconcile
from healthd.common.model import Clears, Condition, ConditionState, DrainRecord, Health, Mode, Severity, Verdict
from healthd.common.slurm.commands import Command, CommandResult

ROUND_SECONDS = 300.0
CONFIRM_SECONDS = 30.0
HEALTHY = Verdict(Health.HEALTHY, may_resume=True)


class Controller(Protocol):
    def run(self, argv: tuple[str, ...], now: float) -> tuple[CommandResult, float]:
        """Return the result of a command and the time at which it ends."""


@dataclass(frozen=True, slots=True)
class Fault:
    """A fault of these nodes.

    Times are seconds of the simulation. A fault of the node's own hardware is in the kernel log at once.
    """

    nodes: frozenset[str]
    start: float
    end: float
    shared: bool


def dead_file_server(nodes: Iterable[str], start: float, end: float) -> Fault:
    return Fault(frozenset(nodes), start, end, shared=True)


def hardware_faults(nodes: Iterable[str], start: float, end: float) -> Fault:
    return Fault(frozenset(nodes), start, end, shared=False)


def condition(fault: Fault, since: float) -> Condition:
    shared = ("mount", "mount/hang", "/data", "/data does not answer")
    own = ("gpu_xid", "gpu_xid/79", "0000:61:00.0", "Xid 79: GPU has fallen off the bus")
    check, code, subject, message = shared if fault.shared else own
    return Condition(
        check=check,
        instance="",
        code=code,
        subject=subject,
        severity=Severity.DEGRADED,
        message=message,
        clears=Clears.PASS,
        state=ConditionState.OPEN,
        first_seen=since,
        last_seen=since,
        count=1,
        boot_id="b",
        shared_cause=fault.shared,
        opened_at=since,
    )


@dataclass(slots=True)
class HealthdNode:
    """State of one node's daemon: its verdict, its record of a drain, and its running query."""

    name: str
    driver: SlurmDriver
    verdict: Verdict = HEALTHY
    memory: DrainRecord = field(default_factory=DrainRecord)
    query: Generator[Command | SaveRecord, CommandResult | None, ReconcileReport] | None = None
    query_number: int = 0  # number of the next query; queries that were planned before are void
    changed: bool = False  # the verdict changed during a query
    hold_count: int = 0  # number of times that the fleet limit delayed the drain


class Fleet:
    """The nodes and the events of the simulation. `run` advances the clock to a time."""

    def __init__(self, names: list[str], controller: Controller, limits: FleetLimits, epoch: float = 1.8e9) -> None:
        self.controller = controller
        self.now, self.epoch = epoch - 86400.0, epoch  # start time of the daemons: the day before
        self.policy = Policy(Mode.ACT, fleet=limits)
        self.nodes = {name: HealthdNode(name, self._driver(name)) for name in names}
        self.now = epoch
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._number = itertools.count()
        self._faults: dict[str, dict[Fault, Condition]] = {name: {} for name in names}

    def _driver(self, name: str) -> SlurmDriver:
        clock = lambda: self.now  # noqa: E731
        return SlurmDriver(Settings(node_name=name), "b", lambda _: None, lambda: True, clock, clock)

    def at(self, when: float, action: Callable[[], None]) -> None:
        heapq.heappush(self._events, (when, next(self._number), action))

    def run(self, until: float) -> None:
        while self._events and self._events[0][0] <= self.epoch + until:
            self.now, _, action = heapq.heappop(self._events)
            action()
        self.now = self.epoch + until

    # faults of nodes

    def add_fault(self, fault: Fault) -> None:
        for name in sorted(fault.nodes):
            start, end = self.epoch + fault.start, self.epoch + fault.end
            opens = self._round(name, start) + CONFIRM_SECONDS if fault.shared else start
            self.at(opens, lambda name=name, opens=opens: self._open(name, fault, opens))  # type: ignore[misc]
            ends = self._round(name, end) + ROUND_SECONDS
            self.at(ends, lambda name=name: self._close(name, fault))  # type: ignore[misc]

    def _round(self, name: str, after: float) -> float:
        """Return the node's first round after a time."""
        offset = phase(name, ROUND_SECONDS)
        return offset + ((after - offset) // ROUND_SECONDS + 1) * ROUND_SECONDS

    def _open(self, name: str, fault: Fault, since: float) -> None:
        self._faults[name][fault] = condition(fault, since)
        self._judge(name)

    def _close(self, name: str, fault: Fault) -> None:
        if self._faults[name].pop(fault, None):
            self._judge(name)

    # the daemon: when it queries Slurm, and what it does then

    def _judge(self, name: str) -> None:
        node = self.nodes[name]
        causes = tuple(self._faults[name].values())
        node.verdict = Verdict(Health.DEGRADED, causes, causes) if causes else HEALTHY
        self._query_slurm(node)

    def _query_slurm(self, node: HealthdNode) -> None:
        if node.query is not None:
            node.changed = True
            return
        node.query_number += 1
        clock = lambda: self.now  # noqa: E731
        node.query = reconcile(node.verdict, node.memory, self.policy, node.name, "b", clock)
        self._advance(node, None)

    def _advance(self, node: HealthdNode, answer: CommandResult | None) -> None:
        assert node.query is not None
        try:
            step = node.query.send(answer)
            while isinstance(step, SaveRecord):
                node.memory = step.record
                step = node.query.send(None)
        except StopIteration as end:
            node.query = None
            self._query_ended(node, end.value)
            return
        result, ended = self.controller.run(step.argv, self.now)
        self.at(ended, lambda: self._advance(node, replace(result, started=self.now)))

    def _query_ended(self, node: HealthdNode, report: ReconcileReport) -> None:
        hold, node.memory = node.memory.hold, report.record
        node.hold_count += (
            report.record.hold is not None and report.record.hold != hold and report.record.hold.times > 0
        )
        if node.changed:
            node.changed = False
            self._query_slurm(node)
            return
        next_query = self.now + node.driver.retry_seconds(report)
        own = fleet_limit.is_own_hardware(node.verdict.causes)
        waits = fleet_limit.must_wait(node.memory.hold, own, self.now)
        if not needs_no_query(node.verdict, node.memory) and not waits:
            next_query = min(next_query, self._round(node.name, self.now))
        if next_query < float("inf"):
            number = node.query_number
            self.at(
                next_query,
                lambda: self._query_slurm(node) if node.query_number == number and node.query is None else None,
            )
