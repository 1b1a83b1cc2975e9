"""Finds links that fail more often than others: flaps, errors and lost speed, by port and by switch.

Kokolis, Kuchnik et al. (HPCA 2025, arXiv 2410.21680, section IV.B) call for monitoring symbol errors and lost link
speed in addition to adaptive routing, and not only whether links are up. healthd's nodes report both. Figure 12 of the
paper is not reproduced: it is a benchmark of a network with injected errors, which no event store contains.

A port is an outlier if it has significantly more episodes than expected by chance. A switch is an outlier if its nodes
have significantly more episodes than the same number of random nodes from its cluster. Benjamini and Hochberg's method
controls the false discovery rate of ports and of switches.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
from scipy import stats

from healthd.common.page import plural
from healthd.fleet.answers.document import Document, share
from healthd.fleet.answers.study import Row, Study
from healthd.fleet.statistics.intervals import Spread, rate_estimate
from healthd.fleet.statistics.multiplicity import benjamini_hochberg
from healthd.fleet.tables import BOOLEAN, TEXT

# Codes of each kind of episode. Congestion (buffer_overrun, ack_timeout_rate, slow_restart_rate) is not a link fault.
KINDS = {
    "down": ("ib_link/down", "ib_link/missing", "eth_link/down", "eth_link/member_down", "eth_link/missing"),
    "flaps": ("ib_flap/link_downed", "ib_flap/carrier_lost", "eth_link/flapping"),
    "errors": (
        *("ib_errors/symbols", "ib_errors/symbol_rate", "ib_errors/link_integrity"),
        *("ib_errors/receive_rate", "ib_errors/recovery_rate"),
    ),
    "downgrades": ("ib_link/slow", "eth_link/slow"),
    "pcie_downgrades": ("pcie_link/slow", "pcie_link/narrow", "gpu_pcie/lanes", "gpu_pcie/generation"),
}
KIND_BY_CODE = {code: kind for kind, codes in KINDS.items() for code in codes}
INTERNAL_KIND = "pcie_downgrades"  # inside a node: no network switch is involved
EPISODE_GAP_SECONDS = 3600  # sightings of one kind on one port within this time belong to one episode
SWITCH_EVENT_SECONDS, SWITCH_EVENT_MIN_NODES = (
    60,
    3,
)  # a switch event: at least this many of a switch's nodes lose a link within this time
LEVEL = 0.05  # on average, at most this share of the findings is false
SEED = 12
FIRST_DRAWS, MORE_DRAWS = 1000, 50_000

Port = tuple[str, str, str]  # cluster, node, subject
Node = tuple[str, str]


class Sighting(NamedTuple):
    """A row returned by links_sightings.sql."""

    cluster: str
    node: str
    subject: str | None
    code: str
    time: int


class ObservedNode(NamedTuple):
    """A row returned by links_nodes.sql. `days` are observed days."""

    cluster: str
    node: str
    model: str
    switch: str | None
    days: float


class PortCount(NamedTuple):
    """A row returned by links_ports.sql."""

    model: str
    inside: bool
    ports: int


def links(study: Study) -> Document:
    """Return the document for `healthd fleet links`. Raises Unanswerable if there are no events.

    Keys:
        kinds: the fleet's rate for each kind, in episodes per 1000 port-days.
        ports, switches: rows, with outliers first.
        together: times at which several nodes on one switch lost their links.
    """
    if not study.has_rows("scraped_conditions"):
        study.require("events")
    link_codes = ((code, code in KINDS[INTERNAL_KIND]) for code in KIND_BY_CODE)
    study.add_table("link_codes", {"code": TEXT, "inside": BOOLEAN}, link_codes)
    nodes = study.query("links_nodes", ObservedNode)
    ports = {(row.model, row.inside): row.ports for row in study.query("links_ports", PortCount)}
    sights = study.query("links_sightings", Sighting)
    episode_counts = count_episodes(sights)
    ports_by_node = {
        (row.cluster, row.node, inside): ports.get((row.model, inside), 0) for row in nodes for inside in (False, True)
    }
    notes = [
        "The number of a node's ports is taken from the ports that nodes of the same model reported. A port that had "
        "no problem on any of these nodes is not counted.",
        *study.coverage_notes("events"),
    ]
    unnamed_episodes = sum(
        count for counts in episode_counts.values() for (_, _, port), count in counts.items() if not port
    )
    if unnamed_episodes:
        notes.append(
            f"{plural(unnamed_episodes, 'episode')} {'has' if unnamed_episodes == 1 else 'have'} no port name; "
            "all of a node's episodes without a port name are counted for one port."
        )
    unknown_switches = sum(row.switch is None for row in nodes)
    if unknown_switches:
        notes.append(
            f"The switch is unknown for {unknown_switches:,} of {len(nodes):,} nodes: run healthd fleet ingest --nodes."
        )
    return {
        **study.head("links", *notes),
        "merge_seconds": EPISODE_GAP_SECONDS,
        "level": LEVEL,
        "ports_per_node": [
            {"model": model, "inside": inside, "ports": count} for (model, inside), count in sorted(ports.items())
        ],
        "kinds": rate_rows(episode_counts, nodes, ports_by_node),
        "ports": worst_ports(episode_counts, nodes, ports_by_node),
        "switches": worst_switches(episode_counts, nodes),
        "together": switch_events(sights, {(row.cluster, row.node): row.switch for row in nodes}),
    }


# --- episodes, and their rates


def count_episodes(sights: Iterable[Sighting]) -> dict[str, Counter[Port]]:
    """Count each port's episodes by kind. Sightings may be in any order."""
    times: dict[tuple[str, Port], list[int]] = defaultdict(list)
    for row in sights:
        port = (row.cluster, row.node, row.subject or "")
        times[KIND_BY_CODE[row.code], port].append(row.time)
    found: dict[str, Counter[Port]] = {kind: Counter() for kind in KINDS}
    for (kind, port), port_times in sorted(times.items()):
        port_times.sort()
        gaps = sum(after > before + EPISODE_GAP_SECONDS for before, after in pairwise(port_times))
        found[kind][port] = 1 + gaps
    return found


def rate_rows(
    episode_counts: Mapping[str, Counter[Port]],
    nodes: Sequence[ObservedNode],
    ports_by_node: Mapping[tuple[str, str, bool], int],
) -> list[Row]:
    """Return the fleet's rate for each kind. Its interval includes the spread between nodes."""
    rows = []
    for kind, port_counts in episode_counts.items():
        by_node = Counter[Node]()
        for (cluster, node, _), count in port_counts.items():
            by_node[cluster, node] += count
        port_days = _port_days(kind, nodes, ports_by_node)
        counts = [by_node[row.cluster, row.node] for row in nodes]
        estimate = rate_estimate(Spread(counts, list(port_days.values())))
        exposure = sum(port_days.values())
        interval = estimate.interval if exposure else None
        rows.append(
            {
                "kind": kind,
                "codes": list(KINDS[kind]),
                "episodes": sum(counts),
                "ports": len(port_counts),
                "nodes": sum(count > 0 for count in counts),
                "port_days": exposure,
                "per_1000_port_days": _per_thousand(share(sum(counts), exposure)),
                "interval": None if interval is None else [1000 * end for end in interval],
                "method": estimate.method,
            }
        )
    return rows


def _per_thousand(rate: float | None) -> float | None:
    return None if rate is None else 1000 * rate


def _port_days(
    kind: str, nodes: Sequence[ObservedNode], ports_by_node: Mapping[tuple[str, str, bool], int]
) -> dict[Node, float]:
    """Return the observed port-days for each node."""
    inside = kind == INTERNAL_KIND
    return {(row.cluster, row.node): row.days * ports_by_node[row.cluster, row.node, inside] for row in nodes}


# --- ports and switches that stand out


def worst_ports(
    episode_counts: Mapping[str, Counter[Port]],
    nodes: Sequence[ObservedNode],
    ports_by_node: Mapping[tuple[str, str, bool], int],
) -> list[Row]:
    """Return ports with two or more episodes of a kind. Those least likely to be due to chance come first.

    Keys:
        p_value: probability of at least this many episodes by chance. Given the total number of episodes, a port's
            number is binomial, in proportion to the port's observed days (Przyborowski and Wilenski, Biometrika 31,
            1940).
        adjusted: the p-value adjusted for tests of all ports and kinds, including ports without an episode.
    """
    rows: list[Row] = []
    tests = 0
    days = {(row.cluster, row.node): row.days for row in nodes}
    switch = {(row.cluster, row.node): row.switch for row in nodes}
    for kind, port_counts in episode_counts.items():
        port_days = sum(_port_days(kind, nodes, ports_by_node).values())
        total = sum(port_counts.values())
        if not total or not port_days:
            continue
        tests += sum(ports_by_node[cluster, node, kind == INTERNAL_KIND] for cluster, node in days)
        for (cluster, node, port), count in port_counts.items():
            share_of_days = min(1.0, days[cluster, node] / port_days)
            if count > 1 and 0 < share_of_days < 1:
                rows.append(
                    {
                        "cluster": cluster,
                        "node": node,
                        "port": port,
                        "switch": switch[cluster, node],
                        "kind": kind,
                        "episodes": count,
                        "expected": total * share_of_days,
                        "per_1000_port_days": 1000 * count / days[cluster, node],
                        "p_value": float(stats.binom.sf(count - 1, total, share_of_days)),
                    }
                )
    return _adjust_p_values(rows, tests, ("cluster", "node", "port", "kind"))


def worst_switches(episode_counts: Mapping[str, Counter[Port]], nodes: Sequence[ObservedNode]) -> list[Row]:
    """Return the switches whose nodes had an episode. Those least likely to be due to chance come first.

    The p-value is the share of draws in which the same number of random nodes from the cluster exceeds its expected
    number of episodes by at least as much as the switch's nodes do. Because whole nodes are drawn, a single bad node is
    no evidence against its switch. The random draws have a fixed seed.

    Source: a bootstrap test by clusters (Efron and Tibshirani, "An Introduction to the Bootstrap", 1993, chapter 16).
    """
    rows: list[Row] = []
    tests = 0
    clusters = sorted({row.cluster for row in nodes})
    for kind, port_counts in episode_counts.items():
        by_node = Counter[Node]()
        for (cluster, node, _), count in port_counts.items():
            by_node[cluster, node] += count
        for cluster in clusters if kind != INTERNAL_KIND else ():
            switched_nodes = sorted(
                (row.switch, row.node, row.days, by_node[cluster, row.node])
                for row in nodes
                if row.cluster == cluster and row.switch is not None and row.days > 0
            )
            total, days = sum(entry[3] for entry in switched_nodes), sum(entry[2] for entry in switched_nodes)
            switches: dict[str, list[tuple[str, str, float, int]]] = defaultdict(list)
            for entry in switched_nodes:
                switches[entry[0]].append(entry)
            if not total or len(switches) < 2:
                continue
            tests += len(switches)
            excesses = np.array([entry[3] - total * entry[2] / days for entry in switched_nodes])
            for name, switch_nodes in switches.items():
                count, switch_days = sum(entry[3] for entry in switch_nodes), sum(entry[2] for entry in switch_nodes)
                if count:
                    expected = total * switch_days / days
                    rows.append(
                        {
                            "cluster": cluster,
                            "switch": name,
                            "kind": kind,
                            "nodes": len(switch_nodes),
                            "nodes_hit": sum(entry[3] > 0 for entry in switch_nodes),
                            "episodes": count,
                            "expected": expected,
                            "per_1000_node_days": 1000 * count / switch_days,
                            "p_value": drawn_p_value(excesses, len(switch_nodes), count - expected),
                        }
                    )
    return _adjust_p_values(rows, tests, ("cluster", "switch", "kind"))


def drawn_p_value(excesses: np.ndarray[Any, np.dtype[np.float64]], size: int, observed: float) -> float:
    """Return the probability that `size` of these numbers, drawn with replacement, sum to at least `observed`.

    If few of the first draws reach `observed`, many more draws are made.
    """
    if observed <= 0:
        return 1.0
    random = np.random.default_rng(SEED)
    p_value = 1.0
    for draws in (FIRST_DRAWS, MORE_DRAWS):
        exceeding, remaining = 0, draws
        while remaining:
            batch = min(remaining, max(1, 2_000_000 // size))
            sums = excesses[random.integers(0, len(excesses), (batch, size))].sum(axis=1)
            exceeding += int((sums >= observed - 1e-9).sum())
            remaining -= batch
        p_value = (1 + exceeding) / (1 + draws)
        if p_value > 0.05:
            break
    return p_value


def _adjust_p_values(rows: list[Row], tests: int, keys: tuple[str, ...]) -> list[Row]:
    adjusted = benjamini_hochberg([row["p_value"] for row in rows], tests)
    adjusted_rows = [
        {**row, "adjusted": p_value, "outlier": p_value < LEVEL and row["episodes"] > row["expected"]}
        for row, p_value in zip(rows, adjusted, strict=True)
    ]
    return sorted(adjusted_rows, key=lambda row: (row["adjusted"], row["p_value"], *(row[name] for name in keys)))


def switch_events(sights: Iterable[Sighting], switch_by_node: Mapping[Node, str | None]) -> list[Row]:
    """Return the times when SWITCH_EVENT_MIN_NODES nodes on one switch lost a link within SWITCH_EVENT_SECONDS.

    Only the kinds down and flaps are used.
    """
    by_switch: dict[tuple[str, str], list[tuple[int, str]]] = defaultdict(list)
    for row in sights:
        switch = switch_by_node.get((row.cluster, row.node))
        if switch is not None and KIND_BY_CODE[row.code] in ("down", "flaps"):
            by_switch[row.cluster, switch].append((row.time, row.node))
    rows = []
    for (cluster, switch), losses in sorted(by_switch.items()):
        losses.sort()
        begin = 0
        while begin < len(losses):
            end = begin
            while end < len(losses) and losses[end][0] <= losses[begin][0] + SWITCH_EVENT_SECONDS:
                end += 1
            names = sorted({node for _, node in losses[begin:end]})
            if len(names) >= SWITCH_EVENT_MIN_NODES:
                rows.append({"cluster": cluster, "switch": switch, "time": losses[begin][0], "nodes": names})
                begin = end
            else:
                begin += 1
    return sorted(rows, key=lambda row: (row["time"], row["cluster"], row["switch"]))


def has_findings(links: Document) -> bool:
    """Return True if a port or switch stands out, or if several nodes of a switch lost links at once."""
    return bool(links["together"]) or any(row["outlier"] for row in (*links["ports"], *links["switches"]))
