"""The life of one node with one check: its findings become conditions, a verdict and a decision by the real rules.

Slurm does at once what healthd decides. Used by the stories of the catalogue: a fault under load, the drain, the end of
the load, the repair.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from types import ModuleType
from typing import Any

from fakes import BOOT, NOW
from kernel_lines import event_of
from msgspec.structs import replace

from healthd.agent.conditions import endings, intake, verdict
from healthd.agent.conditions.ledger import Ledger, with_conditions
from healthd.agent.settings.config import CheckConfig
from healthd.agent.settings.registry import Check
from healthd.agent.slurm.affected_jobs import rack_gpus, with_switch_side
from healthd.agent.slurm.policy import Policy, decide
from healthd.common.history import History, Series, update, without_growth
from healthd.common.model import (
    CheckResult,
    Clears,
    Condition,
    ConditionKey,
    ConditionState,
    Drain,
    DrainRecord,
    Finding,
    Inventory,
    KernelEvent,
    Mode,
    NodeState,
    Observation,
    Outcome,
    Repair,
    Resume,
    RunName,
    Severity,
)
from healthd.host.host import Host
from healthd.nvidia.nvml import NvmlError

RUN_SECONDS = 0.25  # from the start of a run, which the check uses as time, to its end, when it is evaluated


class Story:
    """A node that runs jobs until it is drained. `run_check` is one run of the check, 5 minutes after the last one.

    drained    a drain ends the jobs by the next run, so there is no load
    requeued   the last drain also requeued the jobs
    held       the reason of an operator's drain, "" if there is none
    inventory  the hardware of this node; with an NVLink domain, it is a rack's tray
    """

    def __init__(
        self, module: ModuleType, config: CheckConfig | None = None, inventory: Inventory | None = None
    ) -> None:
        self.check = Check(module.__name__.rpartition(".")[2], module)
        self.config = config or module.Config()
        self.inventory = inventory or Inventory()
        self.now = NOW
        self.ledger = Ledger(boot_id=BOOT)
        self.history_series: dict[str, Series] = {}
        self.slurm = DrainRecord()
        self.requeued = False
        self.operator_reason = ""
        self.paused_until = self.trusted_since = 0.0
        self.result: CheckResult | None = None

    @property
    def boot_id(self) -> str:
        return self.ledger.boot_id

    @property
    def conditions(self) -> dict[ConditionKey, Condition]:
        return self.ledger.by_key()

    @conditions.setter
    def conditions(self, conditions: dict[ConditionKey, Condition]) -> None:
        self.ledger = with_conditions(self.ledger, conditions)

    @property
    def cleared(self) -> tuple[Condition, ...]:
        return self.ledger.cleared

    @property
    def events(self) -> tuple[KernelEvent, ...]:
        return self.ledger.events

    @property
    def drained(self) -> bool:
        return bool(self.slurm.reason)

    @property
    def codes(self) -> list[str]:
        """Return the sorted codes of the open conditions."""
        return sorted(c.code for c in self.conditions.values() if c.state is ConditionState.OPEN)

    def run_check(self, host: Host, minutes: float = 5.0) -> Story:
        """Advance time, run the check and apply the results. Exceptions of the check are raised after that."""
        self.wait(minutes)
        items: list[Any] = []
        try:
            items.extend(self.check.module.run(host, self.config, History(self.history_series, self.now, self.boot_id)))
        except (OSError, ValueError, RuntimeError, NvmlError):
            self._take_items(Outcome.FAILED, items)
            raise
        return self._take_items(Outcome.COMPLETED, items)

    def _take_items(self, outcome: Outcome, items: list[Any]) -> Story:
        observations = [item for item in items if isinstance(item, Observation)]
        self.history_series = update(self.history_series, observations, self.now, self.boot_id)
        repairs = tuple(item for item in items if isinstance(item, Repair))
        self._absorb(outcome, [item for item in items if isinstance(item, Finding)], repairs)
        return self._decide()

    def hang(self, silent_seconds: float, minutes: float = 5.0) -> Story:
        """Advance time with a check that has not answered for `silent_seconds`."""
        self.wait(minutes)
        self._absorb(Outcome.TIMED_OUT, list(self.check.overdue(self.config, silent_seconds)))
        return self._decide()

    def _absorb(self, outcome: Outcome, found: list[Finding], repairs: tuple[Repair, ...] = ()) -> None:
        result = CheckResult(
            self.check.name, self.config.name, outcome, self.now, RUN_SECONDS, tuple(found), repairs=repairs
        )
        self.ledger, self.result = intake.take_result(self.ledger, result, self.config, self.now)

    def run_checks(self, host: Host, times: int, minutes: float = 5.0) -> Story:
        for _ in range(times):
            self.run_check(host, minutes)
        return self

    def take_event(self, event: KernelEvent, node: Inventory | None = None) -> Story:
        """Apply a kernel event now. `node`: the inventory at that time."""
        self.now += 1.0
        event = replace(event, time=self.now, last_time=self.now, boot_id=self.boot_id)
        ledger = replace(self.ledger, inventory=node or self.inventory)
        applied = intake.take_kernel_events(ledger, [event], [(self.check, self.config)], self.now)
        assert not applied.failures
        self.ledger = applied.ledger
        return self._decide()

    def log_lines(self, *lines: str, node: Inventory | None = None) -> Story:
        """Log these kernel lines; each must be an event."""
        for line in lines:
            self.take_event(event_of(line), node)
        return self

    def wait(self, minutes: float) -> Story:
        """Advance time without a run. A drained node has no load, so windows do not advance unless a repair was
        recorded."""
        self.now += minutes * 60
        self.conditions = endings.after_quiet_time(
            self.conditions, minutes * 60, not (self.drained or self.operator_reason), self.now
        )
        return self

    def decide_after(self, minutes: float) -> Story:
        """Advance time without a run, and decide again."""
        return self.wait(minutes)._decide()

    def reboot(self) -> Story:
        self.now += 300.0
        self.ledger = replace(self.ledger, boot_id=self.boot_id + "'")
        self.conditions = endings.after_boot(self.conditions, self.boot_id, self.now)
        return self._decide()

    def reset(self, subject: str) -> Story:
        """Record a GPU reset with its evidence."""
        repair = Repair(Clears.GPU_RESET, subject, "its counters fell", before=self.now)
        self.conditions = endings.after_repairs(self.conditions, [repair], self.now)
        return self._decide()

    def repaired(self, code: str, subject: str | None = None) -> Story:
        """Apply `healthd repaired CODE [PART]` of an operator."""
        for condition in self.conditions.values():
            if condition.code == code and subject in (None, condition.subject):
                self.history_series = without_growth(self.history_series, condition.subject)
        self.conditions = endings.repaired(self.conditions, code, subject, "an engineer", self.now)
        return self._decide()

    def pause(self, minutes: float) -> Story:
        """Apply `healthd pause`."""
        self.paused_until = self.now + minutes * 60
        return self

    def drain_by_operator(self, reason: str) -> Story:
        """Drain the node as an operator, or resume it ("")."""
        self.operator_reason = reason
        return self._decide()

    def _decide(self) -> Story:
        if self.paused_until and self.now >= self.paused_until:
            self.paused_until, self.trusted_since = 0.0, self.paused_until
        names = [RunName(self.check.name, self.config.name)] if self.check.has_run else []
        results = {names[0]: self.result} if names and self.result else {}
        self.conditions = dict(with_switch_side(self.conditions, rack_gpus(self.inventory)))
        node_verdict = verdict.judge(self.conditions, results, names, self.trusted_since)
        reason = self.operator_reason or self.slurm.reason
        node = NodeState("n1", frozenset({"IDLE", "DRAIN"} if reason else {"ALLOCATED"}), reason)
        policy = Policy(Mode.ACT, self.paused_until, rack_gpus=rack_gpus(self.inventory))
        decision = decide(node_verdict, node, self.slurm, policy, self.now)
        if isinstance(decision, Drain) and not self.operator_reason:
            self.requeued = decision.requeue
            self.slurm = DrainRecord(reason=decision.reason)
        elif isinstance(decision, Resume):
            self.slurm = DrainRecord()
            self.requeued = False
        return self


class MultiCheckNode:
    """Several checks that run on one node in the same rounds. Each is evaluated and drained for independently.

    seen     codes of all conditions that were ever open with WARNING or above
    failed   names of the checks that failed in the last round
    """

    def __init__(self, stories: Iterable[Story]) -> None:
        self.stories = list(stories)
        self.seen: set[str] = set()
        self.failed: list[str] = []

    @property
    def drained(self) -> bool:
        return any(story.drained for story in self.stories)

    @property
    def codes(self) -> list[str]:
        return sorted(code for story in self.stories for code in story.codes)

    def run_round(self, host: Host, minutes: float = 5.0) -> MultiCheckNode:
        self.failed = []
        for story in self.stories:
            if (story.check.when == "idle" and not (story.operator_reason or self.drained)) or not story.check.has_run:
                story.wait(minutes)
                continue
            try:
                story.run_check(host, minutes)
            except (OSError, ValueError, RuntimeError, NvmlError):
                self.failed.append(story.check.name)
        return self._record_seen()

    def run_rounds(self, host: Host, times: int, minutes: float = 5.0) -> MultiCheckNode:
        for _ in range(times):
            self.run_round(host, minutes)
        return self

    def apply_to_each(self, action: Callable[[Story], Any]) -> MultiCheckNode:
        """Apply an action to every story: apply_to_each(Story.reboot), apply_to_each(lambda story: story.pause(30))."""
        for story in self.stories:
            action(story)
        return self._record_seen()

    def story_of(self, check: str) -> Story:
        return next(story for story in self.stories if story.check.name == check)

    def _record_seen(self) -> MultiCheckNode:
        for story in self.stories:
            self.seen |= {
                c.code
                for c in story.conditions.values()
                if c.state is ConditionState.OPEN and c.severity >= Severity.WARNING
            }
        return self
