"""Timeline of healthd's reaction to a fault on this node, for `healthd explain` and the runbooks.

This module is pure and has no rules of its own. For each point in time at which the result can change, it passes a
finding through the daemon's functions for configure, absorb, judge and decide.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from typing import NamedTuple

from msgspec.structs import replace

from healthd.agent.conditions.absorb import absorb_events, absorb_result, as_configured
from healthd.agent.conditions.verdict import judge
from healthd.agent.settings.config import CheckConfig, configured_severity
from healthd.agent.slurm.affected_jobs import requeuing, with_switch_side
from healthd.agent.slurm.policy import Policy, decide
from healthd.common.model import (
    CheckResult,
    Condition,
    ConditionKey,
    ConditionState,
    Drain,
    DrainRecord,
    Ends,
    Explain,
    Finding,
    KernelEvent,
    Mode,
    NodeState,
    Outcome,
    Severity,
    Worsens,
)

FIRST_SEEN = 1_000_000_000.0  # time at which the fault is first seen; any value works
_BOOT = "this boot"
_IN_SERVICE = NodeState("", frozenset({"IDLE"}))


class Effect(enum.Enum):
    """healthd's reaction to a fault."""

    WAITS = "waits"  # the condition is pending: the fault must last for its confirmation time
    RECORDS = "records"
    WARNS = "warns"
    DRAINS = "drains"
    REQUEUES = "requeues"  # drains, and requeues the jobs that the fault hit


class RackRequeue(enum.Enum):
    """When a CRITICAL fault on a tray of an NVL72 rack requeues jobs."""

    ALWAYS = "always"
    NOT_IF_SHARED = "not_if_shared"  # not if the finding has a shared cause
    NOT_IF_ON_ALL_GPUS = "not_if_on_all_gpus"  # not if all GPUs of the tray have the fault


class Step(NamedTuple):
    """healthd's reaction, beginning `after_seconds` after the fault is first seen.

    `effect` is the reaction with this node's settings, and `effect_in_act` the reaction in mode "act".
    """

    after_seconds: float
    severity: Severity
    effect: Effect
    effect_in_act: Effect


def possible_findings(code: str, explain: Explain, config: CheckConfig) -> list[Finding]:
    """Return a finding with this code for each possible severity, worst first. The site's settings are not applied
    yet."""
    worsens = explain.worsens
    finding = Finding(
        configured_severity(explain, config),
        code,
        config.name,
        "",
        explain.clears,
        confirm_seconds=_seconds(config, explain.confirm),
        worsens=Worsens(_seconds(config, worsens.setting), worsens.severity) if worsens else None,
        shared_cause=explain.shared is True,
        expects=explain.expects,
        window_seconds=_seconds(config, explain.window),
    )
    return [finding, *(_milder(finding, severity, explain, config) for severity in explain.also)]


def _milder(finding: Finding, severity: Severity, explain: Explain, config: CheckConfig) -> Finding:
    """Return the finding with this severity from `explain.also`, and with that severity's ending."""
    if severity >= Severity.DEGRADED:
        return replace(finding, severity=severity)
    recorded = explain.recorded if severity is Severity.INFO else None
    ends = recorded or explain.milder or Ends(explain.clears, explain.window)
    return replace(finding, severity=severity, clears=ends.clears, window_seconds=_seconds(config, ends.window))


def _seconds(config: CheckConfig, setting: str) -> float:
    """Return the value of a duration setting, or 0 if a site check's Config does not have it."""
    value = getattr(config, setting, 0.0)
    return float(value) if isinstance(value, int | float) else 0.0


def timeline(
    finding: Finding, config: CheckConfig, policy: Policy, from_kernel_log: bool = False, observed: bool = False
) -> tuple[Step, ...]:
    """Return the changes in healthd's reaction while the fault lasts, for a node that is in service and not drained.

    finding          the finding as the check yields it
    from_kernel_log  whether the kernel log reported the fault
    observed         whether the kernel log is a file in which users can forge lines
    """
    configured = as_configured(finding, config)
    moments = {0.0, configured.confirm_seconds, configured.worsens.after_seconds if configured.worsens else 0.0}
    conditions: dict[ConditionKey, Condition] = {}
    steps: list[Step] = []
    for seconds in [0.0] if from_kernel_log else sorted(moments):
        now = FIRST_SEEN + seconds
        conditions = (
            _after_kernel_line(configured, now, observed)
            if from_kernel_log
            else _after_run(conditions, configured, config, now)
        )
        step = Step(
            seconds,
            conditions[configured.key].severity,
            _effect(conditions, configured.key, policy, now),
            _effect(conditions, configured.key, replace(policy, mode=Mode.ACT, paused_until=0.0), now),
        )
        if not steps or steps[-1][1:] != step[1:]:
            steps.append(step)
    return tuple(steps)


def rack_requeue(finding: Finding, shared: bool | None, config: CheckConfig, from_kernel_log: bool) -> RackRequeue:
    """Return when a finding with the highest severity requeues on a rack's tray. `shared` is `Explain.shared`."""
    gpus = ("first GPU", "second GPU")
    worst = replace(as_configured(finding, config), severity=Severity.CRITICAL, confirm_seconds=0.0, worsens=None)

    def requeues(finding: Finding) -> bool:
        conditions: dict[ConditionKey, Condition] = {}
        for gpu in gpus:
            found = replace(finding, subject=gpu)
            conditions |= (
                _after_kernel_line(found, FIRST_SEEN, observed=False)
                if from_kernel_log
                else _after_run({}, found, config, FIRST_SEEN)
            )
        return bool(requeuing(judge(with_switch_side(conditions, gpus), {}, (), 0.0).causes, gpus, FIRST_SEEN + 3600.0))

    if shared is not False and not requeues(replace(worst, shared_cause=True)):
        return RackRequeue.NOT_IF_SHARED
    return RackRequeue.ALWAYS if requeues(worst) else RackRequeue.NOT_IF_ON_ALL_GPUS


def _after_run(
    conditions: Mapping[ConditionKey, Condition], finding: Finding, config: CheckConfig, now: float
) -> dict[ConditionKey, Condition]:
    """Return the conditions after a run of the check has reported the finding."""
    result = CheckResult(finding.code.partition("/")[0], config.name, Outcome.COMPLETED, now, 0.0, (finding,))
    return absorb_result(conditions, result, config.clear_after, _BOOT, ())


def _after_kernel_line(finding: Finding, now: float, observed: bool) -> dict[ConditionKey, Condition]:
    """Return the conditions after a kernel line has reported the finding."""
    event = KernelEvent("", time=now, last_time=now, sequence=1, boot_id=_BOOT, observed=observed)
    check = finding.code.partition("/")[0]
    return absorb_events({}, check, [replace(finding, events=(1,))], {1: event}, frozenset({1}), _BOOT, ())


def _effect(conditions: Mapping[ConditionKey, Condition], key: ConditionKey, policy: Policy, now: float) -> Effect:
    decision = decide(judge(conditions, {}, (), 0.0), _IN_SERVICE, DrainRecord(), policy, now)
    if isinstance(decision, Drain):
        return Effect.REQUEUES if decision.requeue else Effect.DRAINS
    if conditions[key].state is ConditionState.PENDING:
        return Effect.WAITS
    return Effect.WARNS if conditions[key].severity >= Severity.WARNING else Effect.RECORDS
