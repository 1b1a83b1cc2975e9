"""A single round of checks, for `healthd check`, without a ledger, history or daemon. Findings need no confirmation."""

from __future__ import annotations

import select
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from msgspec.structs import replace

import healthd
from healthd.agent.conditions import bounds, intake, verdict
from healthd.agent.conditions.impairments import reported_health
from healthd.agent.conditions.ledger import Ledger
from healthd.agent.kernel_log.open_source import open_source
from healthd.agent.kernel_log.parse import parse, use_patterns
from healthd.agent.kernel_log.source import RawLine, make_event
from healthd.agent.recording.recording import RecordedRun, Recording
from healthd.agent.reporting.status import condition_json, result_json
from healthd.agent.scheduler import due
from healthd.agent.scheduler.due import ScheduledRun
from healthd.agent.settings import registry
from healthd.agent.settings.config import CheckConfig, Loaded, Settings
from healthd.agent.settings.registry import Check
from healthd.agent.worker import requests
from healthd.agent.worker.client import CLOSE_NVML, NVML_PROBLEM, Reply, Request, WorkerClient
from healthd.agent.worker.results import make_result
from healthd.common.guard import KERNEL_LOG, drop
from healthd.common.model import (
    CheckResult,
    Condition,
    ConditionState,
    Finding,
    Outcome,
    Remedy,
    RunName,
    Verdict,
)
from healthd.host.host import Host

MAX_READS = 1000  # number of reads of 1000 kernel lines each, for a log that grows faster than it is read

KernelLogReader = Callable[[], list[RawLine]]  # returns the lines that are relevant to healthd; raises OSError


class RoundResult(NamedTuple):
    """Result of one round.

    results     results in the order of the runs
    runs        these and the following fields are kept in a recording
    kernel_log  the lines that were read, or the error; None if there was no log to read
    remedies    remedies by code
    """

    node_name: str
    time: float
    verdict: Verdict
    results: tuple[CheckResult, ...]
    runs: tuple[RecordedRun, ...]
    boot_id: str
    kernel_log: list[RawLine] | OSError | None
    remedies: Mapping[str, Remedy] = {}
    without_result: Mapping[str, Sequence[str]] = {}
    limits: tuple[str, ...] = ()


def names_to_run(loaded: Loaded, checks: Mapping[str, Check], kernel_log: KernelLogReader | None) -> list[RunName]:
    """Return the runs for a round. Checks that read only the kernel log are included only if there is a log."""
    return [name for name in loaded.checks if checks[name.check].has_run or kernel_log]


def run_round(
    loaded: Loaded,
    checks: Mapping[str, Check],
    client: WorkerClient,
    kernel_log: KernelLogReader | None,
    replayed: Recording | None = None,
    extra_results: Sequence[CheckResult] = (),
) -> RoundResult:
    """Run all checks in `loaded` once. The round ends within the checks' deadlines even if something hangs.

    replayed       the recording of a round to repeat, which the workers have too. The recording's times are used. A
                   check that did not answer in the recording does not run
    extra_results  results that already exist
    """
    settings = loaded.settings
    use_patterns(settings.kernel_log.patterns)
    boot_id = replayed.boot_id if replayed else Host(settings.root).boot_id()
    started = replayed.time if replayed else time.time()
    ledger = Ledger(boot_id=boot_id)
    run_results, runs = _run_all(loaded, checks, client, boot_id, replayed)
    absorbed = []
    for result in run_results:
        ledger, result = intake.take_result(ledger, result, loaded.checks[result.run], started)
        absorbed.append(result)
    results = _last_results(absorbed)
    event_checks = [
        (checks[name.check], config)
        for name, config in loaded.checks.items()
        if checks[name.check].reads_kernel_log and not name.instance
    ]
    log = _read(kernel_log) if kernel_log and event_checks else None
    if log is not None:
        log_results, ledger = _evaluate_log(ledger, event_checks, log, replayed)
        for result in log_results:
            if checks[result.check].has_run:
                results = [_merge_findings(run_result, result) for run_result in results]
                continue
            results.append(result)
            ended = result.started + result.duration_seconds
            runs.append(
                RecordedRun(*result.run, result.outcome, result.error, ended, result.duration_seconds, 0.0, True)
            )
    results += extra_results
    node_verdict = verdict.judge(
        {key: _at_face_value(condition) for key, condition in ledger.by_key().items()},
        {result.run: result for result in results},
        [result.run for result in results],
        trusted_since=0.0,
    )
    remedies = registry.remedies(checks, (condition.code for condition in node_verdict.conditions))
    without_result = registry.without_result({name.check: checks[name.check] for name in loaded.checks}, loaded)
    return RoundResult(
        settings.node_name, started, node_verdict, tuple(results), tuple(runs), boot_id, log, remedies, without_result
    )


def _last_results(results: Sequence[CheckResult]) -> list[CheckResult]:
    """Return each run's last result, in the order of the first results.

    If the last run did not complete, the findings from earlier runs are used.
    """
    last: dict[RunName, CheckResult] = {}
    for result in results:
        before = last.get(result.run)
        if before is not None and result.outcome is not Outcome.COMPLETED:
            result = _merge_findings(result, before)
        last[result.run] = result
    return list(last.values())


def _merge_findings(run_result: CheckResult, log_result: CheckResult) -> CheckResult:
    """Merge the results of a check that both runs and reads the kernel log. The result has all findings.

    An unreadable log does not affect the run's result.
    """
    if run_result.run != log_result.run:
        return run_result
    found = {finding.key for finding in run_result.findings}
    more = tuple(finding for finding in log_result.findings if finding.key not in found)
    return replace(run_result, findings=(*run_result.findings, *more))


def _at_face_value(condition: Condition) -> Condition:
    """Return a pending condition as open, because there will be no second run to confirm it."""
    if condition.state is not ConditionState.PENDING:
        return condition
    return replace(condition, state=ConditionState.OPEN, opened_at=condition.first_seen)


# --- runs in the worker


def _run_all(
    loaded: Loaded, checks: Mapping[str, Check], client: WorkerClient, boot_id: str, recording: Recording | None
) -> tuple[list[CheckResult], list[RecordedRun]]:
    """Run all checks. GPU checks run first, and then the driver is closed."""
    scheduled = [
        ScheduledRun(name, checks[name.check].resource(name.instance), 1.0, config.timeout_seconds)
        for name, config in loaded.checks.items()
        if checks[name.check].has_run
    ]
    began = time.monotonic()
    silent_since: dict[str, float] = {}  # for each resource, the start time of the run that hangs in it
    results: list[CheckResult] = []
    runs: list[RecordedRun] = []
    queue = due.due_runs(scheduled, {}, {}, "", 0.0)
    while queue:
        run = queue.pop(0)
        if run.resource != "nvml":
            close_nvml(client)
        operation = requests.Run(*run.name, loaded.tables[run.name], boot_id=boot_id)
        request = Request(run.resource, run.timeout_seconds, operation)
        recorded_run = (
            recording.find_run(run.name, sum(before.name == run.name for before in runs)) if recording else None
        )
        if recorded_run is not None and not recorded_run.answered:
            reply = Reply(request, recorded_run.outcome, recorded_run.seconds, recorded_run.error)
        elif time.monotonic() - began >= loaded.settings.round_timeout_seconds:
            reply = Reply(request, Outcome.TIMED_OUT, 0.0, "the round ran out of time before this run")
        else:
            reply = send_and_wait(client, request)
        now = time.monotonic()
        if reply.outcome is Outcome.TIMED_OUT and reply.seconds:
            silent_since.setdefault(run.resource, now - reply.seconds)
        silent = now - silent_since.get(run.resource, now)
        ended = time.time()
        if recorded_run is not None:
            reply, ended, silent = (
                replace(reply, seconds=recorded_run.seconds),
                recorded_run.ended,
                recorded_run.silent_seconds,
            )
        results.append(make_result(checks[run.check], loaded.checks[run.name], reply, ended - reply.seconds, silent))
        runs.append(RecordedRun(*run.name, reply.outcome, reply.error, ended, reply.seconds, silent, reply.answered))
        if reply.has_nvml_problem:
            once_more = [name for name in loaded.checks if NVML_PROBLEM in checks[name.check].after_events]
            queue = due.with_repeats(queue, scheduled, {*once_more} - {run.name})
    close_nvml(client)
    return results, runs


def close_nvml(client: WorkerClient) -> None:
    if client.nvml_open:
        send_and_wait(client, CLOSE_NVML)


def send_and_wait(client: WorkerClient, request: Request) -> Reply:
    reply = client.send(request)
    while reply is None:
        ready = select.poll()
        for descriptor, writes in client.waits():
            ready.register(descriptor, select.POLLIN | (select.POLLOUT if writes else 0))
        ready.poll(max(0.0, client.deadline - time.monotonic()) * 1000 + 1)
        reply = client.step()
    return reply


# --- the kernel log


def _read(kernel_log: KernelLogReader) -> list[RawLine] | OSError:
    try:
        return kernel_log()
    except OSError as error:
        return error


def _evaluate_log(
    ledger: Ledger,
    event_checks: Sequence[tuple[Check, CheckConfig]],
    log: list[RawLine] | OSError,
    replayed: Recording | None,
) -> tuple[list[CheckResult], Ledger]:
    """Return a result for each check that reads the kernel log.

    Lines from this boot are history with severity INFO, as when a daemon starts. All checks are evaluated together, so
    each result has the total duration.
    """
    began, now, seconds = time.monotonic(), time.time(), 0.0
    if isinstance(log, OSError):
        outcome, error = Outcome.FAILED, f"{log.filename}: cannot be read: {log.strerror}"
        findings: dict[str, list[Finding]] = {}
    else:
        outcome, error = Outcome.COMPLETED, ""
        events = [event for line in log if (event := make_event(line, ledger.boot_id)) is not None]
        intake_result = intake.take_kernel_events(ledger, events, event_checks, now)
        for event, failure in intake_result.failures:
            drop(KERNEL_LOG, failure, event.text if event else "several events together")
        ledger, findings, seconds = intake_result.ledger, intake_result.findings, time.monotonic() - began
    results = []
    for check, _ in event_checks:
        run = replayed.find_run(RunName(check.name)) if replayed else None
        results.append(
            CheckResult(
                check.name,
                "",
                outcome,
                run.ended - run.seconds if run else now,
                run.seconds if run else seconds,
                findings=_as_absorbed(findings.get(check.name, ()), ledger),
                error=error,
            )
        )
    return results, ledger


def _as_absorbed(findings: Iterable[Finding], ledger: Ledger) -> tuple[Finding, ...]:
    """Return the findings at the severity of their conditions."""
    conditions = {condition.key: condition for condition in (*ledger.cleared, *ledger.conditions)}
    found = []
    for finding in findings:
        keys = (finding.key, bounds.overflow_key(RunName(finding.code.partition("/")[0])))
        counted = next((conditions[key] for key in keys if key in conditions), None)
        if counted is not None:
            found.append(replace(finding, severity=counted.severity, worsens=None))
    return tuple(found)


def kernel_log_reader(settings: Settings) -> KernelLogReader | None:
    """Return a reader for this machine's kernel log. Return None for another root, or if the settings disable the
    log.
    """
    if settings.root != "/" or settings.kernel_log.source not in ("kmsg", "journal"):
        return None
    return lambda: read_kernel_log(settings.kernel_log.accept_injected)


def read_kernel_log(accept_injected: bool) -> list[RawLine]:
    """Return the ring buffer's lines that are relevant to healthd. Raises OSError."""
    source = open_source("kmsg", accept_injected=accept_injected)
    lines = []
    try:
        for _ in range(MAX_READS):
            lines += [line for line in source.read() if parse(line.text) is not None]
            if not source.pending:
                break
    finally:
        source.close()
    return lines


# --- JSON


def round_json(round_result: RoundResult) -> dict[str, Any]:
    """Return the document for `healthd check --json` (docs/json.md)."""
    return {
        "version": healthd.__version__,
        "node": round_result.node_name,
        "time": round_result.time,
        "health": reported_health(round_result.verdict.health, round_result.limits).value,
        "limits": list(round_result.limits),
        "conditions": [
            condition_json(condition, round_result.remedies) for condition in round_result.verdict.conditions
        ],
        "unknown": list(round_result.verdict.unknown),
        "results": [result_json(result) for result in round_result.results],
        "without_result": {why: list(names) for why, names in round_result.without_result.items()},
    }
