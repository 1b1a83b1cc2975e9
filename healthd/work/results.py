"""From what the worker said of one run of a check to its result, as the site wants it judged: pure."""

from __future__ import annotations

import functools
import json
from dataclasses import dataclass, fields

from healthd.config import CheckConfig
from healthd.convert import ConvertError, load
from healthd.judge.absorb import as_configured
from healthd.model import CheckResult, Finding, Observation, Outcome, Repair
from healthd.settings.registry import Check
from healthd.work.runner import Reply

CLOCK_STEP_SECONDS = 2.0


@dataclass(frozen=True, slots=True)
class Said:
    """What the worker says of one run, as it comes over the stream. `observations`: JSON in a text; `past`: the
    counters' past, which only the worker reads."""

    findings: tuple[Finding, ...] = ()
    observations: str = "[]"
    repairs: tuple[Repair, ...] = ()
    past: str = ""


SAID = tuple(f.name for f in fields(Said))


@dataclass(frozen=True, slots=True)
class _Observations:
    items: tuple[Observation, ...]


@functools.lru_cache(maxsize=64)
def observations_of(text: str) -> tuple[Observation, ...]:
    """The observations in a text, kept for when it comes again: on a healthy node most counters stand still. Raises
    ConvertError."""
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
    try:
        said = load(Said, {name: reply.table[name] for name in SAID if name in reply.table})
        observations = observations_of(said.observations)
    except ConvertError as problem:
        said, observations, outcome = Said(), (), Outcome.FAILED
        error = f"the worker's answer: {problem}"
    findings = list(said.findings)
    if outcome in (Outcome.TIMED_OUT, Outcome.STUCK) and silent_seconds > 0:
        findings += check.overdue(config, silent_seconds)
    return CheckResult(
        check=reply.request.table["check"],
        instance=reply.request.table["instance"],
        outcome=outcome,
        started=started,
        duration_seconds=reply.seconds,
        findings=tuple(as_configured(finding, config) for finding in findings),
        observations=observations,
        repairs=said.repairs,
        error=error,
    )
