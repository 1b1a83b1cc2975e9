"""State of all nodes as text and as JSON. Pure."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from healthd.common.duration import duration
from healthd.common.page import Page, plain, plural
from healthd.common.slurm.hostlist import fold
from healthd.fleet.status.node import ORDERS, OURS, SEVERITIES, STATUS_OF, Group, NodeNow
from healthd.fleet.status.queries import EARLIEST, Fleet

FEW = 30  # up to this many nodes with the same text have a row each; more become one host list
LONGEST = 300  # characters of a Reason, or of a name chosen by others
WORDS = {
    Group.HELD: "broken and in service",
    Group.NOT_SEEN: "not seen",
    Group.DRAINED: "drained by healthd",
    Group.BROKEN: "broken",
    Group.UNKNOWN: "unknown",
    Group.WARNING: "warning",
    Group.DRAINED_BY_OTHERS: "drained by others",
    Group.HEALTHY: "healthy",
}
SLURM = {
    Group.HELD: "in service",
    Group.NOT_SEEN: "not seen",
    Group.DRAINED: "drained",
    Group.DRAINED_BY_OTHERS: "by others",
}
HOLDS = {
    "observe": "mode observe",
    "pause": "paused",
    "limit": "waiting for the fleet limit",
    "slurm": "Slurm does not answer",
}


def chosen(fleet: Fleet, drained: bool = False, problems: bool = False, order: str = "worst") -> list[NodeNow]:
    """Select and sort nodes. drained: only those with a drain. problems: only those not healthy and in service."""
    nodes = sorted(fleet.nodes, key=ORDERS[order])
    if drained:
        return [node for node in nodes if node.drained_by]
    return [node for node in nodes if node.group is not Group.HEALTHY or node.paused_until] if problems else nodes


def status(fleet: Fleet) -> int:
    """Return the exit status: 0 all well, 1 warning or unknown, 2 broken, drained by healthd or unreachable."""
    return max((STATUS_OF[node.group] for node in fleet.nodes), default=0)


def text(fleet: Fleet, nodes: Sequence[NodeNow], page: Page, every: bool = False) -> str:
    """Return the summary, then a row per node. Many nodes with the same text are one host list, unless `show_all`."""
    lines = [*page.wrap(summary(fleet)), *page.wrap(_alike(fleet))]
    lines += [line for note in fleet.notes for line in page.wrap(f"note: {note}")]
    said: dict[tuple[str, ...], list[tuple[NodeNow, Row]]] = {}
    several = len({node.cluster for node in fleet.nodes}) > 1
    for node in nodes:
        row = _row(fleet, node, several)
        said.setdefault((row.health, row.slurm, row.why), []).append((node, row))
    rows = [one for alike in said.values() if every or len(alike) <= FEW for one in alike]
    if rows:
        place = {id(node): at for at, node in enumerate(nodes)}
        rows.sort(key=lambda one: place[id(one[0])])
        lines += ["", *page.table(("node", "health", "slurm", "for", "why"), [row for _, row in rows])]
    for (health, slurm, why), alike in said.items():
        if not every and len(alike) > FEW:
            what = "healthy" if (health, why) == ("healthy", "") else f"{health}, {slurm}{', ' if why else ''}{why}"
            lines += ["", *page.item(f"{len(alike):,} {what}: {_folded([node for node, _ in alike])}")]
    return "\n".join(lines) + "\n"


def summary(fleet: Fleet) -> str:
    """Return "2,000 nodes: 1,996 healthy, 3 drained by healthd, 1 not seen for 2 h"."""
    groups = Counter(node.group for node in fleet.nodes)
    said = []
    for group in (Group.HEALTHY, *(group for group in Group if group is not Group.HEALTHY)):
        if groups[group]:
            more = _unseen_for(fleet) if group is Group.NOT_SEEN else _known(fleet) if group is Group.BROKEN else ""
            said.append(f"{groups[group]:,} {WORDS[group]}{more}")
    return f"{plural(len(fleet.nodes), 'node')}: {', '.join(said)}"


def document(fleet: Fleet, nodes: Iterable[NodeNow]) -> dict[str, Any]:
    """Return the document of `--json` (docs/json.md). Unknown values are null."""
    groups = Counter(node.group for node in fleet.nodes)
    return {
        "answer": "status",
        "version": 1,
        "time": fleet.time,
        "counts": {"nodes": len(fleet.nodes), **{group.value: groups[group] for group in Group}},
        "paused": sum(bool(node.paused_until) for node in fleet.nodes),
        "nodes": [_json(node) for node in nodes],
        "notes": list(fleet.notes),
    }


def _json(node: NodeNow) -> dict[str, Any]:
    told = dataclasses.asdict(node)
    times = ("last_seen", "drained_since", "paused_until", "waiting_since", "stale_seconds")
    texts = ("health", "mode", "version", "drained_by", "reason", "limit_partition")
    conditions = [
        {**dataclasses.asdict(c), "severity": SEVERITIES[c.severity], "since": c.since or None} for c in node.conditions
    ]
    return {
        **told,
        **{name: told[name] or None for name in (*times, *texts)},
        "group": node.group.value,
        "delayed_by": list(node.delayed_by),
        "conditions": conditions,
    }


# --- a row


class Row(NamedTuple):
    node: str
    health: str
    slurm: str
    since: str
    why: str


def _row(fleet: Fleet, node: NodeNow, with_cluster: bool) -> Row:
    name = f"{node.cluster}/{node.node}" if with_cluster else node.node
    since = duration(max(0.0, fleet.time - node.since)) if node.since else ""
    return Row(_short(name, 48), node.health or "unknown", SLURM.get(node.group, "in service"), since, why(fleet, node))


def why(fleet: Fleet, node: NodeNow) -> str:
    """Explain a node's state in one line."""
    if not node.seen:
        return f"does not answer Prometheus{'' if node.last_seen else ', not once in the last 7 days'}"
    said = []
    acting = [c for c in node.conditions if c.acts and c.severity]
    worst = _short(f"{acting[0].code} {acting[0].subject}".strip(), LONGEST) if acting else ""
    if node.drained_by:
        reason = _short(node.reason, LONGEST) or "reason unknown"
        ours = node.drained_by in OURS
        said.append(reason.removeprefix("healthd: ") if ours else reason)
        worst = "" if ours and any(c.code in node.reason for c in acting) else worst
    more = f"+{len(acting) - 1} more" if len(acting) > 1 else ""
    said += [" ".join(filter(None, (worst, more)))] if worst or more else []
    if node.group is Group.HELD:
        held = " and ".join(HOLDS[name] for name in node.delayed_by) or "run healthd status on the node"
        where = f" of {_short(node.limit_partition, 48)}" if node.limit_partition else ""
        said.append(f"not drained: {held}{where}")
    elif node.group is Group.BROKEN and not node.acknowledged and not said:
        said.append("run healthd status on the node")
    known = sum(c.acknowledged for c in node.conditions)
    if known:
        said.append(f"{known} acknowledged")
    if node.health == "unknown":
        said.append("a check did not complete")
    if node.stale_seconds:
        when_known = node.stale_seconds <= fleet.time - EARLIEST
        said.append(
            f"no check ran for {duration(node.stale_seconds)}" if when_known else "time of the last checks unknown"
        )
    if node.slurm_problem and "slurm" not in node.delayed_by:
        said.append("Slurm does not answer")
    if node.paused_until and "pause" not in node.delayed_by:
        said.append(f"paused, ends in {duration(max(0.0, node.paused_until - fleet.time))}")
    return "; ".join(said)


# --- facts about all nodes


def _alike(fleet: Fleet) -> str:
    """Return modes and versions, and how many nodes are paused."""
    seen = [node for node in fleet.nodes if node.seen]
    paused = sum(bool(node.paused_until) for node in seen)
    said = [
        _kinds("mode", Counter(node.mode for node in seen)),
        _kinds("healthd", Counter(node.version for node in seen)),
    ]
    return "; ".join([*filter(None, said), *([f"{paused:,} paused"] if paused else [])])


def _kinds(what: str, counts: Mapping[str, int]) -> str:
    named = {kind: count for kind, count in counts.items() if kind}
    if len(counts) == len(named) == 1:
        return f"{what} {_short(next(iter(named)), 40)}"
    kinds = sorted(named.items(), key=lambda kind: (-kind[1], kind[0]))
    more = [f"{len(kinds) - 5} more"] if len(kinds) > 5 else []
    shown = [*(f"{_short(kind, 40)} on {count:,}" for kind, count in kinds[:5]), *more]
    return f"{what} {', '.join(shown)}" if shown else ""


def _unseen_for(fleet: Fleet) -> str:
    times = [node.last_seen for node in fleet.nodes if not node.seen]
    if not all(times):
        return ""
    return f" for {duration(max(0.0, fleet.time - max(times)))}{' or more' if len(times) > 1 else ''}"


def _known(fleet: Fleet) -> str:
    """Return how many of the broken nodes are acknowledged."""
    broken = [node.acknowledged for node in fleet.nodes if node.group is Group.BROKEN]
    if all(broken):
        return " (acknowledged)"
    return f" ({sum(broken):,} acknowledged)" if any(broken) else ""


def _folded(nodes: Sequence[NodeNow]) -> str:
    clusters = sorted({node.cluster for node in nodes})
    lists = [(cluster, fold(node.node for node in nodes if node.cluster == cluster)) for cluster in clusters]
    return ", ".join(f"{cluster}: {names}" if len(clusters) > 1 else names for cluster, names in lists)


def _short(words: str, most: int) -> str:
    words = plain(words)
    return words if len(words) <= most else f"{words[: most - 3]}..."
