"""The lifetime of conditions on one node, with a clock that the test sets."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from msgspec.structs import replace

from healthd.agent.conditions import absorb, endings, verdict
from healthd.common.model import (
    CheckResult,
    Clears,
    Condition,
    ConditionState,
    Finding,
    KernelEvent,
    Outcome,
    Repair,
    Severity,
    Verdict,
    Worsens,
)

T0 = 1_800_000_000.0
DAY = 86400.0
GPU = "0000:1b:00.0"
PENDING, OPEN, ACKNOWLEDGED, CLEARED = ConditionState

GONE = Finding(Severity.CRITICAL, "gpu_count/missing", GPU, "not shown by NVML", Clears.REBOOT)
RESET = Finding(Severity.CRITICAL, "gpu_ecc/uncorrected", GPU, "1 uncorrected error", Clears.GPU_RESET)
LINK = Finding(Severity.DEGRADED, "ib_link/down", "mlx5_0/1", "port is down", confirm_seconds=60.0)
FEWER = Finding(Severity.DEGRADED, "gpu_count/fewer_than_expected", "", "7 of 8")
ODD = Finding(Severity.WARNING, "gpu_count/odd", "", "m")
ROWS = Finding(Severity.CRITICAL, "gpu_row_remap/failed", GPU, "failed", Clears.OPERATOR, evidence="failure flag 1")
XID = Finding(Severity.CRITICAL, "gpu_xid/79", GPU, "fell off the bus", Clears.REBOOT)
HANG = Finding(Severity.WARNING, "gpu_access/hang", "", "no answer", worsens=Worsens(240.0, Severity.DEGRADED))
RATE = Finding(Severity.DEGRADED, "pcie_aer/rate", GPU, "many errors", Clears.WINDOW, window_seconds=3600.0)


RUN_SECONDS = 0.5


class Node:
    """The conditions of a node and the events that change them. Cleared conditions go to `cleared`, as in the
    ledger."""

    def __init__(self) -> None:
        self.now = T0
        self.boot = "boot1"
        self.conditions: dict[tuple[str, str], Condition] = {}
        self.cleared: list[Condition] = []
        self.results: dict[tuple[str, str], CheckResult] = {}
        self.sequence = 0
        self.trusted_since = T0 - 1

    def take(self, conditions: dict[tuple[str, str], Condition]) -> None:
        self.cleared += [c for c in conditions.values() if c.state is CLEARED]
        self.conditions = {key: c for key, c in conditions.items() if c.state is not CLEARED}

    def run(
        self,
        *findings: Finding,
        check: str = "",
        instance: str = "",
        outcome: Outcome = Outcome.COMPLETED,
        clear_after: int = 2,
        repairs: Sequence[Repair] = (),
        after: float = 300.0,
    ) -> Node:
        """Simulate one run of a check, `after` seconds from now.

        The name of the check is `check`, or that of its findings, or that of the open conditions.
        """
        self.now += after
        codes = [f.code for f in findings] or [c.code for c in self.conditions.values()] or ["none/"]
        name = check or codes[0].partition("/")[0]
        start = self.now - RUN_SECONDS
        result = CheckResult(name, instance, outcome, start, RUN_SECONDS, findings, repairs=tuple(repairs))
        self.results[name, instance] = result
        self.take(absorb.absorb_result(self.conditions, result, clear_after, self.boot, self.cleared))
        if outcome in (Outcome.COMPLETED, Outcome.FAILED):
            self.take(endings.after_repairs(self.conditions, repairs, self.now))
        return self

    def event(self, finding: Finding, after: float = 10.0, **changes: Any) -> KernelEvent:
        """Absorb a kernel event that causes the finding, at the time of the event."""
        self.now += after
        self.sequence += 1
        event = KernelEvent("xid", "79", GPU, self.now, boot_id=self.boot, last_time=self.now, sequence=self.sequence)
        event = replace(event, **changes)
        self.absorb_events(finding, event)
        return event

    def absorb_events(self, finding: Finding, *events: KernelEvent, touched: Sequence[int] | None = None) -> None:
        by_sequence = {event.sequence: event for event in events}
        finding = replace(finding, events=tuple(by_sequence))
        self.take(
            absorb.absorb_events(
                self.conditions,
                finding.code.partition("/")[0],
                [finding],
                by_sequence,
                frozenset(by_sequence if touched is None else touched),
                self.boot,
                self.cleared,
            )
        )

    def reboot(self, after: float = 600.0) -> Node:
        self.now += after
        self.boot += "+"
        self.take(endings.after_boot(self.conditions, self.boot, self.now))
        return self

    def quiet(self, seconds: float, loaded: bool = True) -> Node:
        self.now += seconds
        self.take(endings.after_quiet_time(self.conditions, seconds, loaded, self.now))
        return self

    def operator_resumes(self) -> Node:
        self.take(endings.acknowledge_resumed(self.conditions, self.now, self.now))
        return self

    def repaired(self, code: str, subject: str | None = None) -> Node:
        self.take(endings.repaired(self.conditions, code, subject, "root", self.now))
        return self

    def judge(self, *expected: tuple[str, str]) -> Verdict:
        return verdict.judge(self.conditions, self.results, expected, self.trusted_since)

    @property
    def only(self) -> Condition:
        (condition,) = self.conditions.values()
        return condition

    @property
    def states(self) -> list[ConditionState]:
        return [c.state for c in self.conditions.values()]

    @property
    def cleared_by(self) -> list[str]:
        return [c.cleared_by for c in self.cleared]
