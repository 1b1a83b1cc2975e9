"""The daemon's state as Prometheus metrics, for the page (http_server.py) and for node_exporter's textfile
collector.

names.py defines names and meanings. A check's observations become `healthd_<name>`. If an observation cannot be
exported (an invalid name or label, a reserved name, a duplicate series), it is left out and counted, so that one check
cannot break the page for the others.
"""

from __future__ import annotations

import functools
import logging
import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple, TypeAlias

from healthd.agent.metrics.exposition import END, MAX_CACHED_SERIES, TOTAL, Labels, Metric, TextCache, text
from healthd.agent.metrics.names import FAMILIES, PREFIX
from healthd.agent.reporting.status import Snapshot
from healthd.agent.slurm.policy import Owner
from healthd.common.model import (
    Condition,
    ConditionState,
    Drain,
    FleetHold,
    Gpu,
    Health,
    Leave,
    ObservationKind,
    Outcome,
    RepairMode,
    Resume,
    SourceStatus,
)
from healthd.common.slurm.drain_reason import domain_id
from healthd.common.text import regex

log = logging.getLogger("healthd")

METRIC_NAME = regex(r"[a-z][a-z0-9_]*")  # colons are reserved for recording rules
LABEL_NAME = regex(r"(?!__)[a-zA-Z_][a-zA-Z0-9_]*")
RESERVED_LABELS = ("le", "quantile")
REFUSED = "check_observations_refused"
RESERVED_NAMES = {taken for name in FAMILIES for taken in (name, name.removesuffix("_total"))}  # used by healthd itself
_TICKS = os.sysconf("SC_CLK_TCK")
_PAGE_BYTES = os.sysconf("SC_PAGESIZE")

Row: TypeAlias = "tuple[Mapping[str, str], float]"
Rows: TypeAlias = "tuple[str, Iterable[Row]]"  # (name in FAMILIES, rows)


def families(snapshot: Snapshot) -> list[Metric]:
    """Return healthd's own metrics, followed by the checks' observations sorted by name.

    Families without a series are left out. All values come from the snapshot. `processes` returns the values that
    change without a new snapshot.
    """
    observed, refused = _observed(snapshot)
    own = dict(_own(snapshot))
    own[REFUSED] = [({"check": check}, float(count)) for check, count in refused]
    return [metric for metric in (*map(_family, own, own.values()), *observed) if metric.series]


def processes(snapshot: Snapshot) -> list[Metric]:
    """Return the metrics for healthd's own resource use."""
    return [metric for metric in (_family(name, rows) for name, rows in _processes(snapshot)) if metric.series]


def _own(s: Snapshot) -> Iterator[Rows]:
    yield "build_info", [({"version": s.version}, 1)]
    yield "node_info", [({"node": s.node_name}, 1)]
    yield "mode_info", [({"mode": s.mode}, 1)]
    yield "start_timestamp_seconds", [({}, s.started)]
    yield "gpu_info", [(gpu_labels(gpu), 1) for gpu in s.inventory.gpus]
    if domain := s.inventory.domain:
        yield "nvlink_domain_info", [({"domain": domain, "id": domain_id(domain)}, 1)]
    yield "health", [({"state": health.value}, health is s.verdict.health) for health in Health]
    yield from _conditions(s.verdict.conditions)
    yield from _checks(s)
    yield from _round(s)
    yield from _kernel_log(s)
    yield from _sources(s)
    yield from _slurm(s)
    yield from _decision(s)
    yield from _repair(s)
    yield from _workers(s)


def gpu_labels(gpu: Gpu) -> dict[str, str]:
    """Return labels in dcgm-exporter's format. NVML's bus ids have an eight-digit domain and upper-case digits."""
    labels = {"gpu": str(gpu.index), "UUID": gpu.uuid, "pci_bus_id": gpu.pci.upper().zfill(16), "modelName": gpu.name}
    labels |= {"pci": gpu.pci} if gpu.minor is None else {"pci": gpu.pci, "device": f"nvidia{gpu.minor}"}
    return {label: text for label, text in labels.items() if text}


def _conditions(conditions: Sequence[Condition]) -> Iterator[Rows]:
    """Yield the metrics for conditions. Properties that may change while a condition is open are values, never
    labels."""

    def rows(value_of: Callable[[Condition], float]) -> list[Row]:
        return [(condition_labels(c), float(value_of(c))) for c in conditions]

    yield "condition_severity", rows(lambda c: c.severity.value)
    yield "condition_open", rows(lambda c: c.state is not ConditionState.PENDING)
    yield "condition_enforced", rows(lambda c: not c.observed)
    yield "condition_acknowledged", rows(lambda c: c.state is ConditionState.ACKNOWLEDGED)
    yield "condition_since_timestamp_seconds", rows(lambda c: c.opened_at or c.first_seen)
    yield "condition_begun_timestamp_seconds", rows(lambda c: c.worsened_at or c.first_seen)
    yield (
        "condition_acknowledged_until_timestamp_seconds",
        [(condition_labels(c), c.ack.until) for c in conditions if c.ack],
    )
    # The job has its own metric, because a job that becomes known later must not change the condition's series.
    # Prometheus itself uses the label "job".
    jobs = [({**condition_labels(c), "slurm_job": job}, 1.0) for c in conditions for job in c.job.split(",") if job]
    yield "condition_slurm_job", jobs


def condition_labels(c: Condition) -> dict[str, str]:
    return {"check": c.check, "code": c.code, "subject": c.subject}


def _checks(s: Snapshot) -> Iterator[Rows]:
    runs = [({"check": c, "name": i, "outcome": o}, float(n)) for (c, i, o), n in s.outcomes.items()]
    yield "check_runs_total", runs
    results = [({"check": r.check, "name": r.instance}, r) for r in s.results]
    yield "check_up", [(name, r.outcome is Outcome.COMPLETED) for name, r in results]
    yield "check_duration_seconds", [(name, r.duration_seconds) for name, r in results]
    completed = [(name, r.started + r.duration_seconds) for name, r in results if r.outcome is Outcome.COMPLETED]
    yield "check_last_completed_timestamp_seconds", completed


def _round(s: Snapshot) -> Iterator[Rows]:
    yield "rounds_total", [({}, s.round.number)]
    yield "round_started_timestamp_seconds", _moment(s.round.started)
    yield "round_duration_seconds", [({}, s.round.seconds)]
    yield "round_next_timestamp_seconds", _moment(s.round.next_at)
    yield "round_interval_seconds", [({}, s.interval_seconds)]


def _kernel_log(s: Snapshot) -> Iterator[Rows]:
    k = s.kernel_log
    yield "kernel_log_info", [({"from": k.source}, 1)]
    yield "kernel_log_observed_only", [({}, k.observed)]
    yield "kernel_log_lines_total", [({}, k.lines_total)]
    yield "kernel_log_events_total", [({}, k.events_total)]
    yield "kernel_log_events_forgotten_total", [({}, s.events_forgotten_total)]
    yield "kernel_log_last_line_timestamp_seconds", _moment(k.last_line)


def _sources(s: Snapshot) -> Iterator[Rows]:
    """Yield the metrics for event sources: kernel_log, journal (fills gaps in the ring buffer), device_removals."""

    def rows(value_of: Callable[[SourceStatus], float]) -> list[Row]:
        return [({"source": source.source}, float(value_of(source))) for source in s.sources]

    yield "source_up", rows(lambda source: source.up)
    yield "source_last_read_timestamp_seconds", [row for row in rows(lambda source: source.last_read) if row[1]]
    yield "source_restarts_total", rows(lambda source: source.restarts_total)
    yield "source_overruns_total", rows(lambda source: source.overruns_total)
    yield "source_lost_total", rows(lambda source: source.lost_total)
    yield "source_malformed_total", rows(lambda source: source.malformed_total)
    yield "source_rotations_total", rows(lambda source: source.rotations_total)


def _slurm(s: Snapshot) -> Iterator[Rows]:
    slurm = s.slurm
    commands = [({"command": command, "result": result}, float(n)) for (command, result), n in slurm.commands.items()]
    yield "slurm_commands_total", commands
    yield "slurm_read_timestamp_seconds", _moment(slurm.read_at)
    yield "slurm_problem", [({}, bool(slurm.problem))]
    yield "slurm_drain_desired", [({}, bool(s.verdict.causes))]
    if slurm.owner not in ("", Owner.NONE.value):
        yield "slurm_drained_by", [({"owner": slurm.owner}, 1)]
        yield "slurm_drained_since_timestamp_seconds", _moment(s.drained_since)
        yield "slurm_drain_info", [({"owner": slurm.owner, "reason": slurm.node.reason if slurm.node else ""}, 1)]
    yield "fleet_count_available", [({}, s.fleet_counted)]
    yield from _fleet_limit(s.fleet_hold)


def _fleet_limit(hold: FleetHold | None) -> Iterator[Rows]:
    """Yield the metrics for a drain that waits for the fleet limit. There are no samples if no drain waits."""
    if hold is None:
        return
    if hold.times:
        group = hold.partition or f"NVLink domain {hold.domain}"
        labels = {"partition": group, "kind": "own_hardware" if hold.own_hardware else "shared"}
        yield "fleet_limit_drain_waiting", [(labels, 1)]
        yield "fleet_limit_nodes_drained", [(labels, hold.drained)]
        if not hold.domain:
            yield "fleet_limit_nodes", [(labels, hold.nodes)]
        yield "fleet_limit_nodes_allowed", [(labels, hold.limit)]
    yield "fleet_limit_waiting_since_timestamp_seconds", _moment(hold.since)
    yield "fleet_limit_next_try_timestamp_seconds", _moment(hold.until)


def _repair(s: Snapshot) -> Iterator[Rows]:
    record, config = s.repair, s.repair_config
    if config.mode is RepairMode.OFF:
        return
    yield "repair_mode_info", [({"mode": config.mode.value}, 1)]
    if record.plan is not None:
        yield "repair_step", [({"step": record.plan.step.value}, 1)]
        yield "repair_obstacle", [({"obstacle": obstacle.value}, 1) for obstacle in record.plan.obstacles]
    yield "repair_given_up", [({}, int(record.has_given_up))]
    if record.attempt is not None:
        from healthd.agent.reporting.repair import deadline

        labels = {"step": record.attempt.step.value, "stage": record.attempt.stage.value}
        yield "repair_stage_begun_timestamp_seconds", [(labels, record.attempt.since)]
        if until := deadline(record, config):
            yield "repair_stage_deadline_timestamp_seconds", [(labels, until)]


def _decision(s: Snapshot) -> Iterator[Rows]:
    d = s.decision
    actions = {
        "drain": isinstance(d, Drain) and not d.requeue,
        "drain_requeue": isinstance(d, Drain) and d.requeue,
        "resume": isinstance(d, Resume),
        "leave": isinstance(d, Leave),
    }
    yield "decision", [({"action": action}, is_current) for action, is_current in actions.items()]
    yield "decision_withheld", [({}, isinstance(d, Leave) and bool(d.would))]
    yield "commands_total", [({"command": command}, float(times)) for command, times in s.commands.items()]
    yield "paused", [({}, s.pause is not None)]
    yield "paused_until_timestamp_seconds", _moment(s.pause.until) if s.pause else []


def _workers(s: Snapshot) -> Iterator[Rows]:
    yield "config_last_reload_successful", [({}, s.config_last_reload_successful)]
    yield "config_reload_failures_total", [({}, s.config_reload_failures_total)]
    yield "resource_blocked", [({"resource": resource}, 1) for resource in s.quarantined]
    yield "workers_started_total", [({}, s.workers_started_total)]
    yield "workers_abandoned_total", [({}, s.workers_abandoned_total)]
    yield "evidence_failures_total", [({}, s.evidence_failures_total)]
    yield "ledger_copy_failures_total", [({}, s.ledger_copy_failures_total)]
    yield "stream_lines_waiting", [({}, s.stream.waiting)]
    yield "stream_write_failures_total", [({}, s.stream.failures_total)]
    yield "stream_lines_dropped_total", [({}, s.stream.dropped_total)]
    yield "stream_journal_lost_total", [({}, s.stream.journal_lost_total)]
    yield "hook_failures_total", [({"hook": name}, result.failures) for name, result in s.hooks.items()]
    yield "hook_failing", [({"hook": name}, bool(result.error or s.hooks_problem)) for name, result in s.hooks.items()]
    yield "inputs_dropped_total", [({"from": boundary}, count) for boundary, count in s.dropped.items()]
    yield "resource_shortages_total", [({"resource": name}, count) for name, count in s.shortages.items()]


def _processes(s: Snapshot) -> Iterator[Rows]:
    """Yield healthd's own resource use. Do not read files that take the memory lock, because a lost worker may hold
    it."""
    memory: dict[str, float] = {}
    cpu: dict[str, float] = {}
    for name, pids in s.processes.items():
        group = "daemon" if name == "daemon" else "children"
        for found in map(_process, pids):
            memory[name] = memory.get(name, 0.0) + found.resident_bytes
            cpu[group] = cpu.get(group, 0.0) + found.cpu_seconds
            if name == "daemon":
                cpu["children"] = cpu.get("children", 0.0) + found.ended_children_seconds
    yield "process_resident_memory_bytes", [({"process": name}, size) for name, size in memory.items() if size]
    yield "process_cpu_seconds_total", [({"process": name}, used) for name, used in cpu.items()]


class _Cost(NamedTuple):
    resident_bytes: float = 0.0
    cpu_seconds: float = 0.0
    ended_children_seconds: float = 0.0


def _process(pid: int) -> _Cost:
    """Read a process's resource use from /proc/PID/stat (psutil would take 3 MiB). If the process is missing, return
    zeros."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            fields = file.read().rpartition(b")")[2].split()
        user, system, children_user, children_system = (int(ticks) / _TICKS for ticks in fields[11:15])
        return _Cost(int(fields[21]) * _PAGE_BYTES, user + system, children_user + children_system)
    except (OSError, ValueError, IndexError):
        return _Cost()


# --- the checks' observations


def _observed(s: Snapshot) -> tuple[list[Metric], list[tuple[str, int]]]:
    """Return the families sorted by name, and each check's number of rejected observations."""
    rows: dict[str, dict[Labels, float]] = {}
    checks: dict[str, set[str]] = {}
    refused: Counter[str] = Counter()
    kinds: dict[str, str] = {}  # if a gauge and a counter have the same name, the first is exported
    for result in s.results:
        refused[result.check] += result.dropped_observations
        for observation in result.observations:
            is_counter = observation.kind is ObservationKind.COUNTER
            name, series = _metric_series(observation.name, is_counter, observation.labels)
            if (
                name
                and kinds.setdefault(name.removesuffix(TOTAL), name) == name
                and series not in rows.setdefault(name, {})
            ):
                rows[name][series] = observation.value
                checks.setdefault(name, set()).add(result.check)
            else:
                refused[result.check] += 1
    metrics = []
    for name in sorted(rows, key=lambda name: name.removesuffix(TOTAL)):
        source_text = f"Read by check {', '.join(sorted(checks[name]))}."
        meaning = s.meanings.get(name)
        metrics.append(
            Metric(PREFIX + name, _clean(f"{meaning} {source_text}" if meaning else source_text), rows[name])
        )
    return metrics, sorted(refused.items())


@functools.lru_cache(MAX_CACHED_SERIES)
def _metric_series(name: str, is_counter: bool, labels: Labels) -> tuple[str, Labels]:
    """Return an observation's metric and series, or ("", ()) if it cannot be exported.

    A gauge must not look like a counter, because the two would have the same name in OpenMetrics text.
    """
    family = name.removesuffix(TOTAL)
    names = [label for label, _value in labels]
    is_valid = (
        METRIC_NAME.fullmatch(name) is not None
        and (is_counter or family == name)
        and all(LABEL_NAME.fullmatch(label) and label not in RESERVED_LABELS for label in names)
        and len(set(names)) == len(names)
        and RESERVED_NAMES.isdisjoint({name, family})
    )
    return (f"{family}{TOTAL}" if is_counter else name, _series(labels)) if is_valid else ("", ())


# --- families


def _family(name: str, rows: Iterable[Row]) -> Metric:
    """Return the family without duplicate series, because Prometheus rejects a page that contains any."""
    return Metric(PREFIX + name, FAMILIES[name].text, {_series(labels.items()): value for labels, value in rows})


def _series(labels: Iterable[tuple[str, str]]) -> Labels:
    return tuple(sorted([(label, _clean(value)) for label, value in labels]))


def _moment(moment: float) -> list[Row]:
    """Return a row for a time. A time of 0 means "not yet" and has no row."""
    return [({}, moment)] if moment else []


def _clean(raw_text: str) -> str:
    """Return the text as valid UTF-8 without NUL, at which Prometheus would stop reading."""
    if raw_text.isascii() and "\0" not in raw_text:
        return raw_text
    return raw_text.encode("utf-8", "replace").decode().replace("\0", "\ufffd")


# --- the page and the file


def render(snapshot: Snapshot) -> bytes:
    """Return the page in the Prometheus text format."""
    return render_stable(snapshot, openmetrics=False) + render_volatile(snapshot, openmetrics=False)


def render_stable(snapshot: Snapshot, openmetrics: bool, cache: TextCache | None = None) -> bytes:
    """Return the first part of the page, which stays the same until the next snapshot. `cache` is as in `text`."""
    return text(families(snapshot), openmetrics, cache).encode()


def render_volatile(snapshot: Snapshot, openmetrics: bool, cache: TextCache | None = None) -> bytes:
    """Return the second part of the page, which differs for each request. `cache` is as in `text`."""
    return (text(processes(snapshot), openmetrics, cache) + (END if openmetrics else "")).encode()
