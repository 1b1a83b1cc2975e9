"""From what the worker said of one run of a check to its result: pure."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from healthd.agent.settings.config import CheckConfig
from healthd.agent.settings.registry import Check
from healthd.agent.worker.client import Reply
from healthd.agent.worker.unchanged import SAID_AGAIN
from healthd.common.codec import ConvertError, load
from healthd.common.model import CheckResult, Finding, NothingToCheck, Observation, Outcome, Repair, RunName
from healthd.common.values import dataclass

CLOCK_STEP_SECONDS = 2.0


@dataclass(frozen=True, slots=True)
class Said:
    """What the worker says of one run, as it comes over the stream. `observations`: JSON in a text; `past`: the
    counters' past, which only the worker reads; `left_out`: how many more observations there were."""

    findings: tuple[Finding, ...] = ()
    observations: str = "[]"
    left_out: int = 0
    repairs: tuple[Repair, ...] = ()
    nothing: tuple[NothingToCheck, ...] = ()
    past: str = ""


SAID = tuple(f.name for f in fields(Said))


@dataclass(frozen=True, slots=True)
class _Observations:
    items: tuple[Observation, ...]


_last: dict[RunName, tuple[list[Any], Said, tuple[Observation, ...]]] = {}


def said_of(run: RunName, table: Mapping[str, Any]) -> tuple[Said, tuple[Observation, ...]]:
    """What the worker said of a run, and the observations in it. On a healthy node most counters stand still, and it
    says what it said last: only that is kept, since a text with a temperature in it never comes again. Raises
    ConvertError."""
    news = [table.get(name) for name in SAID_AGAIN]
    before = _last.get(run)
    if before is not None and before[0] == news and isinstance(table.get("past"), str):
        return before[1:]
    said = load(Said, {name: table[name] for name in SAID if name in table})
    if before is not None and before[1].observations == said.observations:
        observations = before[2]
    else:
        observations = _observations_of(said.observations)
    _last[run] = news, dataclasses.replace(said, past=""), observations
    return said, observations


def _observations_of(text: str) -> tuple[Observation, ...]:
    try:
        return load(_Observations, {"items": json.loads(text)}).items
    except (ValueError, RecursionError) as error:
        raise ConvertError(f"observations: {error}") from None


def began(reply: Reply, ended: float) -> float:
    """When a run that ended at `ended` (epoch) began.

    If the run was answered, it is exactly the moment that its check was told: the check's past has its readings at that
    moment, and a Repair names it.
    """
    return ended - reply.seconds if reply.told is None else reply.told


def result_of(check: Check, config: CheckConfig, reply: Reply, started: float, silent_seconds: float) -> CheckResult:
    """The result of a run that began at `started` (epoch), as its check was told.

    `silent_seconds`: for how long the check has not answered, in this run and those before; 0 if it did. A check
    that never had its turn was not silent.
    """
    outcome, error = reply.outcome, reply.error
    run = reply.run
    try:
        said, observations = said_of(run, reply.table)
    except ConvertError as problem:
        said, observations, outcome = Said(), (), Outcome.FAILED
        error = f"the worker's answer: {problem}"
    findings = list(said.findings)
    if outcome is Outcome.STUCK or (outcome is Outcome.TIMED_OUT and silent_seconds > 0):
        findings += check.overdue(config, silent_seconds)
    return CheckResult(
        check=run.check,
        instance=run.instance,
        outcome=outcome,
        started=started,
        duration_seconds=reply.seconds,
        findings=tuple(findings),
        observations=observations,
        left_out=said.left_out,
        repairs=said.repairs,
        error=error,
        nothing=said.nothing[0] if said.nothing and not findings and outcome is Outcome.COMPLETED else None,
    )
