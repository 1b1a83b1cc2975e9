"""Formats the state of all nodes as text and JSON. All functions are pure."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence, Set
from typing import Any, NamedTuple

from healthd.common.duration import duration
from healthd.common.page import Page, plain, plural
from healthd.common.slurm.blocks import BlockTopology, largest_job
from healthd.common.slurm.hostlist import to_hostlist
from healthd.fleet.status.node import EXIT_STATUS, HEALTHD_OWNERS, ORDERS, SEVERITIES, Group, NodeStatus
from healthd.fleet.status.queries import MIN_TIME, Fleet

# if at most this many nodes have the same text, each has its own row; more nodes share one row with a host list
MAX_ROWS_ALIKE = 30
MAX_DOMAINS_IN_NOTE = 5
MAX_TEXT_LENGTH = 300  # maximum characters of a Reason, or of a name that healthd did not choose
GROUP_LABELS = {
    Group.DRAIN_WAITING: "broken and in service",
    Group.NOT_SEEN: "not reporting",
    Group.DRAINED: "drained by healthd",
    Group.BROKEN: "broken",
    Group.UNKNOWN: "unknown",
    Group.WARNING: "warning",
    Group.DRAINED_BY_OTHERS: "drained by others",
    Group.HEALTHY: "healthy",
}
SLURM_LABELS = {
    Group.DRAIN_WAITING: "in service",
    Group.NOT_SEEN: "not reporting",
    Group.DRAINED: "drained",
    Group.DRAINED_BY_OTHERS: "by others",
}
STEP_LABELS = {"gpu_reset": "GPU reset", "reboot": "reboot", "power_cycle": "power cycle"}
STAGE_LABELS = {"claim": "waits for its turn", "step": "in progress", "verify": "being verified"}
USABLE = (Group.HEALTHY, Group.WARNING)  # groups of the nodes on which a job can run
LARGEST_JOB_NOTE = (
    "The largest job assumes that no other job runs in the domain. Slurm's blocks are not taken into "
    "account; use --topology FILE."
)
LARGEST_JOB_NOTE_WITH_BLOCKS = "The largest job assumes that no other job runs in the domain."
DELAY_LABELS = {
    "observe": "mode observe",
    "pause": "paused",
    "limit": "waiting for the fleet limit",
    "slurm": "Slurm does not answer",
}


def select_nodes(fleet: Fleet, drained: bool = False, problems: bool = False, order: str = "worst") -> list[NodeStatus]:
    """Select and sort nodes.

    Args:
        drained: select only drained nodes.
        problems: leave out nodes that are healthy and in service.
    """
    nodes = sorted(fleet.nodes, key=ORDERS[order])
    if drained:
        return [node for node in nodes if node.drained_by]
    return [node for node in nodes if node.group is not Group.HEALTHY or node.paused_until] if problems else nodes


def exit_status(fleet: Fleet) -> int:
    """Return the exit status: 0 all is well, 1 warning or unknown, 2 broken, drained by healthd or unreachable."""
    return max((EXIT_STATUS[node.group] for node in fleet.nodes), default=0)


def fleet_text(
    fleet: Fleet,
    nodes: Sequence[NodeStatus],
    page: Page,
    show_all: bool = False,
    topology: BlockTopology | None = None,
) -> str:
    """Return the summary and a row for each node. Many nodes with the same text share one row, unless `show_all` is
    set."""
    lines = [*page.wrap(summary(fleet)), *page.wrap(_common_text(fleet))]
    lines += [line for text in _domain_texts(fleet, topology) for line in page.wrap(text)]
    lines += [line for note in fleet.notes for line in page.wrap(f"note: {note}")]
    rows_by_text: dict[tuple[str, ...], list[tuple[NodeStatus, Row]]] = {}
    several = len({node.cluster for node in fleet.nodes}) > 1
    for node in nodes:
        row = _row(fleet, node, several)
        rows_by_text.setdefault((row.health, row.slurm, row.why), []).append((node, row))
    rows = [
        entry for entries in rows_by_text.values() if show_all or len(entries) <= MAX_ROWS_ALIKE for entry in entries
    ]
    if rows:
        positions = {id(node): at for at, node in enumerate(nodes)}
        rows.sort(key=lambda entry: positions[id(entry[0])])
        lines += ["", *page.table(("node", "health", "slurm", "for", "why"), [row for _, row in rows])]
    for (health, slurm, why), entries in rows_by_text.items():
        if not show_all and len(entries) > MAX_ROWS_ALIKE:
            label = "healthy" if (health, why) == ("healthy", "") else f"{health}, {slurm}{', ' if why else ''}{why}"
            lines += ["", *page.item(f"{len(entries):,} {label}: {_host_lists([node for node, _ in entries])}")]
    return "\n".join(lines) + "\n"


def summary(fleet: Fleet) -> str:
    """Return text like "2,000 nodes: 1,996 healthy, 3 drained by healthd, 1 not reporting for 2 h"."""
    groups = Counter(node.group for node in fleet.nodes)
    parts = []
    for group in (Group.HEALTHY, *(group for group in Group if group is not Group.HEALTHY)):
        if groups[group]:
            detail = (
                _unreachable_text(fleet)
                if group is Group.NOT_SEEN
                else _acknowledged_text(fleet)
                if group is Group.BROKEN
                else ""
            )
            parts.append(f"{groups[group]:,} {GROUP_LABELS[group]}{detail}{_repair_counts(fleet, group)}")
    return f"{plural(len(fleet.nodes), 'node')}: {', '.join(parts)}"


def fleet_document(fleet: Fleet, nodes: Iterable[NodeStatus], topology: BlockTopology | None = None) -> dict[str, Any]:
    """Return the document for `--json` (docs/json.md). Unknown values are null."""
    groups = Counter(node.group for node in fleet.nodes)
    return {
        "answer": "status",
        "version": 1,
        "time": fleet.time,
        "counts": {"nodes": len(fleet.nodes), **{group.value: groups[group] for group in Group}},
        "paused": sum(bool(node.paused_until) for node in fleet.nodes),
        "in_repair": sum(node.is_in_repair for node in fleet.nodes),
        "repair_late": sum(node.is_repair_late(fleet.time) for node in fleet.nodes),
        "repair_failed": sum(node.repair_failed for node in fleet.nodes),
        "domains": [dataclasses.asdict(domain) for domain in count_domains(fleet, topology)],
        "block_sizes": [topology.base_size * 2**level for level in topology.levels] if topology else None,
        "nodes": [_node_document(node) for node in nodes],
        "notes": list(fleet.notes),
    }


def _node_document(node: NodeStatus) -> dict[str, Any]:
    fields = dataclasses.asdict(node)
    times = ("last_seen", "drained_since", "paused_until", "waiting_since", "stale_seconds", "repair_deadline")
    texts = (
        *("health", "mode", "version", "drained_by", "reason", "limit_partition", "repair_step", "repair_stage"),
        *("domain", "domain_id"),
    )
    conditions = [
        {**dataclasses.asdict(c), "severity": SEVERITIES[c.severity], "since": c.since or None} for c in node.conditions
    ]
    return {
        **fields,
        **{name: fields[name] or None for name in (*times, *texts)},
        "group": node.group.value,
        "delayed_by": list(node.delayed_by),
        "conditions": conditions,
    }


# --- NVLink domains


@dataclasses.dataclass(frozen=True, slots=True)
class DomainCount:
    """The nodes of an NVLink domain (GB200 and GB300 NVL72).

    Attributes:
        id: short id, as in the drain reason.
        healthy: in service without a problem.
        drained: by healthd or others.
        not_seen: not reporting to Prometheus.
        other: in service, but not healthy.
        largest_job: nodes of the largest job that the domain can run, if it runs no other job.
        blocks: its blocks in Slurm, or None if they are unknown.
    """

    cluster: str
    domain: str
    id: str
    nodes: int
    healthy: int
    drained: int
    not_seen: int
    other: int
    largest_job: int
    blocks: tuple[BlockCount, ...] | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class BlockCount:
    """The nodes of an NVLink domain in one block of Slurm's topology/block, and how many of them are usable."""

    block: str
    nodes: int
    usable: int


def count_domains(fleet: Fleet, topology: BlockTopology | None = None) -> list[DomainCount]:
    """Return the counts for each NVLink domain. Domains with drained or unseen nodes come first.

    A job can use a node if it is in service, and healthy or only with a warning. Without `topology`, all usable nodes
    count for the largest job. With it, only nodes in blocks do, because Slurm starts no job on other nodes together
    with these.
    """
    nodes_by_domain: dict[tuple[str, str, str], list[NodeStatus]] = {}
    for node in fleet.nodes:
        if node.domain:
            nodes_by_domain.setdefault((node.cluster, node.domain, node.domain_id), []).append(node)
    counts = []
    for (cluster, domain, short), nodes in nodes_by_domain.items():
        healthy = sum(node.group is Group.HEALTHY for node in nodes)
        not_seen = sum(not node.seen for node in nodes)
        drained = sum(bool(node.seen and node.drained_by) for node in nodes)
        other = len(nodes) - healthy - drained - not_seen
        usable = {node.node for node in nodes if node.group in USABLE}
        largest, blocks = len(usable), None
        if topology is not None and (found := _blocks(topology, {node.node for node in nodes}, usable)):
            largest = largest_job([block.usable for block in found], topology)
            blocks = tuple(block for block in found if block.nodes)
        numbers = (len(nodes), healthy, drained, not_seen, other)
        counts.append(DomainCount(cluster, domain, short, *numbers, largest, blocks))
    return sorted(counts, key=lambda d: (-d.drained - d.not_seen, -d.other, d.cluster, d.domain))


def _blocks(topology: BlockTopology, nodes: Set[str], usable: Set[str]) -> list[BlockCount]:
    """Return the counts for all blocks in Slurm's order, or [] if none of the blocks has a node of the domain."""
    counts = [BlockCount(block.name, len(block.nodes & nodes), len(block.nodes & usable)) for block in topology.blocks]
    return counts if any(count.nodes for count in counts) else []


def topology_notes(fleet: Fleet, topology: BlockTopology) -> list[str]:
    """Return a note if the topology does not apply to all NVLink domains."""
    in_blocks: Set[str] = frozenset().union(*(block.nodes for block in topology.blocks))
    has_block: dict[tuple[str, str], bool] = {}
    for node in fleet.nodes:
        if node.domain:
            key = (node.domain_id, node.domain)
            has_block[key] = has_block.get(key, False) or node.node in in_blocks
    if not has_block:
        return ["--topology has no effect, because no node reports an NVLink domain"]
    missing = sorted(_truncate(short, 48) for (short, _), found in has_block.items() if not found)
    if not missing:
        return []
    more = f" and {len(missing) - MAX_DOMAINS_IN_NOTE:,} more" if len(missing) > MAX_DOMAINS_IN_NOTE else ""
    names = f"domain{'s' if missing[1:] else ''} {', '.join(missing[:MAX_DOMAINS_IN_NOTE])}{more}"
    return [f"--topology: none of its blocks has a node of NVLink {names}; compare the node names"]


def _domain_texts(fleet: Fleet, topology: BlockTopology | None) -> list[str]:
    """Return a line for each NVLink domain with a node that is not healthy, and one line for the other domains."""
    counts = count_domains(fleet, topology)
    several = len({node.cluster for node in fleet.nodes}) > 1
    texts = []
    for d in counts:
        if d.healthy == d.nodes:
            continue
        numbers = (
            (d.healthy, "healthy"),
            (d.drained, "drained"),
            (d.not_seen, "not reporting"),
            (d.other, "with problems"),
        )
        parts = ", ".join(f"{number:,} {label}" for number, label in numbers if number)
        name = f"{d.cluster}/{d.id}" if several else d.id
        job = f"largest job: {plural(d.largest_job, 'node')}"
        texts.append(f"NVLink domain {_truncate(name, 48)}: {plural(d.nodes, 'node')}: {parts}; {job}{_block_text(d)}")
    if texts:
        texts.append(LARGEST_JOB_NOTE if topology is None else LARGEST_JOB_NOTE_WITH_BLOCKS)
    if healthy := sum(d.healthy == d.nodes for d in counts):
        more = "other " if texts else ""
        texts.append(f"{plural(healthy, f'{more}NVLink domain')}: all nodes are healthy")
    return texts


def _block_text(domain: DomainCount) -> str:
    """Return text with the usable nodes of each block, if the domain has several."""
    if domain.blocks is None or len(domain.blocks) < 2:
        return ""
    blocks = [f"{_truncate(block.block, 48)} {block.usable} of {block.nodes}" for block in domain.blocks]
    return f" (usable nodes by block: {', '.join(blocks)})"


# --- a row


class Row(NamedTuple):
    node: str
    health: str
    slurm: str
    since: str
    why: str


def _row(fleet: Fleet, node: NodeStatus, with_cluster: bool) -> Row:
    name = f"{node.cluster}/{node.node}" if with_cluster else node.node
    since = duration(max(0.0, fleet.time - node.since)) if node.since else ""
    return Row(
        _truncate(name, 48),
        node.health or "unknown",
        SLURM_LABELS.get(node.group, "in service"),
        since,
        explain_node(fleet, node),
    )


def explain_node(fleet: Fleet, node: NodeStatus) -> str:
    """Explain a node's state in one line."""
    if not node.seen:
        seen = "" if node.last_seen else " and did not report in the last 7 days"
        return "; ".join(filter(None, (_repair_text(fleet, node), f"does not answer Prometheus{seen}")))
    parts = [text] if (text := _repair_text(fleet, node)) else []
    acting = [c for c in node.conditions if c.is_enforced and c.severity]
    worst = _truncate(f"{acting[0].code} {acting[0].subject}".strip(), MAX_TEXT_LENGTH) if acting else ""
    if node.drained_by:
        reason = _truncate(node.reason, MAX_TEXT_LENGTH) or "reason unknown"
        is_healthds = node.drained_by in HEALTHD_OWNERS
        parts.append(reason.removeprefix("healthd: ") if is_healthds else reason)
        worst = "" if is_healthds and any(c.code in node.reason for c in acting) else worst
    more = f"+{len(acting) - 1} more" if len(acting) > 1 else ""
    parts += [" ".join(filter(None, (worst, more)))] if worst or more else []
    if node.group is Group.DRAIN_WAITING:
        delay_text = " and ".join(DELAY_LABELS[name] for name in node.delayed_by) or "run healthd status on the node"
        where = f" in {_truncate(node.limit_partition, 48)}" if node.limit_partition else ""
        parts.append(f"not drained: {delay_text}{where}")
    elif node.group is Group.BROKEN and not node.acknowledged and not parts:
        parts.append("run healthd status on the node")
    acknowledged_count = sum(c.acknowledged for c in node.conditions)
    if acknowledged_count:
        parts.append(f"{acknowledged_count} acknowledged")
    if node.health == "unknown":
        parts.append("a check did not complete")
    if node.stale_seconds:
        has_time = node.stale_seconds <= fleet.time - MIN_TIME
        parts.append(
            f"no check ran for {duration(node.stale_seconds)}" if has_time else "time of the last checks unknown"
        )
    if node.slurm_problem and "slurm" not in node.delayed_by:
        parts.append("Slurm does not answer")
    if node.paused_until and "pause" not in node.delayed_by:
        parts.append(f"paused, ends in {duration(max(0.0, node.paused_until - fleet.time))}")
    return "; ".join(parts)


def _repair_text(fleet: Fleet, node: NodeStatus) -> str:
    """Return the progress of a repair by healthd, or ""."""
    if node.repair_failed:
        return "the repair failed: a person must act"
    if not node.is_in_repair:
        return ""
    is_late = node.is_repair_late(fleet.time)
    late = f", {duration(fleet.time - node.repair_deadline)} late" if is_late else ""
    if not node.seen:
        return f"does not come back from a repair{late}" if is_late else "being repaired"
    step = STEP_LABELS.get(node.repair_step, _truncate(node.repair_step, 48))
    stage = STAGE_LABELS.get(node.repair_stage, _truncate(node.repair_stage, 48))
    return f"repair: {step} {stage}{late}"


# --- facts about all nodes


def _common_text(fleet: Fleet) -> str:
    """Return the modes, the versions and the number of paused nodes."""
    reachable = [node for node in fleet.nodes if node.seen]
    paused = sum(bool(node.paused_until) for node in reachable)
    parts = [
        _format_kinds("mode", Counter(node.mode for node in reachable)),
        _format_kinds("healthd", Counter(node.version for node in reachable)),
    ]
    return "; ".join([*filter(None, parts), *([f"{paused:,} paused"] if paused else [])])


def _format_kinds(label: str, counts: Mapping[str, int]) -> str:
    named = {kind: count for kind, count in counts.items() if kind}
    if len(counts) == len(named) == 1:
        return f"{label} {_truncate(next(iter(named)), 40)}"
    kinds = sorted(named.items(), key=lambda kind: (-kind[1], kind[0]))
    more = [f"{len(kinds) - 5} more"] if len(kinds) > 5 else []
    texts = [*(f"{_truncate(kind, 40)} on {count:,}" for kind, count in kinds[:5]), *more]
    return f"{label} {', '.join(texts)}" if texts else ""


def _unreachable_text(fleet: Fleet) -> str:
    times = [node.last_seen for node in fleet.nodes if not node.seen]
    if not all(times):
        return ""
    return f" for {duration(max(0.0, fleet.time - max(times)))}{' or more' if len(times) > 1 else ''}"


def _repair_counts(fleet: Fleet, group: Group) -> str:
    """Return text with the number of nodes of this group that healthd repairs, or ""."""
    nodes = [node for node in fleet.nodes if node.group is group]
    late = sum(node.is_repair_late(fleet.time) for node in nodes)
    active = sum(node.is_in_repair for node in nodes) - late
    failed = sum(node.repair_failed for node in nodes)
    counts = ((active, "being repaired"), (late, "with a late repair"), (failed, "with a failed repair"))
    texts = [f"{count:,} {text}" for count, text in counts if count]
    return f" ({', '.join(texts)})" if texts else ""


def _acknowledged_text(fleet: Fleet) -> str:
    """Return text with the number of broken nodes that are acknowledged."""
    broken = [node.acknowledged for node in fleet.nodes if node.group is Group.BROKEN]
    if all(broken):
        return " (acknowledged)"
    return f" ({sum(broken):,} acknowledged)" if any(broken) else ""


def _host_lists(nodes: Sequence[NodeStatus]) -> str:
    clusters = sorted({node.cluster for node in nodes})
    lists = [(cluster, to_hostlist(node.node for node in nodes if node.cluster == cluster)) for cluster in clusters]
    return ", ".join(f"{cluster}: {names}" if len(clusters) > 1 else names for cluster, names in lists)


def _truncate(value: str, max_length: int) -> str:
    value = plain(value)
    return value if len(value) <= max_length else f"{value[: max_length - 3]}..."
