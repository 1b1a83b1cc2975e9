"""What the running daemon believes, as one value: for `healthd status`, the metrics and the verdict file."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from msgspec import field
from msgspec.structs import asdict

from healthd.agent.conditions.impairments import limits, shown_health
from healthd.agent.conditions.ledger import Pause
from healthd.agent.reporting.endings import remedy_of
from healthd.common.detection_pause import DetectionPause
from healthd.common.model import (
    CheckResult,
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
    Resume,
    RoundStatus,
    SlurmStatus,
    SourceStatus,
    StreamStatus,
    Verdict,
)
from healthd.common.values import Value

NAMED_JOBS = 5  # of those that are not requeued, in the words of the decision


class Problem(NamedTuple):
    """A problem of healthd itself. next: a command that can be pasted into a shell; "" = there is none."""

    sentence: str
    next: str = ""


def labelled(label: str, problem: str) -> str:
    """Return "LABEL: TROUBLE", or "" if there is no trouble."""
    return f"{label}: {problem}" if problem else ""


def command_for_kernel_log(log: KernelLogStatus) -> str:
    """Return the command that shows why the kernel log is not read. The settings explain a log that is read but only
    observed, or switched off."""
    if log.source == "off" or (log.alive and log.observed):
        return "healthd config show | grep kernel_log"
    known = {"kmsg": "ls -l /dev/kmsg; dmesg | tail -1", "journal": "journalctl -k -n 1"}
    return known.get(log.source) or f"ls -l {shlex.quote(log.source)}"


class Snapshot(Value, frozen=True):
    """results: the last run of each check; outcomes: (check, instance, outcome) -> how often since the start."""

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
    incidents: dict[ConditionKey, ConditionKey] = field(default_factory=dict)  # condition -> its first cause
    pause: Pause | None = None
    detection_pause: DetectionPause | None = None
    commands: dict[str, int] = field(default_factory=dict)  # "ack", "repaired", ... -> how often since the start
    fleet_hold: FleetHold | None = None
    fleet_counted: bool = True
    requeued: tuple[str, ...] = ()  # jobs that this process requeued since healthd's drain in force was set
    drained_since: float = 0.0  # when the drain that stands was set, ours or another's; 0 = none, or not known
    quarantined: dict[str, int] = field(default_factory=dict)
    workers_started_total: int = 0
    workers_abandoned_total: int = 0
    ledger_copy_failures_total: int = 0
    stream: StreamStatus = field(default_factory=StreamStatus)
    config_reload_failures_total: int = 0
    config_last_reload_successful: bool = True
    events_forgotten_total: int = 0
    dropped: dict[str, int] = field(default_factory=dict)  # boundary (guard.py) -> how often since the start
    shortages: dict[str, int] = field(default_factory=dict)  # resource (host/shortage.py) -> count since the start
    cleared: tuple[Condition, ...] = ()
    meanings: Mapping[str, str] = field(default_factory=dict)  # observation -> what its value says
    remedies: Mapping[str, Remedy] = field(default_factory=dict)  # by code, where it declares one
    without_result: Mapping[str, Sequence[str]] = field(default_factory=dict)  # why -> checks (registry.without_result)
    problems: tuple[Problem, ...] = ()
    processes: dict[str, tuple[int, ...]] = field(default_factory=dict)  # "daemon" and "worker": their pids


def decision_words(decision: Decision, owner: str = "") -> str:
    """The decision as a person reads it. `owner`: whose drain stands (policy.Owner)."""
    if isinstance(decision, Drain):
        words = f"drain{' and requeue' if decision.requeue else ''}: {decision.reason}"
        if owner in ("other", "unrecorded_healthd"):
            words = f"requeue the jobs that the fault hit; the drain is not ours and stays: {decision.reason}"
        return words + _spared(decision.spared)
    if isinstance(decision, Resume):
        return f"resume: {decision.why}"
    return f"{decision.why}; would {decision.would}" if decision.would else decision.why


def _spared(jobs: Sequence[tuple[str, str]]) -> str:
    if not jobs:
        return ""
    named = "; ".join(f"job {job}: {why}" for job, why in jobs[:NAMED_JOBS])
    more = f"; and {len(jobs) - NAMED_JOBS} more" if len(jobs) > NAMED_JOBS else ""
    return f"; not requeued: {named}{more}"


def condition_json(c: Condition, remedies: Mapping[str, Remedy]) -> dict[str, Any]:
    """Return one condition. `remedies`: by code, where the code declares one."""
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
        "remedy": remedy_of(clears, severity, declared),
        "state": c.state.name.lower(),
        "since": c.opened_at or c.first_seen,
        "first_seen": c.first_seen,
        "last_seen": c.last_seen,
        "count": c.count,
        "job": c.job,
        "history": c.history,
        "observed": c.observed,
        "ack": {"until": c.ack.until, "why": c.ack.why, "who": c.ack.who} if c.ack else None,
    }


def result_json(r: CheckResult) -> dict[str, Any]:
    return {
        "check": r.check,
        "instance": r.instance,
        "outcome": r.outcome.name.lower(),
        "started": r.started,
        "duration_seconds": round(r.duration_seconds, 6),
        "error": r.error,
        "nothing_to_check": {"reason": r.nothing.reason, "fix": r.nothing.fix} if r.nothing else None,
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


def limits_of(s: Snapshot) -> tuple[str, ...]:
    """Return sentences: what healthd needs on this node and does not have."""
    log = s.kernel_log
    return limits(Mode(s.mode), log.source, log.alive, log.problem, s.slurm.problem)


def health_of(s: Snapshot) -> Health:
    """Return the health that people are shown: at best a warning while healthd is limited."""
    return shown_health(s.verdict.health, limits_of(s))


def status_json(s: Snapshot) -> dict[str, Any]:
    """The document of `healthd status --json`."""
    would = s.decision.would if isinstance(s.decision, Leave) else ""
    spared = s.decision.spared if isinstance(s.decision, Drain) else ()
    return {
        "version": s.version,
        "node": s.node_name,
        "mode": s.mode,
        "health": health_of(s).value,
        "limits": list(limits_of(s)),
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
            "text": decision_words(s.decision, s.slurm.owner),
            "would": would,
            "not_requeued": [{"job": job, "why": why} for job, why in spared],
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
        "pause": {"until": s.pause.until, "why": s.pause.why, "who": s.pause.who} if s.pause else None,
        "detection_pause": asdict(s.detection_pause) if s.detection_pause else None,
        "blocked": dict(s.quarantined),
        "problems": [problem.sentence for problem in s.problems],
        "problem_commands": [problem.next for problem in s.problems],
        "dropped": dict(s.dropped),
        "shortages": dict(s.shortages),
        "inventory": _inventory_json(s.inventory),
    }


def _inventory_json(inventory: Inventory) -> dict[str, Any]:
    parts = ("gpus", "devices", "disks", "mounts")
    return {**asdict(inventory), **{name: [asdict(part) for part in getattr(inventory, name)] for name in parts}}


def verdict_line(s: Snapshot, allowed_drain: bool, expires: float) -> str:
    """The verdict file: `WORD EXPIRES REASON`. `drain` only for what was decided and allowed."""
    named = s.verdict.causes if allowed_drain else s.verdict.conditions  # without what an operator knows of
    worst = named[0] if named else None
    why = f"{worst.code} {worst.subject}: {worst.message}".strip() if worst else ""
    if allowed_drain:
        word = "drain"
    elif s.verdict.health.value == "healthy":
        word, why = "ok", "healthy"
    elif s.verdict.health.value == "unknown":
        word, why = "unknown", s.verdict.unknown[0]
    else:
        word = "warning"
    line = "".join(c if " " <= c <= "~" else "?" for c in why)
    return f"{word} {int(expires)} {line[:300]}\n"
