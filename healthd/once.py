"""One round of checks, now: for `healthd check`. No ledger, no past and no daemon; findings count at face value."""

from __future__ import annotations

import dataclasses
import select
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import healthd
from healthd import schedule, verdict
from healthd.config import CheckConfig, Loaded, Settings
from healthd.host import Host
from healthd.kernel_fold import fold_events
from healthd.kernel_log import event_of, open_source
from healthd.model import CheckResult, Condition, ConditionState, Inventory, KernelEvent, Outcome, Verdict
from healthd.registry import Check
from healthd.results import result_of
from healthd.runner import Reply, Request, Runner
from healthd.schedule import Job
from healthd.status import condition_json, result_json

CLOSE_NVML_SECONDS = 10.0
MOST_READS = 1000  # of the kernel log, 1000 lines each: a log that is written faster than it is read ends too

Conditions = dict[tuple[str, str], Condition]
KernelLog = Callable[[], list[KernelEvent]]


@dataclass(frozen=True, slots=True)
class Look:
    """What one round found. `results` in the order of the runs."""

    node_name: str
    time: float
    verdict: Verdict
    results: tuple[CheckResult, ...]


def names_to_run(loaded: Loaded, checks: Mapping[str, Check], kernel_log: KernelLog | None) -> list[tuple[str, str]]:
    """The (check, instance) that one round now would run: those that only listen need a kernel log to listen to."""
    return [name for name in loaded.checks if checks[name[0]].runs or kernel_log]


def look(loaded: Loaded, checks: Mapping[str, Check], runner: Runner, kernel_log: KernelLog | None) -> Look:
    """Run every check of `loaded` once. Ends within the checks' deadlines, whatever hangs."""
    settings = loaded.settings
    boot_id = Host(settings.root).boot_id()
    started = time.time()
    conditions: Conditions = {}
    results = _run_all(loaded, checks, runner, boot_id)
    for result in results:
        config = loaded.checks[result.check, result.instance]
        conditions = verdict.absorb_result(conditions, result, config.clear_after, boot_id, ())
    for name, config in loaded.checks.items():
        if kernel_log and not checks[name[0]].runs:
            result, conditions = _listen(checks[name[0]], config, kernel_log, boot_id, conditions)
            results.append(result)
    judged = verdict.judge(
        {key: _at_face_value(condition) for key, condition in conditions.items()},
        {(result.check, result.instance): result for result in results},
        [(result.check, result.instance) for result in results],
        trusted_since=0.0,
    )
    return Look(settings.node_name, started, judged, tuple(results))


def _at_face_value(condition: Condition) -> Condition:
    """A finding that would still have to last for its confirm time counts: there is no second look here."""
    if condition.state is not ConditionState.PENDING:
        return condition
    return dataclasses.replace(condition, state=ConditionState.OPEN, opened_at=condition.first_seen)


# --- what the worker does


def _run_all(loaded: Loaded, checks: Mapping[str, Check], runner: Runner, boot_id: str) -> list[CheckResult]:
    """GPU checks first, and the driver closed right after them."""
    jobs = [
        Job(name, instance, checks[name].resource(instance), 1.0, config.timeout_seconds)
        for (name, instance), config in loaded.checks.items()
        if checks[name].runs
    ]
    began = time.monotonic()
    silent_since: dict[str, float] = {}  # resource -> when the run began that hangs in it
    results = []
    for job in schedule.due(jobs, {}, {}, "", 0.0):
        if job.uses != "nvml":
            _close_nvml(runner)
        table = {"op": "run", "check": job.check, "instance": job.instance, "config": loaded.tables[job.name]}
        request = Request(job.uses, job.timeout_seconds, {**table, "past": "", "boot_id": boot_id})
        if time.monotonic() - began >= loaded.settings.round_timeout_seconds:
            reply = Reply(request, Outcome.TIMED_OUT, 0.0, {}, "the round was out of time before its turn")
        else:
            reply = _ask(runner, request)
        now = time.monotonic()
        if reply.outcome is Outcome.TIMED_OUT and reply.seconds:
            silent_since.setdefault(job.uses, now - reply.seconds)
        silent = now - silent_since.get(job.uses, now)
        results.append(result_of(checks[job.check], loaded.checks[job.name], reply, time.time(), silent))
    _close_nvml(runner)
    return results


def _close_nvml(runner: Runner) -> None:
    if runner.nvml_open:
        _ask(runner, Request("nvml", CLOSE_NVML_SECONDS, {"op": "close_nvml"}))


def _ask(runner: Runner, request: Request) -> Reply:
    reply = runner.send(request)
    while reply is None:
        ready = select.poll()
        for descriptor, writes in runner.waits():
            ready.register(descriptor, select.POLLIN | (select.POLLOUT if writes else 0))
        ready.poll(max(0.0, runner.deadline - time.monotonic()) * 1000 + 1)
        reply = runner.step()
    return reply


# --- what the kernel log holds


def _listen(
    check: Check, config: CheckConfig, kernel_log: KernelLog, boot_id: str, conditions: Conditions
) -> tuple[CheckResult, Conditions]:
    """A check that only listens: what this boot's log holds is history and counts as INFO, as at a daemon's start."""
    began, started = time.monotonic(), time.time()
    try:
        events, touched, _ = fold_events((), kernel_log(), 1)
    except OSError as error:
        why = f"{error.filename}: cannot be read: {error.strerror}"
        return CheckResult(check.name, "", Outcome.FAILED, started, time.monotonic() - began, error=why), conditions
    found = [verdict.as_configured(f, config) for f in check.correlate(events, Inventory(), config) or ()]
    by_sequence = {event.sequence: event for event in events}
    after = verdict.absorb_events(conditions, check.name, found, by_sequence, frozenset(touched), boot_id, ())
    judged = tuple(
        dataclasses.replace(f, severity=after[f.code, f.subject].severity, worsens=None)
        for f in found
        if (f.code, f.subject) in after
    )
    seconds = time.monotonic() - began
    return CheckResult(check.name, "", Outcome.COMPLETED, started, seconds, findings=judged), after


def kernel_log_of(settings: Settings) -> KernelLog | None:
    """Reads this machine's kernel log; None where another tree is looked at, or the settings want none read."""
    if settings.root != "/" or settings.kernel_log.source not in ("kmsg", "journal"):
        return None
    return lambda: read_kernel_log(Host().boot_id(), settings.kernel_log.accept_injected)


def read_kernel_log(boot_id: str, accept_injected: bool) -> list[KernelEvent]:
    """What the ring buffer holds of this boot. Raises OSError."""
    source = open_source("kmsg", accept_injected=accept_injected)
    events = []
    try:
        for _ in range(MOST_READS):
            events += [event for line in source.read() if (event := event_of(line, boot_id)) is not None]
            if not source.pending:
                break
    finally:
        source.close()
    return events


# --- as a document


def look_json(found: Look) -> dict[str, Any]:
    """The document of `healthd check --json` (docs/json.md)."""
    return {
        "version": healthd.__version__,
        "node": found.node_name,
        "time": found.time,
        "health": found.verdict.health.value,
        "conditions": [condition_json(condition) for condition in found.verdict.conditions],
        "unknown": list(found.verdict.unknown),
        "results": [result_json(result) for result in found.results],
    }
