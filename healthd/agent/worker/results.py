"""Results of runs, from the worker's replies. The functions are pure."""

from __future__ import annotations

from healthd.agent.settings.config import CheckConfig
from healthd.agent.settings.registry import Check
from healthd.agent.worker.client import Reply
from healthd.agent.worker.requests import RunAnswer
from healthd.common.model import CheckResult, Outcome

CLOCK_STEP_SECONDS = 2.0


def run_started_at(reply: Reply, ended: float) -> float:
    """Return the start time of a run that ended at `ended` (epoch seconds).

    If the worker answered, this is exactly the time that the check received. The check's stored readings have that
    time, and a Repair refers to it.
    """
    return ended - reply.seconds if reply.message_time is None else reply.message_time


def make_result(check: Check, config: CheckConfig, reply: Reply, started: float, silent_seconds: float) -> CheckResult:
    """Return the result of a run that began at `started` (epoch seconds).

    `silent_seconds` is the time for which the check has not answered, in this run and earlier ones, or 0 if it has
    answered. A check that was skipped in the round was not silent.
    """
    run, outcome = reply.run, reply.outcome
    answer = reply.answer if isinstance(reply.answer, RunAnswer) else RunAnswer()
    findings = list(answer.findings)
    if outcome is Outcome.STUCK or (outcome is Outcome.TIMED_OUT and silent_seconds > 0):
        findings += check.overdue(config, silent_seconds)
    return CheckResult(
        check=run.check,
        instance=run.instance,
        outcome=outcome,
        started=started,
        duration_seconds=reply.seconds,
        findings=tuple(findings),
        observations=answer.observations,
        dropped_observations=answer.dropped_observations,
        repairs=answer.repairs,
        error=reply.error,
        nothing_to_check=answer.nothing_to_check[0]
        if answer.nothing_to_check and not findings and outcome is Outcome.COMPLETED
        else None,
    )
