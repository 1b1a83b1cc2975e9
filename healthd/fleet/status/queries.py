"""Current state of all nodes from a Prometheus server: some twenty queries, for any number of nodes.

A target that does not answer has no series except `up`. The nodes are therefore those of `up`, and those of
healthd_node_info if node_exporter's textfile collector carries the metrics. An unreachable node is listed, never left
out. A node found by both counts once, by its own target.
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
from healthd.fleet.status.node import NodeNow, Standing

Ask: TypeAlias = "Callable[[str, Mapping[str, str]], Any]"  # (path, parameters) -> data, of /api/v1
Labels: TypeAlias = "Mapping[str, str]"
Where: TypeAlias = "tuple[str, str, str]"  # cluster, job, instance: one healthd

OWN_JOB = "healthd"  # default name of healthd's job in Prometheus (docs/metrics.md)
LAST_SEEN_DAYS = 7
LOOKS_MINUTES = 5  # resolution of the search for the last sample, except for its newest part
AT_ONCE = 250  # targets per query for the last sample
DAY_SECONDS = 86400.0
EARLIEST = 1e9  # epoch seconds, 2001: an earlier time, or one far ahead, is invalid and counts as unknown
FARTHEST_SECONDS = 36500 * DAY_SECONDS
_METRIC = regex("healthd_[a-z_]+")
NAMED = {
    "node": "healthd_node_info",
    "version": "healthd_build_info",
    "mode": "healthd_mode_info",
    "health": "healthd_health == 1",
    "owner": "healthd_slurm_drained_by",
    "drain": "healthd_slurm_drain_info",
    "held": "healthd_fleet_limit_drain_waiting == 1",
}
STARTED = "healthd_start_timestamp_seconds"
VALUES = {
    "drained_since": "healthd_slurm_drained_since_timestamp_seconds",
    "drain_desired": "healthd_slurm_drain_desired == 1",
    "slurm_problem": "healthd_slurm_problem == 1",
    "paused_until": "healthd_paused_until_timestamp_seconds",
    "waiting_since": "healthd_fleet_limit_waiting_since_timestamp_seconds",
    # Three rounds late and 10 minutes: as the alert HealthdRoundStale (packaging/prometheus/healthd.recording.yml).
    "stale_seconds": "time() - healthd_round_started_timestamp_seconds > 3 * healthd_round_interval_seconds + 600",
}
CONDITIONS = {
    "severity": "healthd_condition_severity",
    "suspected": "healthd_condition_open == 0",
    "acknowledged": "healthd_condition_acknowledged == 1",
    "forgeable": "healthd_condition_enforced == 0",
    "since": "healthd_condition_since_timestamp_seconds",
}


@dataclass(frozen=True, slots=True)
class Fleet:
    """time: the server's, in epoch seconds. notes: what could not be read, as sentences."""

    time: float
    nodes: tuple[NodeNow, ...]
    notes: tuple[str, ...] = ()


class _Queries:
    """Queries at one moment. job: only series of this job; "" = all. unread: number of invalid series."""

    def __init__(self, ask: Ask, job: str) -> None:
        self._ask = ask
        self.job = job
        self.unread = 0
        scalar = _result(ask("query", {"query": "time()"}), "scalar")
        time = _number(scalar[1]) if len(scalar) == 2 else None
        if time is None or not EARLIEST <= time <= EARLIEST + FARTHEST_SECONDS:
            raise ServerError(f"has an invalid time: {json.dumps(scalar)[:60]}")
        self.time = time

    def vector(self, query: str) -> Iterator[tuple[Labels, float]]:
        """Run a query. Raises ServerError."""
        if self.job and "{" not in query:
            query = _METRIC.sub(lambda metric: f"{metric[0]}{{job={json.dumps(self.job)}}}", query)
        data = self._ask("query", {"query": query, "time": f"{self.time:.3f}"})
        for one in _result(data, "vector"):
            try:
                labels, value = one["metric"], _number(one["value"][1])
                texts = all(isinstance(text, str) for text in labels.values())
            except (TypeError, KeyError, IndexError, AttributeError):
                texts = False
            if texts and value is not None:
                yield labels, value
            else:
                self.unread += 1

    def by_node(self, query: str) -> dict[Where, tuple[Labels, float]]:
        return {_where(labels): (labels, value) for labels, value in self.vector(query)}

    def moment(self, value: float, ahead: float = DAY_SECONDS) -> float:
        """Return epoch seconds, or 0 (unknown) for an invalid time. ahead: how far it may be in the future."""
        if EARLIEST <= value <= self.time + ahead:
            return value
        self.unread += bool(value)
        return 0.0


def read(ask: Ask, job: str = "") -> Fleet:
    """Return all nodes, each once.

    job: only its series; "" = those of healthd's own job and, for nodes it does not have, those of any other job with
    healthd's metrics. Raises ServerError if the server cannot be queried, or has no node.
    """
    queries = _Queries(ask, job)
    own = job or OWN_JOB
    targets = queries.by_node(f"up{{job={json.dumps(own)}}}")
    named = {name: queries.by_node(query) for name, query in NAMED.items()}
    there = {**named["health"], **targets, **named["node"]}
    if not there:
        raise ServerError(f'has no target of the job "{own}", and no metric of healthd: name the job with --job')
    down = [at for at, (_, up) in targets.items() if not up and at not in named["node"] and at not in named["health"]]
    last, notes = _last_seen(queries, down, own)
    values = {name: {at: value for at, (_, value) in queries.by_node(query).items()} for name, query in VALUES.items()}
    started = {at: value for at, (_, value) in queries.by_node(STARTED).items()}
    conditions = _conditions(queries)
    names = _names_of_hosts(named["node"])
    nodes = {}
    for at, (target, _) in there.items():

        def label(name: str, label: str = "", at: Where = at) -> str:
            labels, _ = named[name].get(at, ({}, 0.0))
            return labels.get(label or name, "")

        def moment(name: str, ahead: float = DAY_SECONDS, at: Where = at) -> float:
            return queries.moment(values[name].get(at, 0.0), ahead)

        known, last_seen = last.get(at, ("", 0.0))
        owner = label("owner") or label("drain", "owner")
        name = label("node") or known or target.get("node")
        nodes[at] = NodeNow(
            node=name or _name_of_host(names, at) or host_of(at[2]),
            instance=at[2],
            cluster=at[0],
            seen=at not in down,
            last_seen=last_seen,
            health=label("health", "state"),
            mode=label("mode"),
            version=label("version"),
            drained_by=owner,
            reason=label("drain", "reason"),
            drained_since=moment("drained_since") if owner else 0.0,
            drain_desired=at in values["drain_desired"],
            slurm_problem=at in values["slurm_problem"],
            paused_until=moment("paused_until", FARTHEST_SECONDS),
            waiting_since=moment("waiting_since"),
            limit_partition=label("held", "partition"),
            stale_seconds=min(max(values["stale_seconds"].get(at, 0.0), 0.0), queries.time),
            conditions=tuple(sorted(conditions.get(at, ()), key=lambda c: (not c.acts, -c.severity, c.code))),
        )
    once, doubled = _once(nodes, started, own)
    if doubled:
        notes.append(
            f"several targets of one job have the same name ({len(doubled):,}: {', '.join(doubled[:3])}): "
            "add a label cluster to the targets of each cluster"
        )
    if queries.unread:
        notes.append(f"{queries.unread:,} invalid series are left out")
    return Fleet(queries.time, once, tuple(notes))


def _once(
    nodes: Mapping[Where, NodeNow], started: Mapping[Where, float], own: str
) -> tuple[tuple[NodeNow, ...], list[str]]:
    """Return one row for each (cluster, node), and the names that several targets of one job have.

    Those targets are all kept: they may belong to two clusters. Of several jobs healthd's own counts, even if it does
    not answer, since a textfile outlives its healthd; else the one started last. Within a job, targets with the same
    start time are the same healthd under two addresses.
    """
    alike: dict[tuple[str, str], list[Where]] = defaultdict(list)
    for at, node in nodes.items():
        alike[node.cluster, node.node].append(at)
    chosen: list[NodeNow] = []
    doubled = []
    for (_, name), places in alike.items():
        best = min(places, key=lambda at: (at[1] != own, -started.get(at, 0.0), at))
        of_job = sorted(at for at in places if at[1] == best[1])
        healthds = {started.get(at) or at: at for at in reversed(of_job)}
        chosen += [nodes[at] for at in of_job if at in healthds.values()]
        doubled += [name] if len(healthds) > 1 else []
    return tuple(chosen), doubled


def _names_of_hosts(infos: Mapping[Where, tuple[Labels, float]]) -> dict[tuple[str, str], set[tuple[str, str]]]:
    """Return (job, node) for each (cluster, host) that has a node name."""
    names = defaultdict(set)
    for at, (labels, _) in infos.items():
        names[at[0], host_of(at[2])].add((at[1], labels.get("node", "")))
    return names


def _name_of_host(names: Mapping[tuple[str, str], set[tuple[str, str]]], at: Where) -> str:
    """Return the node name of the same host in another job, if it is unique."""
    cluster, job, instance = at
    told = {node for other, node in names.get((cluster, host_of(instance)), ()) if other != job}
    return told.pop() if len(told) == 1 else ""


def _conditions(queries: _Queries) -> dict[Where, list[Standing]]:
    found = {name: {_condition(labels): value for labels, value in queries.vector(q)} for name, q in CONDITIONS.items()}
    conditions: dict[Where, list[Standing]] = {}
    for key, severity in found["severity"].items():
        at, check, code, subject = key
        standing = Standing(
            check,
            code,
            subject,
            severity=min(max(int(severity), 0), 3),
            open=key not in found["suspected"],
            acknowledged=key in found["acknowledged"],
            enforced=key not in found["forgeable"],
            since=queries.moment(found["since"].get(key, 0.0)),
        )
        conditions.setdefault(at, []).append(standing)
    return conditions


def _last_seen(queries: _Queries, down: Sequence[Where], job: str) -> tuple[dict[Where, tuple[str, float]], list[str]]:
    """Return (name in Slurm, epoch seconds) of unreachable targets, and notes.

    Only these targets are queried: a week of all targets would be too much.
    """
    found: dict[Where, tuple[str, float]] = {}
    for first in range(0, len(down), AT_ONCE):
        instances = json.dumps("|".join(re.escape(at[2]) for at in down[first : first + AT_ONCE]))
        series = f"healthd_node_info{{job={json.dumps(job)},instance=~{instances}}}"
        week = f"max_over_time(timestamp({series})[{LAST_SEEN_DAYS}d:{LOOKS_MINUTES}m])"
        query = f"max_over_time(timestamp({series})[{LOOKS_MINUTES}m:1s]) or {week}"
        try:
            for labels, value in queries.vector(query):
                at = _where(labels)
                name, seen = found.get(at, ("", 0.0))
                newer = value >= seen
                node = labels.get("node", "")
                found[at] = ((node or name) if newer else (name or node), max(queries.moment(value), seen))
        except ServerError as error:
            return found, [f"the time when nodes were last seen is not known: the server {error}"]
    return found, []


def host_of(instance: str) -> str:
    """Return "gpu-1" for "gpu-1:9478" and "gpu-1.example.org:9478", and "10.0.0.1" for "10.0.0.1:9478"."""
    from healthd.fleet.sources.prometheus import node_of

    try:
        return node_of(instance) or instance
    except ValueError:  # not an address
        return instance


def _where(labels: Labels) -> Where:
    return labels.get("cluster", ""), labels.get("job", ""), labels.get("instance", "")


def _condition(labels: Labels) -> tuple[Where, str, str, str]:
    return _where(labels), labels.get("check", ""), labels.get("code", ""), labels.get("subject", "")


def _number(text: Any) -> float | None:
    """Parse a sample: a finite number as text, or None."""
    try:
        number = float(text)
    except (ValueError, TypeError, OverflowError):
        return None
    return number if math.isfinite(number) else None


def _result(data: Any, kind: str) -> list[Any]:
    result = data.get("result") if isinstance(data, dict) else None
    if not isinstance(result, list) or data.get("resultType") != kind:
        raise ServerError("answers unlike Prometheus: is this the address of a Prometheus server?")
    return result
