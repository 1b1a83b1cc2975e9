"""State of the running daemon, used for `healthd status`, the metrics and the verdict file."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from msgspec import field
from msgspec.structs import asdict

from healthd.agent.conditions.impairments import limits, reported_health
from healthd.agent.conditions.ledger import Pause
from healthd.agent.evidence.case import Case
from healthd.agent.evidence.stuck import alive
from healthd.agent.hooks.result import HookResult
from healthd.agent.reporting.endings import condition_remedy
from healthd.agent.settings.config import RepairConfig
from healthd.common.detection_pause import DetectionPause
from healthd.common.model import (
    CheckResult,
    ClaimHold,
    Condition,
    ConditionKey,
    Decision,
    Drain,
    FleetHold,
    Health,
    Inventory,
    KernelLogStatus,
    Leave,
    Mode,
    Remedy,
    RepairMode,
    Resume,
    RoundStatus,
    SlurmStatus,
    SourceStatus,
    StreamStatus,
    Verdict,
)
from healthd.common.repair_plan import RepairRecord
from healthd.common.slurm.drain_reason import domain_id
from healthd.common.values import Value

MAX_NAMED_JOBS = 5  # maximum number of jobs that a decision's text names as not requeued


class Problem(NamedTuple):
    """A problem with healthd itself. `command` is the next command to paste into a shell, or "" if there is none."""

    sentence: str
    command: str = ""


def labelled(label: str, problem: str) -> str:
    """Return "LABEL: PROBLEM", or "" if there is no problem."""
    return f"{label}: {problem}" if problem else ""


def command_for_kernel_log(log: KernelLogStatus) -> str:
    """Return the command that shows why the kernel log is not read.

    If the log is disabled, or read but only observed, the command shows the responsible settings.
    """
    if log.source == "off" or (log.alive and log.observed):
        return "healthd config show | grep kernel_log"
    commands = {"kmsg": "ls -l /dev/kmsg; dmesg | tail -1", "journal": "journalctl -k -n 1"}
    return commands.get(log.source) or f"ls -l {shlex.quote(log.source)}"


class Snapshot(Value, frozen=True):
    """State of the daemon at `now`. `results` contains each run's last result. `outcomes` contains counts by (check,
    instance, outcome)."""

    version: str
    node_name: str
    mode: str
    started: float
    now: float
    interval_seconds: float
    verdict: Verdict
    results: tuple[CheckResult, ...]
    outcomes: dict[tuple[str, str, str], int]
    decision: Decision
    slurm: SlurmStatus
    kernel_log: KernelLogStatus
    round: RoundStatus
    inventory: Inventory
    sources: tuple[SourceStatus, ...] = ()
    incidents: dict[ConditionKey, ConditionKey] = field(default_factory=dict)  # for each condition, the first cause
    pause: Pause | None = None
    repair: RepairRecord = RepairRecord()
    repair_config: RepairConfig = RepairConfig()
    detection_pause: DetectionPause | None = None
    commands: dict[str, int] = field(default_factory=dict)  # counts since the start, by command ("ack", ...)
    fleet_hold: FleetHold | None = None
    claim_hold: ClaimHold | None = None
    fleet_counted: bool = True
    requeued: tuple[str, ...] = ()  # jobs requeued by this process since healthd set its current drain
    drained_since: float = 0.0  # when the current drain was set, by any tool; 0 = none or unknown
    quarantined: dict[str, int] = field(default_factory=dict)
    workers_started_total: int = 0
    workers_abandoned_total: int = 0
    ledger_copy_failures_total: int = 0
    stream: StreamStatus = field(default_factory=StreamStatus)
    config_reload_failures_total: int = 0
    config_last_reload_successful: bool = True
    events_forgotten_total: int = 0
    dropped: dict[str, int] = field(default_factory=dict)  # counts since the start, by boundary (guard.py)
    shortages: dict[str, int] = field(default_factory=dict)  # counts since the start, by resource (host/shortage.py)
    cleared: tuple[Condition, ...] = ()
    meanings: Mapping[str, str] = field(default_factory=dict)  # for each observation, the meaning of its value
    remedies: Mapping[str, Remedy] = field(default_factory=dict)  # for each code that declares a remedy
    without_result: Mapping[str, Sequence[str]] = field(default_factory=dict)  # for each reason, the checks
    problems: tuple[Problem, ...] = ()
    hooks: Mapping[str, HookResult] = field(default_factory=dict)  # for each configured hook, its result
    hooks_problem: str = ""  # why no hook can run
    evidence: Case | None = None
    evidence_failures_total: int = 0
    processes: dict[str, tuple[int, ...]] = field(default_factory=dict)  # pids of "daemon", "worker" and "live"


def decision_text(decision: Decision, owner: str = "") -> str:
    """Return the decision as text. `owner` is the owner of the current drain (`policy.Owner`)."""
    if isinstance(decision, Drain):
        text = f"drain{' and requeue' if decision.requeue else ''}: {decision.reason}"
        if owner in ("other", "unrecorded_healthd"):
            text = f"requeue the jobs that the fault hit; the drain is not healthd's and stays: {decision.reason}"
        return text + _not_requeued_text(decision.not_requeued)
    if isinstance(decision, Resume):
        return f"resume: {decision.why}"
    return f"would {decision.would} ({decision.why})" if decision.would else decision.why


def _not_requeued_text(jobs: Sequence[tuple[str, str]]) -> str:
    if not jobs:
        return ""
    named = "; ".join(f"job {job}: {why}" for job, why in jobs[:MAX_NAMED_JOBS])
    more = f"; and {len(jobs) - MAX_NAMED_JOBS} more" if len(jobs) > MAX_NAMED_JOBS else ""
    return f"; not requeued: {named}{more}"


def condition_json(c: Condition, remedies: Mapping[str, Remedy]) -> dict[str, Any]:
    """Return the document for one condition. `remedies` contains the remedies that codes declare."""
    severity, clears = c.severity.name.lower(), c.clears.name.lower()
    declared = remedies[c.code].value if c.code in remedies else ""
    return {
        "check": c.check,
        "instance": c.instance,
        "code": c.code,
        "severity": severity,
        "subject": c.subject,
        "message": c.message,
        "clears": clears,
        "window_seconds": c.window_seconds,
        "remedy": condition_remedy(clears, severity, declared),
        "state": c.state.name.lower(),
        "since": c.opened_at or c.first_seen,
        "first_seen": c.first_seen,
        "last_seen": c.last_seen,
        "count": c.count,
        "job": c.job,
        "history": c.history,
        "observed": c.observed,
        "ack": {"until": c.ack.until, "why": c.ack.why, "who": c.ack.user} if c.ack else None,
    }


def result_json(r: CheckResult) -> dict[str, Any]:
    return {
        "check": r.check,
        "instance": r.instance,
        "outcome": r.outcome.name.lower(),
        "started": r.started,
        "duration_seconds": round(r.duration_seconds, 6),
        "error": r.error,
        "nothing_to_check": {"reason": r.nothing_to_check.reason, "fix": r.nothing_to_check.fix}
        if r.nothing_to_check
        else None,
        "findings": [
            {
                "code": f.code,
                "severity": f.severity.name.lower(),
                "subject": f.subject,
                "message": f.message,
                "clears": f.clears.name.lower(),
                "confirm_seconds": f.confirm_seconds,
            }
            for f in r.findings
        ],
        "observations": [
            {"name": o.name, "value": o.value, "kind": o.kind.name.lower(), "labels": dict(o.labels)}
            for o in r.observations
        ],
    }


def snapshot_limits(s: Snapshot) -> tuple[str, ...]:
    """Return sentences about everything that healthd needs but does not have on this node."""
    log = s.kernel_log
    return limits(Mode(s.mode), log.source, log.alive, log.problem, s.slurm.problem)


def snapshot_health(s: Snapshot) -> Health:
    """Return the reported health, which is at best a warning while healthd itself is limited."""
    return reported_health(s.verdict.health, snapshot_limits(s))


def status_json(s: Snapshot) -> dict[str, Any]:
    """Return the document for `healthd status --json`."""
    would = s.decision.would if isinstance(s.decision, Leave) else ""
    not_requeued = s.decision.not_requeued if isinstance(s.decision, Drain) else ()
    return {
        "version": s.version,
        "node": s.node_name,
        "mode": s.mode,
        "health": snapshot_health(s).value,
        "limits": list(snapshot_limits(s)),
        "time": s.now,
        "started": s.started,
        "interval_seconds": s.interval_seconds,
        "conditions": [condition_json(c, s.remedies) for c in s.verdict.conditions],
        "cleared": [
            {**condition_json(c, s.remedies), "cleared_at": c.cleared_at, "cleared_by": c.cleared_by} for c in s.cleared
        ],
        "unknown": list(s.verdict.unknown),
        "results": [result_json(r) for r in s.results],
        "without_result": {why: list(names) for why, names in s.without_result.items()},
        "decision": {
            "action": type(s.decision).__name__.lower(),
            "text": decision_text(s.decision, s.slurm.owner),
            "would": would,
            "not_requeued": [{"job": job, "why": why} for job, why in not_requeued],
        },
        "slurm": {
            "state": sorted(s.slurm.node.flags) if s.slurm.node else None,
            "reason": s.slurm.node.reason if s.slurm.node else "",
            "reason_user": s.slurm.node.reason_user if s.slurm.node else "",
            "owner": s.slurm.owner,
            "read_at": s.slurm.read_at,
            "problem": s.slurm.problem,
            "requeued": list(s.requeued),
            "fleet_hold": asdict(s.fleet_hold) if s.fleet_hold else None,
        },
        "kernel_log": asdict(s.kernel_log),
        "incidents": [
            {"first": str(first), "then": [str(later) for later in s.incidents if s.incidents[later] == first]}
            for first in dict.fromkeys(s.incidents.values())
        ],
        "sources": [asdict(source) for source in s.sources],
        "stream": asdict(s.stream),
        "round": asdict(s.round),
        "pause": {"until": s.pause.until, "why": s.pause.why, "who": s.pause.user} if s.pause else None,
        "repair": _repair_json(s),
        "detection_pause": asdict(s.detection_pause) if s.detection_pause else None,
        "blocked": dict(s.quarantined),
        "problems": [problem.sentence for problem in s.problems],
        "problem_commands": [problem.command for problem in s.problems],
        "dropped": dict(s.dropped),
        "shortages": dict(s.shortages),
        "inventory": _inventory_json(s.inventory),
        "evidence": _evidence_json(s.evidence),
    }


def _evidence_json(case: Case | None) -> dict[str, Any] | None:
    if case is None:
        return None
    return {
        "id": case.id,
        "stage": case.stage.value,
        "began": case.began,
        "path": case.path,
        "bytes": case.bytes,
        "problems": list(case.problems),
        "error": case.error,
        "stuck_pids": [process.pid for process in alive(case.stuck)],
    }


def _repair_json(s: Snapshot) -> dict[str, Any] | None:
    if s.repair_config.mode is RepairMode.OFF:
        return None
    from healthd.agent.reporting.repair import repair_json  # few sites need it

    return repair_json(s.repair, s.repair_config, s.claim_hold)


def _inventory_json(inventory: Inventory) -> dict[str, Any]:
    parts = ("gpus", "devices", "disks", "mounts")
    lists = {name: [asdict(part) for part in getattr(inventory, name)] for name in parts}
    return {**asdict(inventory), **lists, "domain_id": domain_id(inventory.domain)}


def verdict_line(s: Snapshot, keeps_jobs_out: bool, expires: float) -> str:
    """Return the verdict file's line, `WORD EXPIRES REASON`. WORD is `drain` only if a drain is decided and allowed."""
    conditions = s.verdict.causes if keeps_jobs_out else s.verdict.conditions  # without acknowledged conditions
    worst = conditions[0] if conditions else None
    why = f"{worst.code} {worst.subject}: {worst.message}".strip() if worst else ""
    if keeps_jobs_out:
        word = "drain"
        why = why or (f"being repaired: {s.repair.attempt.step.value}" if s.repair.attempt else "being repaired")
    elif s.verdict.health.value == "healthy":
        word, why = "ok", "healthy"
    elif s.verdict.health.value == "unknown":
        word, why = "unknown", s.verdict.unknown[0]
    else:
        word = "warning"
    line = "".join(c if " " <= c <= "~" else "?" for c in why)
    return f"{word} {int(expires)} {line[:300]}\n"
