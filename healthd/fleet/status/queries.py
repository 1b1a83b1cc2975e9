"""Reads the current state of all nodes from a Prometheus server, with about 25 queries for any number of nodes.

A target that does not answer has only the series `up`. The list of nodes therefore comes from `up`, which includes
unreachable nodes. If node_exporter's textfile collector publishes healthd's metrics, nodes in healthd_node_info are
added. A node that is in both series counts once, with its own target.
"""

from __future__ import annotations

import json
import math
import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from healthd.common.text import regex
from healthd.fleet.sources.prometheus_server import ServerError
from healthd.fleet.status.node import NodeStatus, OpenCondition

QueryFunction: TypeAlias = "Callable[[str, Mapping[str, str]], Any]"  # (path, parameters) -> data, for /api/v1
Labels: TypeAlias = "Mapping[str, str]"
Target: TypeAlias = "tuple[str, str, str]"  # cluster, job and instance identify one healthd

OWN_JOB = "healthd"  # default name of healthd's job in Prometheus (docs/metrics.md)
LAST_SEEN_DAYS = 7
LAST_SEEN_STEP_MINUTES = 5  # resolution with which the last sample is searched, except in the most recent time
DOMAIN_STEP_MINUTES = 1  # the same for the NVLink domain of nodes that have been in several
TARGETS_PER_QUERY = 250  # targets per query for the last sample
DAY_SECONDS = 86400.0
MIN_TIME = 1e9  # epoch seconds, in 2001; an earlier time or a time far in the future is invalid and thus unknown
MAX_AHEAD_SECONDS = 36500 * DAY_SECONDS
_METRIC = regex("(?:node:)?healthd_[a-z_]+(?::[a-z]+)?")
LABEL_QUERIES = {
    "node": "healthd_node_info",
    "version": "healthd_build_info",
    "mode": "healthd_mode_info",
    "health": "healthd_health == 1",
    "owner": "healthd_slurm_drained_by",
    "drain": "healthd_slurm_drain_info",
    "held": "healthd_fleet_limit_drain_waiting == 1",
    # The last value of a node that does not answer now is used, so that its domain is complete. A node that has been in
    # several domains has a series for each of them (_newest_domains).
    "domain": "healthd_nvlink_domain_info or on (cluster, job, instance) "
    f"last_over_time(healthd_nvlink_domain_info[{LAST_SEEN_DAYS}d])",
    # The value is the deadline of the stage, or 0 for a claim.
    "repair": "healthd_repair_stage_deadline_timestamp_seconds or on (cluster, job, instance) "
    "healthd_repair_stage_begun_timestamp_seconds * 0",
}
START_QUERY = "healthd_start_timestamp_seconds"
VALUE_QUERIES = {
    "drained_since": "healthd_slurm_drained_since_timestamp_seconds",
    "drain_desired": "healthd_slurm_drain_desired == 1",
    "slurm_problem": "healthd_slurm_problem == 1",
    "repair_failed": "healthd_repair_given_up == 1",
    # Kept while a node does not answer (packaging/prometheus/healthd.recording.yml); absent without these rules.
    "repair_deadline": "node:healthd_repair_deadline:last",
    "paused_until": "healthd_paused_until_timestamp_seconds",
    "waiting_since": "healthd_fleet_limit_waiting_since_timestamp_seconds",
    # The last round began more than three intervals and 10 minutes ago. The alert HealthdRoundStale has the same limit
    # (packaging/prometheus/healthd.recording.yml).
    "stale_seconds": "time() - healthd_round_started_timestamp_seconds > 3 * healthd_round_interval_seconds + 600",
}
CONDITION_QUERIES = {
    "severity": "healthd_condition_severity",
    "suspected": "healthd_condition_open == 0",
    "acknowledged": "healthd_condition_acknowledged == 1",
    "forgeable": "healthd_condition_enforced == 0",
    "since": "healthd_condition_since_timestamp_seconds",
}


@dataclass(frozen=True, slots=True)
class Fleet:
    """The state of all nodes.

    Attributes:
        time: the server's time in epoch seconds.
        notes: sentences about data that could not be read.
    """

    time: float
    nodes: tuple[NodeStatus, ...]
    notes: tuple[str, ...] = ()


class _Queries:
    """Sends queries for one point in time.

    Attributes:
        job: read only this job's series; "" for all.
        unread: number of invalid series.
    """

    def __init__(self, query_server: QueryFunction, job: str) -> None:
        self._query_server = query_server
        self.job = job
        self.unread = 0
        scalar = _result(query_server("query", {"query": "time()"}), "scalar")
        time = _number(scalar[1]) if len(scalar) == 2 else None
        if time is None or not MIN_TIME <= time <= MIN_TIME + MAX_AHEAD_SECONDS:
            raise ServerError(f"returned an invalid time: {json.dumps(scalar)[:60]}")
        self.time = time

    def vector(self, query: str) -> Iterator[tuple[Labels, float]]:
        """Run a query. Raises ServerError."""
        if self.job and "{" not in query:
            query = _METRIC.sub(lambda metric: f"{metric[0]}{{job={json.dumps(self.job)}}}", query)
        data = self._query_server("query", {"query": query, "time": f"{self.time:.3f}"})
        for sample in _result(data, "vector"):
            try:
                labels, value = sample["metric"], _number(sample["value"][1])
                is_valid = all(isinstance(text, str) for text in labels.values())
            except (TypeError, KeyError, IndexError, AttributeError):
                is_valid = False
            if is_valid and value is not None:
                yield labels, value
            else:
                self.unread += 1

    def by_node(self, query: str) -> dict[Target, tuple[Labels, float]]:
        return {_target(labels): (labels, value) for labels, value in self.vector(query)}

    def valid_time(self, value: float, ahead: float = DAY_SECONDS) -> float:
        """Return a time in epoch seconds, or 0 (unknown) if it is invalid.

        Args:
            ahead: how far the time may be in the future.
        """
        if MIN_TIME <= value <= self.time + ahead:
            return value
        self.unread += bool(value)
        return 0.0


def read_fleet(query_server: QueryFunction, job: str = "") -> Fleet:
    """Return all nodes, each once. Raises ServerError if the server cannot be queried, or has no nodes.

    Args:
        job: read only this job's series. With "", healthd's own job is read first, then any other job with healthd's
            metrics for nodes that are not in healthd's own job.
    """
    queries = _Queries(query_server, job)
    own = job or OWN_JOB
    targets = queries.by_node(f"up{{job={json.dumps(own)}}}")
    labels_by_query = {name: queries.by_node(query) for name, query in LABEL_QUERIES.items() if name != "domain"}
    all_targets = {**labels_by_query["health"], **targets, **labels_by_query["node"]}
    if not all_targets:
        raise ServerError(f'has no target of the job "{own}", and no healthd metrics: name the job with --job')
    down = [
        node_target
        for node_target, (_, up) in targets.items()
        if not up and node_target not in labels_by_query["node"] and node_target not in labels_by_query["health"]
    ]
    last_seen_by_target, notes = _last_seen(queries, down, own)
    domains, domain_notes = _newest_domains(queries)
    labels_by_query["domain"] = domains
    notes += domain_notes
    values = {
        name: {node_target: value for node_target, (_, value) in queries.by_node(query).items()}
        for name, query in VALUE_QUERIES.items()
    }
    started = {node_target: value for node_target, (_, value) in queries.by_node(START_QUERY).items()}
    conditions = _conditions(queries)
    names = _host_names(labels_by_query["node"])
    nodes = {}
    for node_target, (target, _) in all_targets.items():

        def label(name: str, label: str = "", node_target: Target = node_target) -> str:
            labels, _ = labels_by_query[name].get(node_target, ({}, 0.0))
            return labels.get(label or name, "")

        def moment(name: str, ahead: float = DAY_SECONDS, node_target: Target = node_target) -> float:
            return queries.valid_time(values[name].get(node_target, 0.0), ahead)

        last_name, last_seen = last_seen_by_target.get(node_target, ("", 0.0))
        is_down = node_target in down
        _, stage_deadline = labels_by_query["repair"].get(node_target, ({}, 0.0))
        repair_deadline = values["repair_deadline"].get(node_target, 0.0) if is_down else stage_deadline
        owner = label("owner") or label("drain", "owner")
        name = label("node") or last_name or target.get("node")
        nodes[node_target] = NodeStatus(
            node=name or _name_in_other_job(names, node_target) or host_name(node_target[2]),
            instance=node_target[2],
            cluster=node_target[0],
            seen=not is_down,
            last_seen=last_seen,
            health=label("health", "state"),
            mode=label("mode"),
            version=label("version"),
            drained_by=owner,
            reason=label("drain", "reason"),
            drained_since=moment("drained_since") if owner else 0.0,
            drain_desired=node_target in values["drain_desired"],
            slurm_problem=node_target in values["slurm_problem"],
            paused_until=moment("paused_until", MAX_AHEAD_SECONDS),
            waiting_since=moment("waiting_since"),
            limit_partition=label("held", "partition"),
            stale_seconds=min(max(values["stale_seconds"].get(node_target, 0.0), 0.0), queries.time),
            repair_step=label("repair", "step"),
            repair_stage=label("repair", "stage"),
            repair_deadline=queries.valid_time(repair_deadline, MAX_AHEAD_SECONDS),
            repair_failed=node_target in values["repair_failed"],
            domain=label("domain"),
            domain_id=label("domain", "id"),
            conditions=tuple(
                sorted(conditions.get(node_target, ()), key=lambda c: (not c.is_enforced, -c.severity, c.code))
            ),
        )
    once, doubled = _unique_nodes(nodes, started, own)
    if doubled:
        notes.append(
            f"several targets in one job have the same name ({len(doubled):,}: {', '.join(doubled[:3])}): "
            "add a cluster label to the targets of each cluster"
        )
    if queries.unread:
        notes.append(f"{queries.unread:,} invalid series were ignored")
    return Fleet(queries.time, once, tuple(notes))


def _unique_nodes(
    nodes: Mapping[Target, NodeStatus], started: Mapping[Target, float], own: str
) -> tuple[tuple[NodeStatus, ...], list[str]]:
    """Return one row for each (cluster, node), and the names that are shared by several targets in one job.

    Several targets with one name in the same job are all kept, because they may belong to two clusters. But targets
    with the same start time are the same healthd under two addresses. If a node is in several jobs, healthd's own job
    counts, even if its target does not answer: the textfile of another job remains after healthd is gone. If healthd's
    own job does not have the node, the job whose healthd started last counts.
    """
    targets_by_name: dict[tuple[str, str], list[Target]] = defaultdict(list)
    for target, node in nodes.items():
        targets_by_name[node.cluster, node.node].append(target)
    chosen: list[NodeStatus] = []
    duplicates = []
    for (_, name), targets in targets_by_name.items():
        best = min(targets, key=lambda target: (target[1] != own, -started.get(target, 0.0), target))
        targets_of_job = sorted(target for target in targets if target[1] == best[1])
        target_by_start = {started.get(target) or target: target for target in reversed(targets_of_job)}
        chosen += [nodes[target] for target in targets_of_job if target in target_by_start.values()]
        duplicates += [name] if len(target_by_start) > 1 else []
    return tuple(chosen), duplicates


def _host_names(infos: Mapping[Target, tuple[Labels, float]]) -> dict[tuple[str, str], set[tuple[str, str]]]:
    """Return (job, node) pairs for each (cluster, host) that has a node name."""
    names = defaultdict(set)
    for target, (labels, _) in infos.items():
        names[target[0], host_name(target[2])].add((target[1], labels.get("node", "")))
    return names


def _name_in_other_job(names: Mapping[tuple[str, str], set[tuple[str, str]]], target: Target) -> str:
    """Return the node name that the same host has in another job, if it is unique."""
    cluster, job, instance = target
    node_names = {node for other_job, node in names.get((cluster, host_name(instance)), ()) if other_job != job}
    return node_names.pop() if len(node_names) == 1 else ""


def _conditions(queries: _Queries) -> dict[Target, list[OpenCondition]]:
    found = {
        name: {_condition(labels): value for labels, value in queries.vector(q)}
        for name, q in CONDITION_QUERIES.items()
    }
    conditions: dict[Target, list[OpenCondition]] = {}
    for key, severity in found["severity"].items():
        target, check, code, subject = key
        condition = OpenCondition(
            check,
            code,
            subject,
            severity=min(max(int(severity), 0), 3),
            open=key not in found["suspected"],
            acknowledged=key in found["acknowledged"],
            enforced=key not in found["forgeable"],
            since=queries.valid_time(found["since"].get(key, 0.0)),
        )
        conditions.setdefault(target, []).append(condition)
    return conditions


def _last_seen(
    queries: _Queries, down: Sequence[Target], job: str
) -> tuple[dict[Target, tuple[str, float]], list[str]]:
    """Return the name in Slurm and the time last seen (epoch seconds) for each unreachable target, and any notes.

    Reachable targets are not queried, because a week of data for all targets would be too much.
    """
    found: dict[Target, tuple[str, float]] = {}
    try:
        for labels, value in _last_samples(queries, "healthd_node_info", down, job, LAST_SEEN_STEP_MINUTES):
            target = _target(labels)
            name, previous_time = found.get(target, ("", 0.0))
            newer = value >= previous_time
            node = labels.get("node", "")
            found[target] = (
                (node or name) if newer else (name or node),
                max(queries.valid_time(value), previous_time),
            )
    except ServerError as error:
        return found, [f"the time when nodes were last seen is unknown: the server {error}"]
    return found, []


def _newest_domains(queries: _Queries) -> tuple[dict[Target, tuple[Labels, float]], list[str]]:
    """Return the labels of each target's newest NVLink domain, and any notes.

    The query returns one series for each domain that a target without a current one has been in. A series has no time,
    so the times of the last samples are read for targets with several domains. If no time is found, the domain of the
    target is unknown.
    """
    found: dict[Target, tuple[Labels, float]] = {}
    moved: set[Target] = set()
    for labels, value in queries.vector(LABEL_QUERIES["domain"]):
        target = _target(labels)
        other, _ = found.setdefault(target, (labels, value))
        if other.get("domain") != labels.get("domain"):
            moved.add(target)
    for target in moved:
        del found[target]
    try:
        for labels, last_time in _last_samples(
            queries, "healthd_nvlink_domain_info", sorted(moved), queries.job, DOMAIN_STEP_MINUTES
        ):
            target = _target(labels)
            if target in moved and last_time > found.get(target, ({}, 0.0))[1]:
                found[target] = (labels, last_time)
    except ServerError as error:
        return found, [f"the NVLink domain of nodes that changed it is unknown: the server {error}"]
    return found, []


def _last_samples(
    queries: _Queries, metric: str, targets: Sequence[Target], job: str, step_minutes: int
) -> Iterator[tuple[Labels, float]]:
    """Yield the labels and the time of the last sample (epoch seconds) of each series of the metric, for the last
    LAST_SEEN_DAYS. Raises ServerError.

    Args:
        targets: their instances are read. Other targets with the same instance may be included.
        job: read only this job's series; "" for all.
        step_minutes: resolution, except in the most recent time. A series that exists for less time may be missing.
    """
    for first in range(0, len(targets), TARGETS_PER_QUERY):
        instances = "|".join(re.escape(target[2]) for target in targets[first : first + TARGETS_PER_QUERY])
        job_matcher = f"job={json.dumps(job)}," if job else ""
        series = f"{metric}{{{job_matcher}instance=~{json.dumps(instances)}}}"
        week = f"max_over_time(timestamp({series})[{LAST_SEEN_DAYS}d:{step_minutes}m])"
        yield from queries.vector(f"max_over_time(timestamp({series})[{step_minutes}m:1s]) or {week}")


def host_name(instance: str) -> str:
    """Return "gpu-1" for "gpu-1:9478" and "gpu-1.example.org:9478", and "10.0.0.1" for "10.0.0.1:9478"."""
    from healthd.fleet.sources.prometheus import node_name

    try:
        return node_name(instance) or instance
    except ValueError:  # not an address
        return instance


def _target(labels: Labels) -> Target:
    return labels.get("cluster", ""), labels.get("job", ""), labels.get("instance", "")


def _condition(labels: Labels) -> tuple[Target, str, str, str]:
    return _target(labels), labels.get("check", ""), labels.get("code", ""), labels.get("subject", "")


def _number(text: Any) -> float | None:
    """Parse a sample. Return a finite number as text, or None."""
    try:
        number = float(text)
    except (ValueError, TypeError, OverflowError):
        return None
    return number if math.isfinite(number) else None


def _result(data: Any, kind: str) -> list[Any]:
    result = data.get("result") if isinstance(data, dict) else None
    if not isinstance(result, list) or data.get("resultType") != kind:
        raise ServerError("does not respond like Prometheus: is this the address of a Prometheus server?")
    return result
